"""One session's turns at the gateway: which requests repeat an earlier one, and when a turn is cancelled.

    same Idempotency-Key                                    the first answer (or it is waited for)
    same body, SDK's retry header (x-stainless-retry-count) the first answer
    same body, still unanswered                             waits for the one answer
    same body otherwise                                     a fork: drawn anew

A turn that fails is forgotten, so its retry is drawn. A turn that nobody waits for any more goes on for `retry_wait_s`,
longer than SDKs pause before a retry, and is then cancelled.
"""

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b

import msgspec

from asyncflow.decoding import UNREADABLE
from workers.agents.errors import BadAgentRequest, SessionGone
from workers.agents.gateway.dialect import Answer, Body, Dialect, Memory
from workers.agents.gateway.fields import one_system_message
from workers.agents.requests import ChatRequest, Sessions

_IDEMPOTENCY = "Idempotency-Key"
_RETRY = "x-stainless-retry-count"
_KEPT = 32
"""Answers of a session that are kept for retries, which come in seconds: each has its whole history."""


@dataclass(eq=False)
class Turn:
    """One turn that is drawn, or was.

    Attributes:
        name: its client's idempotency key, else its body's digest.
        digest: of path and body.
        task: draws it.
        streamed: the answer is wanted as a stream.
        num_waiting: requests that wait for it.
    """

    name: str
    digest: str
    task: "asyncio.Task[Answer]"
    streamed: bool
    num_waiting: int = 0


class SessionTurns:
    """Turns of one key. Belongs to the gateway's loop."""

    def __init__(self, key: str, sessions: Sessions, *, model: str, retry_wait_s: float) -> None:
        self.memory = Memory()
        self._key = key
        self._sessions = sessions
        self._model = model
        self._retry_wait_s = retry_wait_s
        self._turns: dict[str, Turn] = {}

    def turn(self, dialect: Dialect, path: str, raw: bytes, headers: Mapping[str, str]) -> Turn:
        """Return the turn that a request asks for, an earlier one or a new one.

        Raises:
            BadAgentRequest: a field that is not served.
        """
        digest = blake2b(raw, key=path.encode(), digest_size=16).hexdigest()
        idempotency_key = headers.get(_IDEMPOTENCY)
        name = idempotency_key or digest
        known = self._turns.get(name)
        if known is not None and known.task.cancelling():
            known = None
        if known is not None and known.digest != digest:
            raise BadAgentRequest(_IDEMPOTENCY, "came with another body before")
        if known is not None and (idempotency_key or headers.get(_RETRY, "0") != "0" or not known.task.done()):
            return known
        body = parsed(raw)
        body.setdefault("model", self._model)
        asked = dialect.read(body, self.memory)
        task = asyncio.ensure_future(self._draw(dialect, body, asked))
        self._turns.pop(name, None)  # so that the new turn is the youngest
        self._forget_old()
        turn = self._turns[name] = Turn(name, digest, task, streamed=bool(body.get("stream")))
        task.add_done_callback(lambda _: self._ended(turn))
        return turn

    async def answer(self, turn: Turn, *, timeout_s: float | None = None) -> Answer | None:
        """Wait for a turn; None: it is not finished in time.

        Raises:
            SessionGone, ContextLengthExceeded, BadAgentRequest: as the session service raised it.
        """
        await asyncio.wait({turn.task}, timeout=timeout_s)
        if turn.task.cancelled():
            raise SessionGone("the session ended during this turn")
        return turn.task.result() if turn.task.done() else None

    @contextmanager
    def waiting(self, turn: Turn) -> Iterator[None]:
        """While a request waits for a turn, it is not cancelled."""
        turn.num_waiting += 1
        try:
            yield
        finally:
            turn.num_waiting -= 1
            if not turn.task.done():
                asyncio.get_running_loop().call_later(self._retry_wait_s, _cancel_if_left, turn)

    def close(self) -> None:
        """Cancel what is drawn."""
        for turn in list(self._turns.values()):
            turn.task.cancel()

    async def _draw(self, dialect: Dialect, body: Body, asked: ChatRequest) -> Answer:
        answer_id, created = secrets.token_hex(12), int(time.time())
        request = replace(asked, messages=one_system_message(asked.messages))
        completion = await self._sessions.complete(self._key, request)
        answer = Answer(answer_id, created, body, asked, completion)
        self.memory.add(answer, named=dialect.NAMES_ANSWERS)
        return answer

    def _forget_old(self) -> None:
        done = [name for name, turn in self._turns.items() if turn.task.done()]
        for name in done[:-_KEPT]:
            del self._turns[name]

    def _ended(self, turn: Turn) -> None:
        failed = turn.task.cancelled() or turn.task.exception() is not None
        if failed and self._turns.get(turn.name) is turn:
            del self._turns[turn.name]


def parsed(raw: bytes) -> Body:
    """Return a request's body.

    Raises:
        BadAgentRequest: it is no JSON object.
    """
    try:
        body = msgspec.json.decode(raw)
    except UNREADABLE as error:
        raise BadAgentRequest("body", f"is no JSON ({error})") from error
    if not isinstance(body, dict):
        raise BadAgentRequest("body", "must be an object")
    return body


def _cancel_if_left(turn: Turn) -> None:
    if not turn.num_waiting:
        turn.task.cancel()
