"""Node 0 and another launcher over a real channel: what they say arrives, and nobody else can say anything."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
from waiting import wait_until

from asyncflow.clock import HostClock
from asyncflow.errors import ConfigError, RoleFailed, TransportError
from asyncflow.job import GangSpec, Job
from asyncflow.sealed_store import SealedStore
from asyncflow.transport.meeting import ChannelAsk, ask_key
from launcher.nodes.head import SERVICE, NodeHead
from launcher.nodes.link import HeadLink
from launcher.nodes.membership import Membership, needed_devices
from launcher.nodes.node_messages import (
    DumpStacks,
    FinishRun,
    Hello,
    Inbound,
    KillPart,
    Left,
    PartExited,
    Refuse,
    StartPart,
    StopAsked,
)
from launcher.process.job_store import JobStore
from launcher.process.run_events import GangExited, NodeLost, StopRequested

DEADLINE_S = 30.0
SECRET = "5ec7e7"
CLOCK = HostClock("another boot", 1000.0)
REF = GangSpec("ref-0", "ref", 0, 1, ("npu:0",), (1,))


class Run:
    """Node 0 of a run on two nodes, and what it was told."""

    def __init__(self, run_dir: Path) -> None:
        self.store = JobStore(SECRET)
        self.job = Job(self.store.host, self.store.port, SECRET, os.getpid(), (REF,), 0, "", 3, 4.5, CLOCK, revision=7)
        self.job.save(run_dir)
        self.told: SimpleQueue[Any] = SimpleQueue()
        self.head = NodeHead(
            self.store,
            SECRET,
            Membership(2, needed_devices([REF], 2), {"AsyncFlow version": "1.0"}),
            clock=CLOCK,
            run_dir=run_dir,
            part_exited=lambda node, exited: self.told.put((node, exited)),
            report=self.told.put,
        )
        self.links: list[HeadLink] = []

    def join(self, **changes: Any) -> tuple[Any, "SimpleQueue[Inbound]"]:
        """Join as node 1; returns the link, or what came instead, and the inbox."""
        inbox: SimpleQueue[Inbound] = SimpleQueue()
        first = Hello(1, 2, "me", "host-1", "", {"AsyncFlow version": "1.0"}, "npu", 8)
        hello = msgspec.structs.replace(first, **changes)
        link = HeadLink.join(self.job, hello, inbox, threading.Event())
        self.links += [link] if isinstance(link, HeadLink) else []
        return link, inbox

    def next(self) -> Any:
        """Return what node 0 is told next."""
        return self.told.get(timeout=DEADLINE_S)

    def close(self) -> None:
        """End both sides."""
        for link in self.links:
            link.send(Left())
            assert link.close(DEADLINE_S)
        self.head.end(None)


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.close()


def joined(run: Run) -> tuple[HeadLink, "SimpleQueue[Inbound]"]:
    """Return the link of node 1 once the run can begin."""
    link, inbox = run.join()
    assert run.head.gather(DEADLINE_S, lambda: False) == ""
    return link, inbox


def until(condition: Callable[[], Any], what: str) -> Any:
    """Return the condition's first true value."""
    return wait_until(condition, what, deadline_s=DEADLINE_S)


@pytest.mark.gate
def test_orders_and_events_arrive_in_their_order(run: Run) -> None:
    link, inbox = joined(run)
    node = run.head.remote_hosts()[1]
    node.start(REF, 2)
    node.dump_stacks()
    node.kill("ref-0")
    orders = [inbox.get(timeout=DEADLINE_S) for _ in range(3)]
    assert orders == [StartPart("ref-0", 2, 7), DumpStacks(), KillPart("ref-0")]
    link.send(StopAsked(1))
    exited = GangExited("ref-0", 1, "ValueError: no", 0, 5.0, final=True)
    link.send(PartExited(exited))
    assert run.next() == StopRequested(1)
    assert run.next() == (1, exited)
    ending = threading.Thread(target=run.head.finish_run, args=(75, "stopped"))
    ending.start()
    assert inbox.get(timeout=DEADLINE_S) == FinishRun(75, "stopped")
    link.send(Left())
    ending.join(DEADLINE_S)
    assert not ending.is_alive()
    assert run.told.empty()


def test_clock_is_aligned_to_node_0(run: Run) -> None:
    link, _ = joined(run)
    (node,) = run.head.other_nodes()
    assert (node.rank, node.host, node.address, node.clock) == (1, "host-1", "127.0.0.1", link.clock)
    assert link.clock.offset_s == pytest.approx(CLOCK.offset_s, abs=1.0)
    assert "ahead of node 0's" in run.head.clock_warnings()[0]


@pytest.mark.gate
def test_stranger_who_reaches_the_store_changes_nothing(run: Run) -> None:
    link, inbox = joined(run)
    stranger = run.store.open_client()
    guess = SealedStore(stranger, b"guess")
    ask = msgspec.msgpack.encode(ChannelAsk("1", run.head._members.token(1), b"nonce"))
    for data in (b"", b"noise", ask):
        stranger.queue_push(ask_key(SERVICE), data)
        guess.queue_push(ask_key(SERVICE), data)
    run.head.remote_hosts()[1].kill("ref-0")
    assert inbox.get(timeout=DEADLINE_S) == KillPart("ref-0")
    link.send(StopAsked(1))
    assert run.next() == StopRequested(1)
    assert link.lost() == ""
    assert run.told.empty()


def test_launcher_that_leaves_before_the_end_is_lost(run: Run) -> None:
    link, _ = joined(run)
    link.send(Left())
    assert run.next() == NodeLost("node 1 (host-1)")


def test_launcher_whose_channel_ends_is_lost_at_once(run: Run) -> None:
    link, _ = joined(run)
    link._connection.close()
    assert run.next() == NodeLost("node 1 (host-1)")


@pytest.mark.gate
def test_launcher_without_signs_of_life_is_lost(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    link, _ = joined(run)
    monkeypatch.setattr(link, "_next_event", lambda: silence(link._connection.wait_closed))
    assert run.next() == NodeLost("node 1 (host-1)")


def test_node_0_without_signs_of_life_is_lost(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    link, _ = joined(run)
    run.head._closing.set()  # it does not watch either
    monkeypatch.setattr(run.head, "_answer", lambda call: None)
    assert "no reply to" in until(link.lost, "node 0 is lost")


def silence(until_closed: Callable[[float], bool]) -> None:
    """Say nothing more, until the other end has had enough."""
    assert until_closed(DEADLINE_S)


def test_launcher_whose_thread_for_orders_dies_counts_node_0_as_lost(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    link, _ = joined(run)
    monkeypatch.setattr(logging.getLogger("launcher.nodes.link"), "info", boom)
    run.head.remote_hosts()[1].kill("ref-0")
    assert until(link.lost, "node 0 is lost") == "a thread died: KeyError: 'nobody thought of this'"


def test_node_0_that_fails_at_an_event_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    link, _ = joined(run)
    monkeypatch.setattr(run.head, "_report", boom)
    link.send(StopAsked(1))
    assert run.head.threads.failed.wait(DEADLINE_S)
    with pytest.raises(RoleFailed, match="node 0's launcher: thread node-events died: KeyError"):
        run.head.threads.check()


def boom(*_: Any) -> None:
    raise KeyError("nobody thought of this")


def test_gone_node_0_is_noticed_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    link, _ = joined(run)
    run.head.close()
    assert "closed" in until(link.lost, "node 0 is lost")
    assert link.close(DEADLINE_S)


def test_node_that_cannot_take_part_is_told_and_ends_the_run(run: Run) -> None:
    answer, _ = run.join(num_devices=0, device="cpu")
    assert isinstance(answer, Refuse)
    with pytest.raises(ConfigError) as caught:
        run.head.gather(DEADLINE_S, lambda: False)
    assert str(caught.value) == answer.reason
    assert answer.reason.startswith("node 1 (host-1): it has no accelerator, but 1 npu devices are used there")


def test_second_launcher_with_the_same_number_is_sent_away(run: Run) -> None:
    joined(run)
    answer, _ = run.join(launcher="other")
    assert answer == Refuse("node 1 is already host-1; give every node its own number", True)
    assert run.told.empty()


def test_launcher_that_joins_when_the_run_is_over_is_sent_away(run: Run) -> None:
    run.head.finish_run(0, "done")
    answer, _ = run.join()
    assert answer == Refuse("the run is over", True)


def test_run_of_another_secret_lets_nobody_in(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.nodes.link.ANSWER_TIMEOUT_S", 0.3)
    run.job = Job(run.store.host, run.store.port, "00", 1, (REF,), 0, "", 3, 4.5, CLOCK)
    with pytest.raises(TransportError, match=r"node 0 does not answer at 127\.0\.0\.1"):
        run.join()


def test_node_0_waits_for_everybody_until_its_deadline_or_a_stop(run: Run) -> None:
    with pytest.raises(RoleFailed, match=r"node 1 of 2: did not join within 0\.2 s"):
        run.head.gather(0.2, lambda: False)
    assert run.head.gather(DEADLINE_S, lambda: True) == "stopped"


def test_everybody_is_told_why_the_run_did_not_begin(tmp_path: Path) -> None:
    run = Run(tmp_path)
    _, inbox = joined(run)
    ending = threading.Thread(target=run.head.end, args=(ConfigError("node 2: no model"),))
    ending.start()
    assert inbox.get(timeout=DEADLINE_S) == FinishRun(2, "Error: node 2: no model")
    run.close()
    ending.join(DEADLINE_S)
    assert not ending.is_alive()
