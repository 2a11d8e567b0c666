"""Processes of users' rollout functions: real ones, with a policy that echoes."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from asyncflow.errors import ConfigError, UserCodeNotStarted
from workers.agents import user_workers, worker
from workers.agents.service import Service
from workers.agents.turns import Reply
from workers.agents.user_workers import Heard, UserWorker, WorkerDeath, held_by
from workers.agents.wire import Ask, AttemptDone, Begin, Begun, Raised, Setup, Start, Told
from workers.agents.worker import StartPace
from workers.calls import child_process

MODULE = """
import asyncio, os, sys, time
from workers.agents import BudgetSpent

async def talk(task, model, context):
    chat = model.chat([{"role": "user", "content": task["question"]}])
    replies = await asyncio.gather(*(chat.fork().reply() for _ in range(2)))
    reply = await chat.reply()
    context.log("seen", len(replies))
    return chat.sample(reward=float(len(reply.text)))

async def odd(task, model, context):
    chat = model.chat([{"role": "user", "content": "x"}])
    await chat.reply()
    kind = task["question"]
    if kind == "die":
        await asyncio.gather(_die())
    if kind == "block":
        time.sleep(1000)
    while kind == "busy":
        time.sleep(0.05)
        await asyncio.sleep(0)
    if kind == "wait":
        await asyncio.sleep(1000)
    if kind == "deaf":
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
    if kind == "skip":
        context.skip("too easy")
    if kind == "skip silently":
        context.skip("")
    if kind == "wrong":
        return 7
    if kind == "raise":
        raise RuntimeError("it broke")
    return chat.sample()

async def holds(task, model, context):
    chat = model.chat([{"role": "user", "content": "x"}])
    await chat.reply()
    while not os.path.exists(task["question"]):
        time.sleep(0.01)
    return chat.sample()

async def slow_start(task, model, context):
    time.sleep(0.05)
    chat = model.chat([{"role": "user", "content": "x"}])
    await chat.reply()
    return chat.sample()

asked, all_asked = [], asyncio.Event()

async def slow_end(task, model, context):
    chat = model.chat([{"role": "user", "content": "x"}])
    await chat.reply()
    asked.append(task.index)
    if len(asked) == 32:
        all_asked.set()
    await all_asked.wait()
    time.sleep(0.05)
    return chat.sample()

held = []

async def shared(task, model, context):
    chat = model.chat([{"role": "user", "content": "x"}])
    await chat.reply()
    held.append(chat.sample())
    return held[0]

async def careless(task, model, context):
    if task["question"] == "wait":
        while not held:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
    chat = model.chat([{"role": "user", "content": "x"}])
    held.append(1)
    if task["question"] == "exit":
        await asyncio.gather(asyncio.sleep(0), _leave())
    if task["question"] == "exit in a callback":
        asyncio.get_running_loop().call_soon(sys.exit, 5)
        await asyncio.sleep(0)
    await chat.reply(max_tokens=4.5 if task["question"] == "float" else 4)
    return chat.sample()

async def _leave():
    await asyncio.sleep(0)
    sys.exit(4)

async def _die():
    await asyncio.sleep(0)
    os._exit(3)

def plain(task, model, context):
    return None
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_rollouts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


class Owner:
    """Replies to everything, at once or when `reply` is called, and keeps what it is told."""

    def __init__(self, *, holds_replies: bool = False) -> None:
        self._held: list[Told] | None = [] if holds_replies else None
        self.told: asyncio.Queue[AttemptDone | Raised | WorkerDeath] = asyncio.Queue()
        self.asks: list[Ask] = []
        self.began: list[int] = []

    def __call__(self, worker: UserWorker, message: Heard) -> None:
        match message:
            case Ask(number, attempt_id, request):
                self.asks.append(message)
                reply = {"role": "assistant", "content": request.messages[-1]["content"] + "!"}
                told = Told(number, Reply(reply, "stop", [1, 2], len(self.asks), attempt_id))
                if self._held is None:
                    worker.send(told)
                else:
                    self._held.append(told)
            case Begun(attempt_id):
                self.began.append(attempt_id)
            case _:
                self.told.put_nowait(message)

    def reply(self, worker: UserWorker) -> None:
        """Send the replies that were held back."""
        for told in self._held or ():
            worker.send(told)


def setup_of(users: Path, function: str, *, stall_timeout_s: float = 10.0) -> Setup:
    return Setup(
        model_dir="", renderer=None, function=f"my_rollouts:{function}", agent=None, command=[], tools=[],
        timeout_s=60, max_turns=0, max_tokens=0, max_context=0, max_response_tokens=8, max_attempts=1, num_workers=1,
        scratch=str(users), stall_timeout_s=stall_timeout_s,
    )  # fmt: skip


def start_of(users: Path, attempt_id: int, question: str) -> Start:
    begin = Begin(ticket=attempt_id, task=f'{{"question": "{question}"}}', index=attempt_id, group=0, member=0, seed=1)
    return Start(attempt_id, begin, 0, "", "", 60.0, str(users / str(attempt_id)))


async def told_by(
    users: Path, function: str, *questions: str, number: int = 1, stall_timeout_s: float = 10.0
) -> tuple[list[object], Owner]:
    owner = Owner()
    worker = await UserWorker.start(setup_of(users, function, stall_timeout_s=stall_timeout_s), owner)
    for attempt_id, question in enumerate(questions, start=1):
        worker.begin(start_of(users, attempt_id, question))
    told: list[object] = [await asyncio.wait_for(owner.told.get(), 60) for _ in range(number)]
    await worker.kill_and_wait()
    return told, owner


def test_a_function_talks_and_returns_a_sample_with_its_reward(users: Path) -> None:
    (done,), owner = asyncio.run(told_by(users, "talk", "hello"))
    assert isinstance(done, AttemptDone)
    assert (done.attempt_id, done.reward, done.metrics) == (1, 6.0, {"seen": 2.0})
    assert done.nodes == [3]
    assert [ask.attempt_id for ask in owner.asks] == [1, 1, 1]


@pytest.mark.parametrize(
    ("question", "words"),
    [("raise", "it broke"), ("wrong", "returned int"), ("skip", "too easy"), ("skip silently", "no reason")],
)
def test_what_a_function_raises_is_told_with_its_attempt(users: Path, question: str, words: str) -> None:
    (raised,), _ = asyncio.run(told_by(users, "odd", question))
    assert isinstance(raised, Raised)
    assert raised.attempt_id == 1
    assert words in raised.text
    assert raised.skipped == question.startswith("skip")


@pytest.mark.parametrize(("question", "words"), [("float", "max_tokens is 4.5"), ("exit", "SystemExit: 4")])
def test_a_mistake_costs_the_rollout_that_makes_it_and_no_other(users: Path, question: str, words: str) -> None:
    told, _ = asyncio.run(told_by(users, "careless", "wait", question, number=2))
    by_attempt = {getattr(one, "attempt_id", None): one for one in told}
    assert isinstance(by_attempt[1], AttemptDone)
    assert isinstance(by_attempt[2], Raised)
    assert words in by_attempt[2].text


def test_a_callback_that_exits_ends_no_rollout(users: Path) -> None:
    told, _ = asyncio.run(told_by(users, "careless", "wait", "exit in a callback", number=2))
    assert sorted(one.attempt_id for one in told if isinstance(one, AttemptDone)) == [1, 2]


def test_a_sample_of_another_rollout_is_refused(users: Path) -> None:
    told, _ = asyncio.run(told_by(users, "shared", "x", "x", number=2))
    assert sorted(type(one).__name__ for one in told) == ["AttemptDone", "Raised"]
    assert [one.text for one in told if isinstance(one, Raised) and "of another rollout" in one.text]


def test_a_process_that_ends_names_the_rollout_whose_code_ran_though_in_a_task_of_its_own(users: Path) -> None:
    (death,), _ = asyncio.run(told_by(users, "odd", "wait", "die", "wait"))
    assert isinstance(death, WorkerDeath)
    assert death.attempt_id == 2


def test_a_blocked_loop_is_killed_and_the_rollout_that_blocks_it_named_with_the_line(users: Path) -> None:
    (death,), _ = asyncio.run(told_by(users, "odd", "wait", "block", stall_timeout_s=2.0))
    assert isinstance(death, WorkerDeath)
    assert death.attempt_id == 2
    line = 1 + next(at for at, text in enumerate(MODULE.splitlines()) if text.strip() == "time.sleep(1000)")
    assert f"event loop for 2 s (rollout.stall_timeout_s) in odd (my_rollouts.py:{line}); blocking" in death.how


def test_a_loop_that_goes_on_while_its_stack_is_asked_for_costs_no_process(
    users: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack, stacks, decides = UserWorker._read_stack, [], asyncio.Event()

    async def stack_and_go_on(self: UserWorker) -> str:
        stacks.extend([await stack(self), await stack(self)])
        (users / "go").touch()
        while self.num_rollouts:
            await asyncio.sleep(0.01)
        turn = self._last_pong
        while self._last_pong == turn:
            self.send(user_workers.PingLoop())
            await asyncio.sleep(0.01)
        decides.set()
        return stacks[-1]

    monkeypatch.setattr(UserWorker, "_read_stack", stack_and_go_on)

    async def run() -> bool:
        owner = Owner()
        worker = await UserWorker.start(setup_of(users, "holds", stall_timeout_s=1.0), owner)
        worker.begin(start_of(users, 1, str(users / "go")))
        assert isinstance(await asyncio.wait_for(owner.told.get(), 60), AttemptDone)
        await decides.wait()
        worker.begin(start_of(users, 2, str(users / "go")))  # in the same process
        assert isinstance(await asyncio.wait_for(owner.told.get(), 60), AttemptDone)
        alive = worker.alive
        await worker.kill_and_wait()
        return alive

    assert asyncio.run(asyncio.wait_for(run(), 60))
    assert [text.count("most recent call first") for text in stacks[:2]] == [1, 1], "each is one stack"


def test_many_that_each_hold_the_loop_a_little_when_they_begin_cost_no_process(users: Path) -> None:
    """A client for each costs 43 ms, and 1,024 begin at once: here fewer, and a limit as much shorter."""
    number = 32
    told, owner = asyncio.run(told_by(users, "slow_start", *["x"] * number, number=number, stall_timeout_s=0.8))
    assert [type(one).__name__ for one in told] == ["AttemptDone"] * number
    assert sorted(owner.began) == list(range(1, number + 1))


def test_many_replies_at_once_that_each_hold_the_loop_a_little_cost_no_process(users: Path) -> None:
    number = 32
    told, _ = asyncio.run(told_by(users, "slow_end", *["x"] * number, number=number, stall_timeout_s=0.8))
    assert [type(one).__name__ for one in told] == ["AttemptDone"] * number


def test_what_waits_in_line_is_stopped_without_a_call(users: Path) -> None:
    async def run() -> list[int]:
        owner = Owner()
        worker = await UserWorker.start(setup_of(users, "slow_start"), owner)
        for number in range(1, 17):
            worker.begin(start_of(users, number, "x"))
        worker.end(16, within_s=30)
        while worker.num_rollouts:
            await asyncio.sleep(0.01)
        assert worker.alive
        await worker.kill_and_wait()
        return owner.began

    began = asyncio.run(asyncio.wait_for(run(), 60))
    assert 16 not in began and len(began) == 15


def test_a_loop_that_keeps_up_begins_more_at_a_time_and_one_that_lags_fewer_but_always_one() -> None:
    pace, numbers = StartPace(), []
    for seconds in [0.001] * 8 + [0.2] * 8 + [0.001] * 2:
        numbers.append(pace.number)
        pace.turn_took(seconds)
    assert numbers == [1, 2, 4, 8, 16, 32, 64, 64, 64, 32, 16, 8, 4, 2, 1, 1, 1, 2]


@pytest.mark.parametrize("start_s", [0.0005, 0.043, 0.3])
def test_the_longest_turn_is_short_whatever_a_start_costs(start_s: float) -> None:
    pace, left, turns = StartPace(), 1024, []
    while left:
        began = min(pace.number, left)
        left -= began
        turns.append(began * start_s)
        pace.turn_took(turns[-1])
    assert max(turns) <= max(0.2, start_s) and sum(turns) == pytest.approx(1024 * start_s)


def test_a_stack_is_told_as_the_users_calls_outermost_first() -> None:
    frames = [("/lib/ssl.py", 717, "load"), ("/lib/ssl.py", 600, "context"), ("/lib/httpx.py", 9, "__init__")]
    frames += [("/home/me/my_agent.py", 30, "client"), ("/home/me/my_agent.py", 12, "agent")]
    frames += [(worker.__file__, 300, "_call_agent"), ("/lib/asyncio/events.py", 80, "_run")]
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in frames]
    stack = "Current thread 0x00007f (most recent call first):\n" + "\n".join(lines)
    assert (
        held_by(stack)
        == "agent (my_agent.py:12) > client (my_agent.py:30) > ... > context (ssl.py:600) > load (ssl.py:717)"
    )
    assert held_by("") == ""


def test_a_cancelled_rollout_leaves_and_others_go_on(users: Path) -> None:
    async def run() -> object:
        owner = Owner()
        worker = await UserWorker.start(setup_of(users, "odd"), owner)
        worker.begin(start_of(users, 1, "wait"))
        worker.begin(start_of(users, 2, "deaf"))
        while len(owner.asks) < 2:
            await asyncio.sleep(0.01)
        worker.end(1, within_s=30)
        while worker.num_rollouts == 2:
            await asyncio.sleep(0.01)
        assert worker.alive
        worker.end(2, within_s=0.2)
        death = await asyncio.wait_for(owner.told.get(), 60)
        await worker.kill_and_wait()
        return death

    death = asyncio.run(run())
    assert isinstance(death, WorkerDeath)
    assert death.attempt_id == 2
    assert "cancelled" in death.how


async def death_after_cancelling(users: Path, *questions: str) -> object:
    """Begin rollouts, cancel the first in the same turn of their loop in which all have their replies, and return how
    their process ended."""
    owner = Owner(holds_replies=True)
    worker = await UserWorker.start(setup_of(users, "odd", stall_timeout_s=3.0), owner)
    for attempt_id, question in enumerate(questions, start=1):
        worker.begin(start_of(users, attempt_id, question))
    while len(owner.asks) < len(questions):
        await asyncio.sleep(0.01)
    worker._kill(worker._process.pid, signal.SIGSTOP)
    owner.reply(worker)
    worker.end(1, within_s=0.5)
    worker._kill(worker._process.pid, signal.SIGCONT)
    death = await asyncio.wait_for(owner.told.get(), 60)
    await worker.kill_and_wait()
    return death


def test_a_late_cancellation_blames_who_did_not_end_and_not_whose_code_happens_to_run(users: Path) -> None:
    death = asyncio.run(death_after_cancelling(users, "deaf", "busy"))
    assert isinstance(death, WorkerDeath) and death.attempt_id == 1


def test_a_cancellation_that_a_blocked_loop_holds_up_blames_who_blocks_it(users: Path) -> None:
    death = asyncio.run(death_after_cancelling(users, "wait", "block"))
    assert isinstance(death, WorkerDeath)
    assert death.attempt_id == 2 and "event loop" in death.how


def test_a_stop_that_follows_a_start_at_once_costs_no_process(users: Path) -> None:
    async def run() -> None:
        worker = await UserWorker.start(setup_of(users, "odd"), Owner())
        worker.begin(start_of(users, 1, "wait"))
        worker.end(1, within_s=30)
        while worker.num_rollouts:
            await asyncio.sleep(0.01)
        assert worker.alive
        await worker.kill_and_wait()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_function_that_is_no_coroutine_function_is_refused(users: Path) -> None:
    with pytest.raises(ConfigError, match="async def"):
        asyncio.run(told_by(users, "plain", "x"))


def test_a_service_that_closes_does_not_wait_for_workers_that_are_being_replaced() -> None:
    async def run() -> bool:
        service: Any = object.__new__(Service)
        replacing = asyncio.get_running_loop().create_task(asyncio.sleep(1000))
        service._attempts, service._workers, service._gateway, service._replacing = {}, [], None, {replacing}
        await asyncio.wait_for(service.close(), 30)
        return replacing.cancelled()

    assert asyncio.run(run())


def test_a_process_that_takes_long_to_import_has_not_started_and_is_no_mistake(
    users: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "START_TIMEOUT_S", 2.0)
    (users / "endless.py").write_text("import threading\nthreading.Event().wait()\n")
    setup = replace(setup_of(users, "odd"), function="endless:rollout")
    with pytest.raises(UserCodeNotStarted, match="took longer than 2 s"):
        asyncio.run(asyncio.wait_for(UserWorker.start(setup, Owner()), 60))
