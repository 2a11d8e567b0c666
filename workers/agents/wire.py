"""What the processes of one instance's rollouts say to each other: msgpack behind four bytes of length. Torch-free.

engine process                session service                       user worker
Begin 7       ------------->  chooses a worker   ---- Start 1 ---->  calls the function
              <--- Draw 31 -  renders, records  <---- Ask 2 of 1 --  chat.reply(...)
Drawn 31      ------------->  parses             ---- Told 2 ----->  the reply
              <- Finished 7 -  checks            <---- Done 1 -----  returned samples

A ticket names a rollout, a run one attempt at it; numbers of calls are the asking side's own.
"""

import asyncio
import socket
import time
from typing import Any, Generic, TypeVar

import msgspec

from asyncflow.decoding import msgpack_decoder
from workers.agents.rendering import Message
from workers.calls.frames import frame, read_frame
from workers.settings.data import TemplateSettings


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The service's first message.

    Attributes:
        model_dir: with the tokenizer.
        renderer: `model.renderer`.
        function, agent, command, tools: as the configuration's section `rollout` names them; one of the first three.
        timeout_s: of a rollout.
        max_turns, max_tokens, max_context: budgets of a rollout: calls, drawn tokens, tokens of one call; 0: none.
        max_response_tokens: of one call.
        max_attempts: of a rollout whose function fails.
        num_workers: processes that run users' code.
        path: where modules are sought; as the file system spells it.
        scratch: directory for the rollouts' own files.
        models: `rollout.models`.
        max_memory_bytes, max_file_bytes: limits of each process that runs users' code; 0: none.
        stall_timeout_s: how long one step of a rollout may hold the event loop of its process.
        seal, port: of the gateway of a service before this one; see `workers.agents.gateway`.
        templates: what chat templates are told besides the messages.
    """

    model_dir: str
    renderer: str | None
    function: str | None
    agent: str | None
    command: list[str]
    tools: list[str]
    timeout_s: float
    max_turns: int
    max_tokens: int
    max_context: int
    max_response_tokens: int
    max_attempts: int
    num_workers: int
    path: list[bytes]
    scratch: str
    models: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    max_memory_bytes: int = 0
    max_file_bytes: int = 0
    seal: bytes = b""
    port: int = 0
    templates: TemplateSettings = TemplateSettings()
    stall_timeout_s: float = 10.0


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Run a rollout.

    Attributes:
        ticket: names it.
        task: the data row, JSON.
        index, group, member: of the row; `seed`: of its random numbers.
    """

    ticket: int
    task: str
    index: int
    group: int
    member: int
    seed: int


class Abandon(msgspec.Struct, frozen=True, tag=True):
    """Drop all rollouts: their leases are void."""


class Drawn(msgspec.Struct, frozen=True, tag=True):
    """The engine's response to a `Draw`.

    Attributes:
        call: of the `Draw`.
        token_ids, log_probs, versions: one per token that was drawn, up to the end.
        truncated: cut at `max_tokens`.
        stop: the string that ended it; "": something else did.
        shown: where a string ended it: tokens of what stands before the string, for the agent; see `Stopped`.
    """

    call: int
    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    truncated: bool
    stop: str = ""
    shown: list[int] | None = None


class NotDrawn(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot take this prompt; says why."""

    call: int
    text: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The service takes rollouts; the gateway's port, 0 if it has none."""

    port: int


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The user's function cannot be used; says why."""

    text: str


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    """The service cannot start now, which may be otherwise later; says why."""

    text: str


class Warned(msgspec.Struct, frozen=True, tag=True):
    """What the user must know of, though the rollouts go on."""

    text: str


class Draw(msgspec.Struct, frozen=True, tag=True):
    """Ask the engine to continue these tokens until it draws one of `stop_ids`, or the text has one of `stop`."""

    call: int
    ticket: int
    prompt: list[int]
    max_tokens: int
    stop_ids: list[int]
    seed: int
    stop: list[str] = []


class Undraw(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for this call any more."""

    call: int


class SampleTokens(msgspec.Struct, frozen=True):
    """One token sequence of a rollout; `response_mask` is 1 where the policy drew.

    Log-probabilities and versions have a number per drawn token.
    """

    token_ids: list[int]
    response_mask: list[int]
    log_probs: list[float]
    versions: list[int]


class Finished(msgspec.Struct, frozen=True, tag=True):
    """A rollout came to its end.

    Attributes:
        ticket: which.
        samples: at least one with drawn tokens.
        reward: None: `reward.function` scores `response`, the last reply's text.
        response: see there.
        truncated: a budget ended it, or its last reply was cut.
        metrics: of the function's own.
        conversations: messages of each sample, for people.
        turns: calls of the policy; `tool_s`: time since the first in which it waited for none (s).
        bridge_failures: turns that began a new sample though they went on from a reply.
        cpu_s: processor time of the service, and of the function's process, since their last rollout ended (s).
    """

    ticket: int
    samples: list[SampleTokens]
    reward: float | None
    response: str
    truncated: bool
    metrics: dict[str, float]
    conversations: list[list[Message]]
    turns: int
    tool_s: float
    bridge_failures: int
    cpu_s: float = 0.0


class Retried(msgspec.Struct, frozen=True, tag=True):
    """An attempt at a rollout failed, and it begins again; says why."""

    ticket: int
    text: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A rollout failed `max_attempts` times, or its function skips the task (then `skipped`); the last reason."""

    ticket: int
    text: str
    skipped: bool = False


class Start(msgspec.Struct, frozen=True, tag=True):
    """Call the user's function.

    Attributes:
        run: names this attempt at a rollout.
        rollout: which.
        attempt: from 0.
        base_url, key: of the session, for an agent.
        timeout_s: until the rollout is cancelled.
        scratch: a directory of its own.
    """

    run: int
    rollout: Begin
    attempt: int
    base_url: str
    key: str
    timeout_s: float
    scratch: str


class Begun(msgspec.Struct, frozen=True, tag=True):
    """A rollout's function is called: its time begins."""

    run: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Cancel a rollout: its time is up or it was abandoned."""

    run: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Say that the loop runs."""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """Reply to `Ping`: the event loop runs."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The worker has imported the function and the tools."""


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Have the policy reply to a conversation, or go on behind tokens.

    Attributes:
        number: of the call.
        run: the rollout that asks.
        messages, tools: the conversation; or
        prompt: the tokens.
        max_tokens: None: `rollout.max_response_tokens`.
        stop: texts that end the reply.
    """

    number: int
    run: int
    messages: list[Message]
    tools: list[Message] | None
    prompt: list[int] | None
    max_tokens: int | None
    stop: list[str]


class Told(msgspec.Struct, frozen=True, tag=True):
    """The reply to an `Ask`.

    Attributes:
        number: of the call.
        node: names what was drawn; `Done` refers to it.
        message, finish_reason: as OpenAI's API has them.
        token_ids: that were drawn.
    """

    number: int
    node: int
    message: Message
    finish_reason: str
    token_ids: list[int]


class NotTold(msgspec.Struct, frozen=True, tag=True):
    """There is no reply; `budget`: since the rollout has spent what it may."""

    number: int
    text: str
    budget: bool


class Done(msgspec.Struct, frozen=True, tag=True):
    """The function returned.

    Attributes:
        run: which attempt.
        nodes: drawn pieces; each that no other goes on from ends a sample. Empty: all that were drawn.
        reward, metrics: of the rollout.
        cpu_s: processor time of its process since another rollout returned (s).
    """

    run: int
    nodes: list[int]
    reward: float | None
    metrics: dict[str, float]
    cpu_s: float = 0.0


class Raised(msgspec.Struct, frozen=True, tag=True):
    """The function raised; `skipped`, `spent`: by `context.skip`, by a budget that it let through."""

    run: int
    text: str
    skipped: bool = False
    spent: bool = False


ToService = Setup | Begin | Abandon | Ping | Drawn | NotDrawn
FromService = Ready | Broken | NotStarted | Warned | Pong | Draw | Undraw | Finished | Retried | Failed
ToWorker = Setup | Start | Stop | Ping | Told | NotTold
FromWorker = Loaded | Broken | Pong | Begun | Ask | Done | Raised


# Messages over a stream socket in an event loop: msgpack behind four bytes of length. Torch-free.

S = TypeVar("S", bound=msgspec.Struct)
R = TypeVar("R")


class ProcessorTime:
    """Counts the processor time of this process."""

    def __init__(self) -> None:
        self._counted_s = time.process_time()

    def since_last(self) -> float:
        """Return what it took since this was asked for the last time (s)."""
        before, self._counted_s = self._counted_s, time.process_time()
        return self._counted_s - before


class Channel(Generic[S, R]):
    """Sends messages of type S and receives those of type R."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: Any) -> None:
        """See `open`."""
        self._reader = reader
        self._writer = writer
        self._decoder = msgpack_decoder(received)

    @classmethod
    async def open(cls, connection: socket.socket, received: Any) -> "Channel[Any, Any]":
        """Take a connected socket over.

        Args:
            connection: closed by `close`.
            received: the union of the types that come.
        """
        reader, writer = await asyncio.open_connection(sock=connection)
        return cls(reader, writer, received)

    def send(self, message: S) -> None:
        """Send a message; returns at once. To a peer that is gone it goes nowhere.

        Raises:
            TypeError, ValueError: it cannot travel.
        """
        data = frame(message)
        if not self._writer.is_closing():
            self._writer.write(data)

    async def receive(self) -> R | None:
        """Return the next message; None: the peer is gone, or sent what is not a message."""
        try:
            message: R = self._decoder.decode(await read_frame(self._reader))
        except (EOFError, ConnectionError, msgspec.DecodeError):
            return None
        return message

    async def drain(self) -> None:
        """Wait until the peer's side took what was sent."""
        await self._writer.drain()

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._writer.close()
