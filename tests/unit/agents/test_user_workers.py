"""Processes of users' rollout functions: real ones, with a policy that echoes."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from asyncflow.errors import ConfigError, UserCodeNotStarted
from workers.agents import user_workers
from workers.agents.user_workers import UserWorker, WorkerDeath
from workers.agents.wire import Ask, Begin, Done, Raised, Setup, Start, Told

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
    if kind == "wrong":
        return 7
    if kind == "raise":
        raise RuntimeError("it broke")
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
def users(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "my_rollouts.py").write_text(MODULE)
    yield tmp_path


class Owner:
    """Replies to everything, and keeps what it is told."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[Done | Raised | WorkerDeath] = asyncio.Queue()
        self.asks: list[Ask] = []

    def asked(self, worker: UserWorker, ask: Ask) -> None:
        self.asks.append(ask)
        message = {"role": "assistant", "content": ask.messages[-1]["content"] + "!"}
        worker.send(Told(ask.number, len(self.asks), message, "stop", [1, 2]))

    def done(self, worker: UserWorker, message: Done) -> None:
        self.told.put_nowait(message)

    def raised(self, worker: UserWorker, message: Raised) -> None:
        self.told.put_nowait(message)

    def died(self, worker: UserWorker, death: WorkerDeath) -> None:
        self.told.put_nowait(death)


def setup_of(users: Path, function: str) -> Setup:
    return Setup(
        model_dir="", renderer=None, function=f"my_rollouts:{function}", agent=None, command=[], tools=[],
        timeout_s=60, max_turns=0, max_tokens=0, max_context=0, max_response_tokens=8, max_attempts=1, num_workers=1,
        path=[str(users).encode(), *(place.encode() for place in sys.path)], scratch=str(users),
    )  # fmt: skip


def start_of(users: Path, run: int, question: str) -> Start:
    begin = Begin(ticket=run, task=f'{{"question": "{question}"}}', index=run, group=0, member=0, seed=1)
    return Start(run, begin, 0, "", "", 60.0, str(users / str(run)))


async def told_by(users: Path, function: str, *questions: str, number: int = 1) -> tuple[list[object], Owner]:
    owner = Owner()
    worker = await UserWorker.start(setup_of(users, function), owner)
    for run, question in enumerate(questions, start=1):
        worker.begin(start_of(users, run, question))
    told: list[object] = [await asyncio.wait_for(owner.told.get(), 60) for _ in range(number)]
    await worker.gone()
    return told, owner


def test_a_function_talks_and_returns_a_sample_with_its_reward(users: Path) -> None:
    (done,), owner = asyncio.run(told_by(users, "talk", "hello"))
    assert isinstance(done, Done)
    assert (done.run, done.reward, done.metrics) == (1, 6.0, {"seen": 2.0})
    assert done.nodes == [3]
    assert [ask.run for ask in owner.asks] == [1, 1, 1]


@pytest.mark.parametrize(
    ("question", "words"), [("raise", "it broke"), ("wrong", "returned int"), ("skip", "too easy")]
)
def test_what_a_function_raises_is_told_with_its_run(users: Path, question: str, words: str) -> None:
    (raised,), _ = asyncio.run(told_by(users, "odd", question))
    assert isinstance(raised, Raised)
    assert raised.run == 1
    assert words in raised.text
    assert raised.skipped == (question == "skip")


@pytest.mark.parametrize(("question", "words"), [("float", "max_tokens is 4.5"), ("exit", "SystemExit: 4")])
def test_a_mistake_costs_the_rollout_that_makes_it_and_no_other(users: Path, question: str, words: str) -> None:
    told, _ = asyncio.run(told_by(users, "careless", "wait", question, number=2))
    by_run = {getattr(one, "run", None): one for one in told}
    assert isinstance(by_run[1], Done)
    assert isinstance(by_run[2], Raised)
    assert words in by_run[2].text


def test_a_callback_that_exits_ends_no_rollout(users: Path) -> None:
    told, _ = asyncio.run(told_by(users, "careless", "wait", "exit in a callback", number=2))
    assert sorted(one.run for one in told if isinstance(one, Done)) == [1, 2]


def test_a_sample_of_another_rollout_is_refused(users: Path) -> None:
    told, _ = asyncio.run(told_by(users, "shared", "x", "x", number=2))
    assert sorted(type(one).__name__ for one in told) == ["Done", "Raised"]
    assert [one.text for one in told if isinstance(one, Raised) and "of another rollout" in one.text]


def test_a_process_that_ends_names_the_rollout_whose_code_ran_though_in_a_task_of_its_own(users: Path) -> None:
    (death,), _ = asyncio.run(told_by(users, "odd", "wait", "die", "wait"))
    assert isinstance(death, WorkerDeath)
    assert death.run == 2


def test_a_blocked_loop_is_killed_and_the_rollout_that_blocks_it_named(
    users: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_workers, "STALL_S", 2.0)
    (death,), _ = asyncio.run(told_by(users, "odd", "wait", "block"))
    assert isinstance(death, WorkerDeath)
    assert death.run == 2
    assert "event loop" in death.how


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
        await worker.gone()
        return death

    death = asyncio.run(run())
    assert isinstance(death, WorkerDeath)
    assert death.run == 2
    assert "cancelled" in death.how


async def death_after_cancelling(users: Path, *questions: str) -> object:
    """Begin rollouts, cancel the first once all have asked, and return how their process ended."""
    owner = Owner()
    worker = await UserWorker.start(setup_of(users, "odd"), owner)
    for run, question in enumerate(questions, start=1):
        worker.begin(start_of(users, run, question))
    while len(owner.asks) < len(questions):
        await asyncio.sleep(0.01)
    worker.end(1, within_s=0.5)
    death = await asyncio.wait_for(owner.told.get(), 60)
    await worker.gone()
    return death


def test_a_late_cancellation_blames_who_did_not_end_and_not_whose_code_happens_to_run(users: Path) -> None:
    death = asyncio.run(death_after_cancelling(users, "deaf", "busy"))
    assert isinstance(death, WorkerDeath) and death.run == 1


def test_a_cancellation_that_a_blocked_loop_holds_up_blames_who_blocks_it(
    users: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_workers, "STALL_S", 3.0)

    death = asyncio.run(death_after_cancelling(users, "wait", "block"))
    assert isinstance(death, WorkerDeath)
    assert death.run == 2 and "event loop" in death.how


def test_a_stop_that_follows_a_start_at_once_costs_no_process(users: Path) -> None:
    async def run() -> None:
        worker = await UserWorker.start(setup_of(users, "odd"), Owner())
        worker.begin(start_of(users, 1, "wait"))
        worker.end(1, within_s=30)
        while worker.num_rollouts:
            await asyncio.sleep(0.01)
        assert worker.alive
        await worker.gone()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_function_that_is_no_coroutine_function_is_refused(users: Path) -> None:
    with pytest.raises(ConfigError, match="async def"):
        asyncio.run(told_by(users, "plain", "x"))


def test_a_process_that_takes_long_to_import_has_not_started_and_is_no_mistake(
    users: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_workers, "START_TIMEOUT_S", 2.0)
    (users / "endless.py").write_text("import threading\nthreading.Event().wait()\n")
    setup = replace(setup_of(users, "odd"), function="endless:rollout")
    with pytest.raises(UserCodeNotStarted, match="took longer than 2 s"):
        asyncio.run(asyncio.wait_for(UserWorker.start(setup, Owner()), 60))
