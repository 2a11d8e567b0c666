"""How a gang over several nodes ends."""

import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import WorkerState

from asyncflow.job import GangSpec
from launcher.process.gang import GangAgent
from launcher.process.gang_hosts import AllHosts, GangParts, KillPart
from launcher.process.run_events import GangExited

ACTOR = GangSpec("actor", "actor", 0, 6, ("cpu",) * 6, (0, 0, 1, 1, 2, 2))
KILLED = -signal.SIGKILL


def test_gang_knows_its_ranks_on_each_node() -> None:
    assert ACTOR.parts == (0, 1, 2)
    assert [ACTOR.ranks_on(node) for node in range(4)] == [range(2), range(2, 4), range(4, 6), range(6, 6)]
    assert GangSpec("ref-0", "ref", 0, 2, ("cpu", "cpu")).nodes == (0, 0)


def test_gang_ends_well_when_all_parts_did() -> None:
    parts = GangParts(ACTOR)
    assert parts.part_exited(2, GangExited("actor", 0, at=1.0)) == []
    assert parts.part_exited(0, GangExited("actor", 0, at=2.0)) == []
    assert parts.part_exited(1, GangExited("actor", 0, at=3.0)) == [GangExited("actor", 0, at=3.0)]


def test_first_failure_kills_the_other_parts_and_is_the_reason() -> None:
    parts = GangParts(ACTOR)
    cause = GangExited("actor", 1, "ValueError: no", rank=3, at=5.0, final=True)
    assert parts.part_exited(1, cause) == [KillPart(0), KillPart(2)]
    assert parts.part_exited(0, GangExited("actor", KILLED, "ended by SIGKILL", rank=0, at=5.1, ordered=True)) == []
    last = GangExited("actor", KILLED, "ended by SIGKILL", rank=4, at=5.2, ordered=True)
    assert parts.part_exited(2, last) == [cause]


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_signal_that_the_launcher_did_not_send_comes_before_what_it_led_to(number: signal.Signals) -> None:
    parts = GangParts(ACTOR)
    lost_peer = GangExited("actor", 1, "RuntimeError: connection reset", rank=0, at=5.0)
    assert parts.part_exited(0, lost_peer) == [KillPart(1), KillPart(2)]
    cause = GangExited("actor", -number, f"ended by {number.name}", rank=2, at=5.1)
    assert parts.part_exited(1, cause) == []  # though it was told to end
    last = GangExited("actor", KILLED, "ended by SIGKILL", rank=4, at=5.2, ordered=True)
    assert parts.part_exited(2, last) == [cause]


def test_deadline_of_any_part_is_worth_the_stacks_of_all() -> None:
    parts = GangParts(GangSpec("actor", "actor", 0, 2, ("cpu",) * 2, (0, 1)))
    assert parts.part_exited(0, GangExited("actor", -signal.SIGSEGV, "ended by SIGSEGV", at=5.0)) == [KillPart(1)]
    (merged,) = parts.part_exited(1, GangExited("actor", 1, "nobody came", rank=1, at=4.0, deadline=True))
    assert merged == GangExited("actor", -signal.SIGSEGV, "ended by SIGSEGV", at=5.0, deadline=True)


def test_killed_gang_ends_as_killed() -> None:
    parts = GangParts(ACTOR)
    assert parts.kill() == [KillPart(0), KillPart(1), KillPart(2)]
    assert parts.kill() == []
    ends = [GangExited("actor", KILLED, "ended by SIGKILL", rank=2 * node, at=float(node)) for node in range(3)]
    assert [parts.part_exited(node, end) for node, end in enumerate(ends)] == [[], [], [ends[0]]]


def test_part_that_ended_twice_counts_once() -> None:
    parts = GangParts(GangSpec("actor", "actor", 0, 2, ("cpu",) * 2, (0, 1)))
    assert parts.part_exited(0, GangExited("actor", 0)) == []
    assert parts.part_exited(0, GangExited("actor", 1, "again")) == []


class FakeHost:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def start(self, gang: GangSpec, attempt: int) -> None:
        self.told.append((f"start {attempt}", gang.name))

    def kill(self, gang: str) -> None:
        self.told.append(("kill", gang))

    def dump_stacks(self) -> None:
        self.told.append(("stacks", ""))

    def close(self, timeout_s: float) -> None:
        self.told.append((f"close {timeout_s:g}", ""))


def test_all_hosts_are_one_host_to_the_launcher() -> None:
    ended: list[GangExited] = []
    hosts = [FakeHost(), FakeHost(), FakeHost()]
    everywhere = AllHosts(ended.append)
    everywhere.add_hosts(dict(enumerate(hosts)))
    everywhere.kill("actor")
    everywhere.start(ACTOR, 0)
    everywhere.start(GangSpec("ref-0", "ref", 0, 1, ("cpu",), (1,)), 2)
    cause = GangExited("actor", 1, "ValueError: no", rank=3, at=5.0)
    everywhere.part_exited(1, cause)
    assert [host.told for host in hosts] == [
        [("start 0", "actor"), ("kill", "actor")],
        [("start 0", "actor"), ("start 2", "ref-0")],
        [("start 0", "actor"), ("kill", "actor")],
    ]
    for node in (0, 2):
        assert ended == []
        everywhere.part_exited(node, GangExited("actor", KILLED, at=6.0, ordered=True))
    assert ended == [cause]
    everywhere.start(ACTOR, 1)
    everywhere.dump_stacks()
    everywhere.close(3.0)
    assert all(host.told[-3:] == [("start 1", "actor"), ("stacks", ""), ("close 3", "")] for host in hosts)


@pytest.mark.parametrize("asked", [{}, {"timeout": 30}])  # before torch 2.12, and since
def test_ranks_are_killed_whatever_the_agent_asks_for(asked: dict[str, int]) -> None:
    ends: list[str] = []

    class Process:
        def kill(self) -> None:
            ends.append("kill")

        def join(self, timeout_s: float) -> None:
            ends.append("join")

    agent: Any = GangAgent.__new__(GangAgent)
    agent._processes = {0: Process(), 1: Process()}
    agent._shutdown(signal.SIGTERM, **asked)
    assert ends == ["kill", "kill", "join", "join"]


@pytest.mark.parametrize("died_before", [True, False])
def test_a_part_says_whether_its_ranks_died_before_it_was_told_to_end_them(died_before: bool) -> None:
    class Process:
        finished, pid, exitcode = False, os.getpid(), None

        def kill(self) -> None:
            self.exitcode = self.exitcode or KILLED

        def join(self, timeout_s: float) -> None:
            pass

    agent: Any = GangAgent.__new__(GangAgent)
    agent._server = SimpleNamespace(let_go_on=lambda: None, has_died=lambda: False)
    agent._files = SimpleNamespace(gang=ACTOR, read_failure=lambda rank, code: None)
    agent._processes, agent._stopped_since, agent._killed = {2: Process(), 3: Process()}, {}, threading.Event()
    assert agent._monitor_workers(None).state is WorkerState.HEALTHY
    if died_before:
        agent._processes[3].exitcode = KILLED
    agent._killed.set()
    assert agent._monitor_workers(None).state is WorkerState.FAILED
    assert (agent.failure.rank, agent.failure.ordered) == ((3, False) if died_before else (2, True))
    assert agent._processes[2].exitcode == KILLED
