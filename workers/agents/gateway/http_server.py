"""The gateway's HTTP server, on this host's loopback interface only. Runs in the session service's event loop.

    open() -> key                 a session's random key, void once it is closed
    base_url                      Anthropic's SDK takes it as it is, OpenAI's with `/v1`

Statuses: 400 an unsupported field, or `context_length_exceeded`; 401 unknown key; 410 the session has ended, or the run
was restored since; 413 body over the limit. A streamed response is sent once the turn is finished; until then there is
a comment every `keep_alive_s`.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b

import msgspec
from aiohttp import web

from asyncflow.decoding import UNREADABLE
from workers.agents.gateway import anthropic_messages as messages
from workers.agents.gateway import chat_completions, responses
from workers.agents.gateway.dialect import Body, Dialect, FinishedTurn, SessionMemory, event
from workers.agents.gateway.fields import one_system_message
from workers.agents.rollout_errors import AgentError, BadAgentRequest, SessionGone
from workers.agents.turns import ChatRequest, Sessions

# One session's turns at the gateway: which requests repeat an earlier one, and when a turn is cancelled.
#
#     same Idempotency-Key                                    the first answer, once it is there
#     same body, SDK's retry header (x-stainless-retry-count) the first answer
#     same body, still unanswered                             shares the pending answer
#     same body otherwise                                     a fork: drawn anew
#
# A failed turn is forgotten, so that its retry is drawn. A turn that nobody waits for any longer continues for
# `retry_wait_s`, which exceeds the SDKs' pause before a retry, and is then cancelled.

_IDEMPOTENCY = "Idempotency-Key"
_RETRY = "x-stainless-retry-count"
_KEPT = 32  # answers per session that are kept for retries, which come within seconds. (Each holds its whole history.)


@dataclass(eq=False)
class Turn:
    name: str  # the client's idempotency key, or the digest
    digest: str  # of path and body
    task: "asyncio.Task[FinishedTurn]"
    streamed: bool  # the client wants a stream
    num_waiting: int = 0  # requests that wait for it


class SessionTurns:
    """Turns of one key. Belongs to the gateway's loop."""

    def __init__(self, key: str, sessions: Sessions, *, model: str, retry_wait_s: float) -> None:
        self.memory = SessionMemory()
        self._key = key
        self._sessions = sessions
        self._model = model
        self._retry_wait_s = retry_wait_s
        self._turns: dict[str, Turn] = {}

    def find_or_begin_turn(self, dialect: Dialect, path: str, raw: bytes, headers: Mapping[str, str]) -> Turn:
        """Return the turn that a request asks for, an earlier one or a new one. Raises BadAgentRequest for an
        unsupported field."""
        digest = blake2b(raw, key=path.encode(), digest_size=16).hexdigest()
        idempotency_key = headers.get(_IDEMPOTENCY)
        name = idempotency_key or digest
        known = self._turns.get(name)
        # A turn that is being cancelled cannot be joined.
        if known is not None and known.task.cancelling():
            known = None
        if known is not None and known.digest != digest:
            raise BadAgentRequest(_IDEMPOTENCY, "was already used with another body")
        # Anything else with the same body is a fork; see the table above.
        if known is not None and (idempotency_key or headers.get(_RETRY, "0") != "0" or not known.task.done()):
            return known
        body = parsed(raw)
        body.setdefault("model", self._model)
        asked = dialect.read(body, self.memory)
        task = asyncio.ensure_future(self._draw_answer(dialect, body, asked))
        self._turns.pop(name, None)  # makes the new turn the youngest in the dict's order
        self._forget_old()
        turn = self._turns[name] = Turn(name, digest, task, streamed=bool(body.get("stream")))
        task.add_done_callback(lambda _: self._forget_failed(turn))
        return turn

    async def answer(self, turn: Turn, *, timeout_s: float | None = None) -> FinishedTurn | None:
        """Wait for a turn; None: it did not finish in time. Raises the session service's errors."""
        await asyncio.wait({turn.task}, timeout=timeout_s)
        if turn.task.cancelled():
            raise SessionGone("the session ended during this turn")
        return turn.task.result() if turn.task.done() else None

    @contextmanager
    def hold_turn(self, turn: Turn) -> Iterator[None]:
        """Keep a turn from being cancelled while a request waits for it."""
        turn.num_waiting += 1
        try:
            yield
        finally:
            turn.num_waiting -= 1
            if not turn.task.done():
                asyncio.get_running_loop().call_later(self._retry_wait_s, _cancel_if_left, turn)

    def close(self) -> None:
        for turn in list(self._turns.values()):
            turn.task.cancel()

    async def _draw_answer(self, dialect: Dialect, body: Body, asked: ChatRequest) -> FinishedTurn:
        answer_id, created = secrets.token_hex(12), int(time.time())
        request = replace(asked, messages=one_system_message(asked.messages))
        answer = FinishedTurn(answer_id, created, body, asked, await self._sessions.complete_turn(self._key, request))
        self.memory.add_answer(answer, named=dialect.NAMES_ANSWERS)
        return answer

    def _forget_old(self) -> None:
        done = [name for name, turn in self._turns.items() if turn.task.done()]
        for name in done[:-_KEPT]:
            del self._turns[name]

    def _forget_failed(self, turn: Turn) -> None:
        failed = turn.task.cancelled() or turn.task.exception() is not None
        if failed and self._turns.get(turn.name) is turn:
            del self._turns[turn.name]


def parsed(raw: bytes) -> Body:
    """Return a request's body; raises BadAgentRequest if it is not a JSON object."""
    try:
        body = msgspec.json.decode(raw)
    except UNREADABLE as error:
        raise BadAgentRequest("body", f"is not JSON ({error})") from error
    if not isinstance(body, dict):
        raise BadAgentRequest("body", "must be an object")
    return body


def _cancel_if_left(turn: Turn) -> None:
    if not turn.num_waiting:
        turn.task.cancel()


_DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": chat_completions,
    "/v1/messages": messages,
    "/v1/responses": responses,
}
_COUNT = "/v1/messages/count_tokens"
_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
_GOODBYE_S = 2.0
_MARK_LETTERS = 32


class Gateway:
    """Serves agents' sessions.

        gateway = Gateway(sessions)
        await gateway.start()
        key = gateway.open()
        ...                           # an agent runs with gateway.base_url and key
        gateway.close(key)
        await gateway.stop()

    Args:
        model: name that is listed; requests may give any.
        keep_alive_s: pause between comments in a waiting stream.
        retry_wait_s: how long a turn continues after its client disconnected; SDKs retry within 8 s.
        seal: secret that marks issued keys, so that those of an earlier gateway are recognized; b"": a random one.
        port: of the earlier gateway; 0: any free one.
    """

    def __init__(
        self,
        sessions: Sessions,
        *,
        model: str = "policy",
        keep_alive_s: float = 10.0,
        retry_wait_s: float = 20.0,
        max_body_bytes: int = 2**24,
        seal: bytes = b"",
        port: int = 0,
    ) -> None:
        self._sessions = sessions
        self._model = model
        self._keep_alive_s = keep_alive_s
        self._retry_wait_s = retry_wait_s
        self._seal = seal or secrets.token_bytes(32)
        self._turns: dict[str, SessionTurns] = {}
        app = web.Application(client_max_size=max_body_bytes, middlewares=[_refusals])
        app.add_routes([web.post(path, self._handle_turn) for path in _DIALECTS])
        app.add_routes([web.post(_COUNT, self._handle_count), web.get("/v1/models", self._list_models)])
        # `handler_cancellation`: a request whose client disconnects stops waiting for its turn.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_GOODBYE_S)
        self.port = port
        self.base_url = ""

    async def start(self) -> None:
        """Listen on `port`, or on a free one if another program has taken it; updates `base_url` and `port`."""
        await self._runner.setup()
        with contextlib.suppress(OSError):
            await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        if not self._runner.addresses:
            await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, self.port = self._runner.addresses[0][:2]
        self.base_url = f"http://{host}:{self.port}"

    async def stop(self) -> None:
        for key in list(self._turns):
            self.close(key)
        await self._runner.cleanup()

    def open(self) -> str:
        name = secrets.token_urlsafe(32)
        key = f"sk-{name}{self._seal_name(name)}"
        self._turns[key] = SessionTurns(key, self._sessions, model=self._model, retry_wait_s=self._retry_wait_s)
        return key

    def close(self, key: str) -> None:
        """Revoke a key, and cancel its session's turns. Idempotent."""
        turns = self._turns.pop(key, None)
        if turns is not None:
            turns.close()

    def _session(self, http: web.Request) -> tuple[str, SessionTurns]:
        # OpenAI's clients send the first header, Anthropic's the second.
        bearer = http.headers.get("Authorization", "").removeprefix("Bearer ")
        key = http.headers.get("x-api-key", bearer)
        turns = self._turns.get(key)
        if turns is None and self._is_ours(key):
            raise SessionGone("the session of this key has ended")
        if turns is None:
            raise web.HTTPUnauthorized(reason="no session has this key")
        return key, turns

    def _is_ours(self, key: str) -> bool:
        """Return whether a gateway with this seal issued the key, so that ended ones need not be stored."""
        name, mark = key[3:-_MARK_LETTERS], key[-_MARK_LETTERS:]
        # `compare_digest` accepts only ASCII text.
        return key.isascii() and secrets.compare_digest(mark, self._seal_name(name))

    def _seal_name(self, name: str) -> str:
        return blake2b(name.encode(), key=self._seal, digest_size=_MARK_LETTERS // 2).hexdigest()

    async def _handle_turn(self, http: web.Request) -> web.StreamResponse:
        raw = await http.read()  # before looking up the session, which may end meanwhile
        _, turns = self._session(http)
        dialect = _DIALECTS[http.path]
        turn = turns.find_or_begin_turn(dialect, http.path, raw, http.headers)
        with turns.hold_turn(turn):
            if turn.streamed:
                return await self._stream_answer(http, dialect, turns, turn)
            answer = await turns.answer(turn)
            assert answer is not None  # no deadline was given
            return _json(dialect.write(answer))

    async def _stream_answer(
        self, http: web.Request, dialect: Dialect, turns: SessionTurns, turn: Turn
    ) -> web.StreamResponse:
        """Send a finished turn in pieces."""
        # A turn that is refused before the first comment still gets its own HTTP status.
        answer = await turns.answer(turn, timeout_s=self._keep_alive_s)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await stream.prepare(http)
        try:
            while answer is None:
                await stream.write(b": keep-alive\n\n")
                answer = await turns.answer(turn, timeout_s=self._keep_alive_s)
            await stream.write(b"".join(dialect.events(answer)))
        except AgentError as refusal:
            await stream.write(event(_refusal(http.path, refusal)[1]))
        await stream.write_eof()
        return stream

    async def _handle_count(self, http: web.Request) -> web.Response:
        raw = await http.read()
        key, turns = self._session(http)
        request = messages.read_count(parsed(raw), turns.memory)
        request = replace(request, messages=one_system_message(request.messages))
        return _json({"input_tokens": self._sessions.count(key, request)})

    async def _list_models(self, http: web.Request) -> web.Response:
        self._session(http)
        model = {"id": self._model, "object": "model", "created": int(time.time()), "owned_by": "asyncflow"}
        return _json({"object": "list", "data": [model]})


@web.middleware
async def _refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except (AgentError, web.HTTPException) as refusal:
        status, body = _refusal(request.path, refusal)
        return _json(body, status)


def _refusal(path: str, error: Exception) -> tuple[int, Body]:
    """Return (status, body) of an error in the format of the path's API."""
    param: str | None = None
    code: str | None = None
    message = str(error)
    match error:
        case AgentError():
            status, code = error.status, error.code
            param = error.field if isinstance(error, BadAgentRequest) else None
        case web.HTTPException():
            status, message = error.status, error.reason
        case _:
            raise error
    dialect = messages if path in ("/v1/messages", _COUNT) else chat_completions
    return status, dialect.error(message, kind=_KINDS.get(status, "invalid_request_error"), param=param, code=code)


def _json(body: Body, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
