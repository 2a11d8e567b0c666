"""What the launcher of another node does with orders, ends and signals."""

from collections.abc import Callable
from queue import SimpleQueue

import pytest

from asyncflow.clock import HostClock
from asyncflow.errors import ConfigError
from asyncflow.job import GangSpec, Job
from launcher.nodes.node_messages import (
    DumpStacks,
    FinishRun,
    FromNode,
    Inbound,
    KillPart,
    Left,
    PartExited,
    StartPart,
    StopAsked,
    Welcome,
)
from launcher.nodes.node_run import SIGHT_TIMEOUT_S, End, NodeFollower
from launcher.process.run_events import GangExited, StopRequested

DONE = FinishRun(0, "done")
CLOCK = HostClock.from_wall_clock()
GANGS = tuple(GangSpec(f"ref-{k}", "ref", k, 1, ("cpu",), (1,)) for k in range(2))
JOB = Job("10.0.0.1", 1, "00", 2, GANGS, 0, "", 3, 4.5, CLOCK, revision=3)


class FakeLink:
    """Keeps what is sent; `lost` says what the test says, once the inbox is empty."""

    def __init__(self, lost: Callable[[], str]) -> None:
        self.clock = CLOCK
        self.sent: list[FromNode] = []
        self.lost = lost

    def send(self, event: FromNode) -> None:
        self.sent.append(event)


class FakeHost:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def start(self, gang: GangSpec, attempt: int) -> None:
        self.told.append(f"start {gang.name} {attempt}")

    def kill(self, gang: str) -> None:
        self.told.append(f"kill {gang}")

    def dump_stacks(self) -> None:
        self.told.append("stacks")

    def close(self, timeout_s: float) -> None:
        self.told.append("close")


def follow(
    *events: Inbound,
    load_job: Callable[[], Job] = lambda: JOB,
    lost: Callable[[], str] = lambda: "",
    now: Callable[[], float] = lambda: 0.0,
) -> tuple[End, list[str], list[FromNode]]:
    """Run one to its end; returns that, what its host was told, and what it sent."""
    inbox: SimpleQueue[Inbound] = SimpleQueue()
    for event in events:
        inbox.put(event)
    link, host = FakeLink(lost), FakeHost()
    end = NodeFollower(1, link, host, inbox, load_job=load_job, now=now).follow_head()
    return end, host.told, link.sent


def test_orders_are_carried_out() -> None:
    orders = (StartPart("ref-0", 0, 3), StartPart("ref-1", 2, 1), DumpStacks(), KillPart("ref-0"), DONE)
    end, told, sent = follow(*orders)
    assert end == End(0, "done")
    assert told == ["start ref-0 0", "start ref-1 2", "stacks", "kill ref-0", "close"]
    assert sent == [Left()]


def test_what_happens_here_is_told() -> None:
    exited = GangExited("ref-0", 1, "ValueError: no", 0, CLOCK.now(), final=True)
    _, _, sent = follow(exited, StopRequested(1), StopRequested(2), DONE)
    assert isinstance(sent[0], PartExited)
    told = sent[0].exited
    assert (told.gang, told.code, told.error, told.final) == ("ref-0", 1, "ValueError: no", True)
    assert sent[1:] == [StopAsked(1), StopAsked(2), Left()]


def test_times_are_told_as_node_0_reads_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.nodes.node_run.time.time", lambda: CLOCK.now() + 3600.0)
    _, _, sent = follow(GangExited("ref-0", 1, "no", at=CLOCK.now() + 3600.0 - 5.0), DONE)
    assert isinstance(sent[0], PartExited)
    assert sent[0].exited.at == pytest.approx(CLOCK.now() - 5.0, abs=60.0)


def test_lost_node_0_ends_it_resumably_when_nothing_else_is_there_to_do() -> None:
    end, told, sent = follow(StartPart("ref-0", 0, 3), lost=lambda: "it gives no sign of life")
    assert end.code == 75
    assert end.line.startswith("node 0 is lost (it gives no sign of life); node 1 ended its processes")
    assert told == ["start ref-0 0", "close"]
    assert sent == [Left()]


def test_last_order_counts_although_node_0_is_gone_by_then() -> None:
    assert follow(DONE, lost=lambda: "gone")[0] == End(0, "done")


def test_gang_starts_when_its_job_can_be_seen_here() -> None:
    jobs = iter([ConfigError("no job.json"), JOB, JOB.with_changes()])

    def load_job() -> Job:
        job = next(jobs)
        if isinstance(job, Exception):
            raise job
        return job

    reasons = iter(["", "", "gone"])
    _, told, _ = follow(StartPart("ref-1", 1, 4), load_job=load_job, lost=lambda: next(reasons))
    assert told == ["start ref-1 1", "close"]


def test_job_that_cannot_be_seen_in_time_fails_its_gang() -> None:
    times = iter([0.0, 0.0, 1.0, SIGHT_TIMEOUT_S + 1.0])
    reasons = iter(["", "", "gone"])
    _, told, sent = follow(StartPart("ref-1", 1, 4), now=lambda: next(times), lost=lambda: next(reasons))
    assert told == ["close"]
    assert isinstance(sent[0], PartExited)
    assert sent[0].exited.code == 1
    assert sent[0].exited.error == "node 1 does not see the job.json that node 0 wrote"


def test_gang_that_is_killed_before_its_job_is_seen_never_starts() -> None:
    _, told, sent = follow(StartPart("ref-1", 1, 4), KillPart("ref-1"), DONE)
    assert told == ["kill ref-1", "close"]
    assert isinstance(sent[0], PartExited)
    assert sent[0].exited.error == "killed before it started"


def test_order_that_does_not_belong_here_changes_nothing() -> None:
    assert follow(Welcome(), DONE) == (End(0, "done"), ["close"], [Left()])


def test_nothing_is_left_when_a_host_fails() -> None:
    class Broken(FakeHost):
        def start(self, gang: GangSpec, attempt: int) -> None:
            raise RuntimeError("no threads left")

    inbox: SimpleQueue[Inbound] = SimpleQueue()
    inbox.put(StartPart("ref-0", 0, 3))
    link, host = FakeLink(lambda: ""), Broken()
    with pytest.raises(RuntimeError, match="no threads left"):
        NodeFollower(1, link, host, inbox, load_job=lambda: JOB).follow_head()
    assert host.told == ["close"]
    assert link.sent == [Left()]
