"""Messages between the processes of one instance's rollouts. Torch-free.

engine process                session service                       user worker
Begin 7       ------------->  chooses a worker   ---- Start 1 ---->  calls the function
              <--- Draw 31 -  renders, records  <---- Ask 2 of 1 --  chat.reply(...)
Drawn 31      ------------->  parses             ---- Told 2 ----->  the reply
              <- Finished 7 -  checks            <- AttemptDone 1 -  returned samples

A ticket identifies a rollout, `attempt_id` one attempt at it; the asking side numbers its calls.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from workers.agents.turns import ChatRequest, Message, Reply
from workers.calls.child_process import Loaded, Refused
from workers.settings.data import TemplateSettings

if TYPE_CHECKING:
    from workers.settings.run import RunConfig


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message to the service, and to each worker."""

    model_dir: str
    renderer: str | None  # `model.renderer`
    # function, agent, command, tools: settings of `rollout`; one of the first three is set
    function: str | None
    agent: str | None
    command: list[str]
    tools: list[str]
    timeout_s: float  # of a rollout
    # max_turns, max_tokens, max_context: budgets of a rollout: calls, drawn tokens, tokens of one call; 0: unlimited
    max_turns: int
    max_tokens: int
    max_context: int
    max_response_tokens: int  # of one call
    max_attempts: int
    num_workers: int  # processes that run user code
    scratch: str  # parent of the rollouts' own directories
    models: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)  # `rollout.models`
    # max_memory_bytes, max_file_bytes: limits of each process that runs user code; 0: none
    max_memory_bytes: int = 0
    max_file_bytes: int = 0
    # seal, port: of the gateway of a previous service; see `workers.agents.gateway`
    seal: bytes = b""
    port: int = 0
    templates: TemplateSettings = TemplateSettings()
    stall_timeout_s: float = 10.0  # how long one step of a rollout may block its process's event loop
    tells_turns: bool = False  # `reward.function` may read the turns' messages

    @staticmethod
    def from_config(
        config: "RunConfig", *, max_context: int, max_response_tokens: int, scratch: str = "", seal: bytes = b""
    ) -> "Setup":
        """Return the setup for a run's section `rollout`; the other arguments depend on the engine and the process."""
        own = config.rollout
        return Setup(
            model_dir=str(Path(config.model.path)),
            renderer=config.model.renderer,
            templates=config.data.templates,
            function=own.function,
            agent=own.agent,
            command=list(own.agent_command),
            tools=list(own.tools),
            timeout_s=own.timeout_s,
            max_turns=own.max_turns,
            max_tokens=own.max_drawn_tokens,
            max_context=max_context,
            max_response_tokens=max_response_tokens,
            max_attempts=own.max_attempts,
            num_workers=own.num_workers,
            scratch=scratch,
            models={name: served.model_dump() for name, served in own.models.items()},
            max_memory_bytes=int(own.max_memory_gb * 2**30),
            max_file_bytes=int(own.max_file_gb * 2**30),
            seal=seal,
            stall_timeout_s=own.stall_timeout_s,
            tells_turns=config.reward.is_called,
        )


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Run a rollout."""

    ticket: int
    task: str  # the data row, JSON
    # index, group, member, seed: see `workers.agents.api.Task`
    index: int
    group: int
    member: int
    seed: int


class Abandon(msgspec.Struct, frozen=True, tag=True):
    """Drop all rollouts: their leases are void."""


class Drawn(msgspec.Struct, frozen=True, tag=True):
    """The engine's response to a `Draw`."""

    call: int
    # token_ids, log_probs, versions: per drawn token, including the one that ended it
    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    truncated: bool  # cut at `max_tokens`
    stop: str = ""  # the stop string that ended it, or ""
    # If a stop string ended it: tokens of the text before that string, for the agent; see `Stopped`
    shown: list[int] | None = None


class NotDrawn(msgspec.Struct, frozen=True, tag=True):
    """The engine refuses this prompt; says why."""

    call: int
    text: str


class ServiceReady(msgspec.Struct, frozen=True, tag=True):
    """The service accepts rollouts; `port` of the gateway, 0 without one."""

    port: int


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    """The service cannot start at the moment; says why."""

    text: str


class Warned(msgspec.Struct, frozen=True, tag=True):
    """Something that the user should know, though rollouts continue."""

    text: str


class Draw(msgspec.Struct, frozen=True, tag=True):
    """Ask the engine to continue these tokens until it draws one of `stop_ids`, or the text contains one of `stop`."""

    call: int
    ticket: int
    prompt: list[int]
    max_tokens: int
    stop_ids: list[int]
    seed: int
    stop: list[str] = []


class Undraw(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for this call any longer."""

    call: int


class SampleTokens(msgspec.Struct, frozen=True):
    """One token sequence of a rollout; `response_mask` is 1 where the policy drew. `log_probs`, `versions` and
    `turn_ids` have one entry per drawn token; turns are numbered over the rollout, as they ended."""

    token_ids: list[int]
    response_mask: list[int]
    log_probs: list[float]
    versions: list[int]
    turn_ids: list[int]


class Finished(msgspec.Struct, frozen=True, tag=True):
    """A rollout finished."""

    ticket: int
    samples: list[SampleTokens]  # at least one with drawn tokens
    reward: float | None  # the sum of the turns'; None: `reward.function` scores `response`
    response: str  # text of the last reply
    truncated: bool  # a budget ended it, or its last reply was cut off
    metrics: dict[str, float]  # reported by the function
    conversations: list[list[Message]]  # messages of each sample, for people
    turns: int  # calls of the policy
    tool_s: float  # time since the first call during which no call was in flight (s)
    bridge_failures: int  # turns that began a new sample although they follow a reply
    # Processor time of the service and the function's process since their previous rollout ended (s)
    cpu_s: float = 0.0
    num_trained_turns: int = 1  # those in `samples`
    turn_rewards: list[float] | None = None  # of each of them, in order; None: there is one reward
    # Of each of them, if asked for: the messages that were new to the policy, and its reply
    turn_messages: list[list[Message]] = []


class Retried(msgspec.Struct, frozen=True, tag=True):
    """An attempt at a rollout failed and a new one begins; says why."""

    ticket: int
    text: str
    attempts: int = 1  # that failed with it: a process that ends takes all its rollouts with it


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A rollout failed `max_attempts` times, or its function skips the task (`skipped`); gives the last reason."""

    ticket: int
    text: str
    skipped: bool = False
    attempts: int = 1  # as in `Retried`


class Start(msgspec.Struct, frozen=True, tag=True):
    """Call the user's function."""

    attempt_id: int
    rollout: Begin
    attempt: int  # from 0
    # base_url, key: of the session, for an agent
    base_url: str
    key: str
    timeout_s: float  # after which the rollout is cancelled
    scratch: str  # a directory of its own


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The function of a rollout was called: its time begins."""

    attempt_id: int


class StopAttempt(msgspec.Struct, frozen=True, tag=True):
    """Cancel a rollout: its time is up, or it was abandoned."""

    attempt_id: int


class PingLoop(msgspec.Struct, frozen=True, tag=True):
    """Request a `PongLoop`, which proves that the event loop runs."""


class PongLoop(msgspec.Struct, frozen=True, tag=True):
    """Reply to `PingLoop`: the event loop runs."""


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Have the policy reply."""

    number: int  # of the call
    attempt_id: int
    request: ChatRequest


class Told(msgspec.Struct, frozen=True, tag=True):
    """The reply to an `Ask`."""

    number: int
    reply: Reply


class NotTold(msgspec.Struct, frozen=True, tag=True):
    """There is no reply; `budget`: because the rollout has spent a budget."""

    number: int
    text: str
    budget: bool


class AttemptDone(msgspec.Struct, frozen=True, tag=True):
    """The function returned."""

    attempt_id: int
    nodes: list[int]  # drawn pieces; each that no other continues ends a sample. Empty: all pieces.
    reward: float | None
    metrics: dict[str, float]
    cpu_s: float = 0.0  # processor time of its process since another rollout returned (s)
    turn_rewards: dict[int, float] | None = None  # of each piece that is trained, instead of `reward`


def attempt_done(
    attempt_id: int, nodes: Sequence[int], reward: float | list[float] | None, metrics: dict[str, float]
) -> AttemptDone:
    """Return the outcome of an agent, all of whose pieces are trained: its turns are numbered like them."""
    if isinstance(reward, list):
        return AttemptDone(attempt_id, [*nodes], None, metrics, turn_rewards=dict(enumerate(reward)))
    return AttemptDone(attempt_id, [*nodes], reward, metrics)


class Raised(msgspec.Struct, frozen=True, tag=True):
    """The function raised; `skipped`: by `context.skip`; `spent`: it let `BudgetSpent` through."""

    attempt_id: int
    text: str
    skipped: bool = False
    spent: bool = False


ToService = Setup | Begin | Abandon | PingLoop | Drawn | NotDrawn
FromService = ServiceReady | Refused | NotStarted | Warned | PongLoop | Draw | Undraw | Finished | Retried | Failed
ToWorker = Setup | Start | StopAttempt | PingLoop | Told | NotTold
FromWorker = Loaded | Refused | PongLoop | Begun | Ask | AttemptDone | Raised


R = TypeVar("R")


class PendingReplies(Generic[R]):
    """Calls of this process that wait for their replies, by number; in an event loop."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[R]] = {}

    @contextmanager
    def call(self) -> "Iterator[tuple[int, asyncio.Future[R]]]":
        """Provide a number for a call, and its reply."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            yield number, self._waiting[number]
        finally:
            del self._waiting[number]

    def settle(self, number: int, outcome: R | Exception) -> None:
        """The reply has come, or will not; ignored if nobody waits for it any longer."""
        waiting = self._waiting.get(number)
        if waiting is None or waiting.done():
            return
        if isinstance(outcome, Exception):
            waiting.set_exception(outcome)
        else:
            waiting.set_result(outcome)


class ProcessorTime:
    def __init__(self) -> None:
        self._counted_s = time.process_time()

    def since_last(self) -> float:
        """Return the processor time of this process since the previous call (s)."""
        before, self._counted_s = self._counted_s, time.process_time()
        return self._counted_s - before
