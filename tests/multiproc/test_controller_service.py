"""A controller service beside units and clients that do what the test says."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_controller import WAIT_S, until

from asyncflow.errors import PeerRefused, TransportError
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Call, ChannelServer, ChannelSession, Connection
from tq import ControllerService, TaskSpec
from tq.config import QueueConfig
from tq.control import controller
from tq.messages import (
    CONTROLLER_REPLIES,
    FORMAT,
    UNIT_REQUESTS,
    Done,
    FenceTask,
    FetchRound,
    FetchRows,
    GetQueueStats,
    Held,
    Join,
    LeaseGrant,
    Message,
    NoRowsReason,
    OpenPartition,
    OutputsWritten,
    RegisterUnit,
    RowRecords,
    RowsCreated,
    UnitAccepted,
    WatchLost,
)
from tq.timers import Timer, Timers

GRACE_S = 1234.0
WATCH_S = 2345.0


class WatchedTimers(Timers):
    """Timers that remember what was set."""

    def __init__(self, name: str, **options: Any) -> None:
        self.set: list[tuple[float, Timer]] = []
        super().__init__(name, **options)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        timer = super().call_later(delay_s, callback)
        self.set.append((delay_s, timer))
        return timer

    def running(self, delay_s: float) -> list[bool]:
        """Return, for each deadline of that length, whether it was not cancelled."""
        return [timer.callback is not None for delay, timer in self.set if delay == delay_s]


class Bench:
    """A controller, and those who call it."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._opened: list[Connection] = []
        self.start()

    def start(self) -> None:
        """Start the service, for the first time or again."""
        config = QueueConfig(unit_grace_s=GRACE_S)
        tasks = [TaskSpec("train", frozenset({"x"})), TaskSpec("gang", frozenset({"x"}), keeps_leases=True)]
        self.service = ControllerService(self._credentials, "controller-0", tasks=tasks, config=config)
        self.timers: WatchedTimers = self.service._timers  # type: ignore[assignment]

    def connection(self, name: str) -> Connection:
        self._opened.append(Connection(self._credentials, "controller-0", name, CONTROLLER_REPLIES))
        return self._opened[-1]

    def unit(self, rows: list[int] | None = None) -> Connection:
        connection = self.connection("storage-0")
        ones = [1] * len(rows or [])
        records = [RowRecords(1, rows, rows, ones, ones, ones, ["x"], [])] if rows else []
        accepted = ask(connection, RegisterUnit("storage-0", "life", records, {}))
        assert isinstance(accepted, UnitAccepted)
        return connection

    def close(self) -> None:
        for connection in self._opened:
            connection.close()
        self.service.close()
        self.service.close()


def ask(connection: Connection, message: Message) -> Any:
    return connection.call_service(message, timeout_s=WAIT_S)[0]


@pytest.fixture(name="bench")
def _bench(credentials: Credentials, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(controller, "Timers", WatchedTimers)
    bench = Bench(credentials)
    yield bench
    bench.close()


def test_unit_that_broke_twice_has_its_whole_grace_again(bench: Bench) -> None:
    bench.unit().close()
    until(lambda: bench.timers.running(GRACE_S) == [True])
    again = bench.unit()
    assert bench.timers.running(GRACE_S) == [False]
    again.close()
    until(lambda: bench.timers.running(GRACE_S) == [False, True])


def test_deadline_of_an_answered_request_is_off(bench: Bench) -> None:
    unit, watcher = bench.unit(), bench.connection("watcher")
    waiting = watcher.submit(WatchLost(0, WATCH_S))
    until(lambda: bench.timers.running(WATCH_S) == [True])
    ask(unit, RowsCreated("storage-0", 1, [0], [0], ["x"], [1], 4))
    unit.close()
    until(lambda: bench.timers.running(GRACE_S) == [True])
    give_up = next(timer.callback for delay, timer in bench.timers.set if delay == GRACE_S)
    assert give_up is not None
    give_up()
    assert waiting.result(WAIT_S)[0].rows == [0]
    assert bench.timers.running(WATCH_S) == [False]


def test_request_of_a_client_that_left_is_forgotten(bench: Bench) -> None:
    watcher = bench.connection("watcher")
    watcher.submit(WatchLost(0, WATCH_S))
    until(lambda: bench.timers.running(WATCH_S) == [True])
    watcher.close()
    until(lambda: bench.timers.running(WATCH_S) == [False])
    until(lambda: not bench.service._shell.state.table.losses.watchers)


@pytest.mark.gate
def test_restarted_controller_does_not_wait_for_a_consumer_whose_next_start_is_there(bench: Bench) -> None:
    for owner in ("rollout@0.dead", "reader@dead"):
        ask(bench.connection(owner), Join(owner, []))
    bench.service.close()  # and so did not see its consumers leave
    bench.start()
    assert waiting_for(bench) == "reader@dead rollout@0.dead"
    ask(bench.connection("reader"), Join("reader@new", []))
    ask(bench.connection("rollout"), Join("rollout@1.new", []))
    assert waiting_for(bench) == "reader@dead", "another client may have that name"
    bench.service.close()
    bench.start()
    assert waiting_for(bench) == "reader@dead reader@new rollout@1.new"


@pytest.mark.gate
def test_process_of_another_message_format_is_refused_by_name_and_leaves_no_trace(bench: Bench) -> None:
    ask(bench.connection("reader"), Join("reader@here", []))
    with pytest.raises(PeerRefused, match=f"rollout@0.other speaks format {FORMAT + 1} .* this controller format"):
        ask(bench.connection("rollout"), Join("rollout@0.other", [], format=FORMAT + 1))
    with pytest.raises(PeerRefused, match=f"storage-0 speaks format {FORMAT + 1} .* this controller format"):
        ask(bench.connection("storage-0"), RegisterUnit("storage-0", "life", [], {}, format=FORMAT + 1))
    bench.service.close()
    bench.start()
    assert waiting_for(bench) == "reader@here"


def test_restarted_controller_that_is_stopped_does_not_wait_for_those_who_left(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "_LEFT_S", 0.1)
    ask(bench.connection("rollout"), Join("rollout@0.left", []))
    bench.service.close()
    bench.start()
    actor = bench.connection("actor")
    ask(actor, Join("actor@0.here", []))
    fetch = actor.submit(FetchRows("train", "actor@0.here", 1, 0, timeout_s=5.0))
    bench.service.stop()
    assert fetch.result(WAIT_S)[0].reason is NoRowsReason.STOP


@pytest.mark.gate
def test_leases_of_an_earlier_start_return_when_the_next_one_joins(bench: Bench) -> None:
    ask(bench.unit(), RowsCreated("storage-0", 1, [0], [0], ["x"], [1], 4))
    stopped = bench.connection("rollout")
    ask(stopped, Join("rollout@0.dead", []))
    assert ask(stopped, FetchRows("train", "rollout@0.dead", 1, 0, WAIT_S)).rows == [0]
    other = bench.connection("rollout")
    ask(other, Join("rollout@0.other", []))
    assert ask(other, GetQueueStats()).tasks[0].leased == 1
    ask(other, Join("rollout@1.new", []))
    assert ask(other, GetQueueStats()).tasks[0].leased == 0


def test_a_trainer_whose_channel_broke_keeps_its_lease_over_a_restart(bench: Bench) -> None:
    ask(bench.unit(), RowsCreated("storage-0", 1, [0, 1], [0, 1], ["x"], [1, 1], 8))
    trainer, other = bench.connection("actor"), bench.connection("other")
    ask(trainer, Join("actor@0.here", []))
    share = ask(trainer, FetchRound("gang", "actor@0.here", 1, 0, 2, 0, 1, WAIT_S))
    assert share.rows == [0, 1]
    trainer.close()
    until(lambda: "actor@0.here" not in ask(other, GetQueueStats()).owners)
    bench.service.close()
    bench.start()
    bench.unit([0, 1])
    again = bench.connection("actor")
    held = Held("gang", share.token, 1, [0, 1], round_index=0, rank=0, num_ranks=1, largest_slice=2)
    assert ask(again, Join("actor@0.here", [held])).void == []


@pytest.mark.parametrize("acked", [1, 2])
def test_a_restarted_controller_waits_for_ranks_with_shares_and_not_for_those_whose_steps_are_over(
    bench: Bench, acked: int
) -> None:
    """A rank that finished its share is missed, too: the others count the rounds that it had."""
    unit, rank, other = bench.unit(), bench.connection("actor"), bench.connection("other")
    ask(unit, RowsCreated("storage-0", 1, [0, 1], [0, 1], ["x"], [1, 1], 8))
    ask(other, OpenPartition(1, 2))
    for name in ("actor@0.here", "reader@0.here"):
        ask(rank, Join(name, []))
    assert ask(rank, FetchRound("gang", "actor@0.here", 1, 0, 1, 0, 2, WAIT_S)).rows == [0]
    ask(unit, OutputsWritten("storage-0", "gang", list(range(acked)), [], [], 0))
    rank.close()
    until(lambda: "actor@0.here" not in ask(other, GetQueueStats()).owners)
    bench.service.close()
    bench.start()
    assert waiting_for(bench) == ("actor@0.here storage-0" if acked == 1 else "storage-0")


def test_a_consumer_that_joins_while_the_end_of_its_earlier_channel_is_noticed_is_waited_for(bench: Bench) -> None:
    earlier, later = bench.connection("reader"), bench.connection("reader")
    ask(earlier, Join("reader@here", []))
    durable, noticed = bench.service._durable, threading.Event()
    add, ended = durable.add_peer, bench.service.handle_disconnect

    def note(session: ChannelSession) -> None:
        ended(session)
        noticed.set()

    def add_slowly(kind: str, name: str) -> None:
        add(kind, name)
        earlier.close()
        noticed.wait(0.5)

    bench.service.handle_disconnect, durable.add_peer = note, add_slowly  # type: ignore[method-assign]
    ask(later, Join("reader@here", []))
    assert noticed.wait(WAIT_S)
    durable.add_peer = add  # type: ignore[method-assign]
    bench.service.close()
    bench.start()
    assert waiting_for(bench) == "reader@here"


class ToldUnit:
    """A storage unit's ear: `heard` is what controllers tell it, `confirms` lets it answer."""

    def __init__(self, credentials: Credentials) -> None:
        self.heard: queue.Queue[Any] = queue.Queue()
        self.confirms = threading.Event()
        self._server = ChannelServer(credentials, "storage-0", UNIT_REQUESTS, self)

    def handle(self, call: Call) -> None:
        """Confirm, once that is allowed."""
        self.heard.put(call.message)
        assert self.confirms.wait(WAIT_S)
        call.send_reply(Done())

    def handle_disconnect(self, session: ChannelSession) -> None:
        """Nothing hangs on it."""

    def close(self) -> None:
        """Leave."""
        self.confirms.set()
        self._server.close()


@pytest.mark.parametrize("moment", ["while it learns what tasks write", "after it told what the unit missed"])
def test_a_unit_that_registers_while_recovery_ends_hears_of_the_fence_before_its_rows_go_out(
    bench: Bench, credentials: Credentials, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    bench.unit([0]).close()
    bench.service.close()
    bench.start()
    service, there, goes_on = bench.service, threading.Event(), threading.Event()

    def hold_once() -> None:
        there.set()
        assert goes_on.wait(WAIT_S)

    if moment == "after it told what the unit missed":
        catch_up = service._shell.orders.catch_up
        monkeypatch.setattr(service._shell.orders, "catch_up", lambda unit: (catch_up(unit), hold_once()))
    else:
        read = service._shell._outputs
        monkeypatch.setattr(service._shell, "_outputs", lambda: (hold_once(), read())[1])
    unit, other = bench.connection("storage-0"), bench.connection("other")
    told = ToldUnit(credentials)
    registering = unit.submit(
        RegisterUnit("storage-0", "life", [RowRecords(1, [0], [0], [1], [1], [1], ["x"], [])], {})
    )
    assert there.wait(WAIT_S)
    service._end_recovery()
    goes_on.set()
    assert isinstance(told.heard.get(timeout=WAIT_S), FenceTask)
    with contextlib.suppress(TimeoutError):
        registering.result(0.5)  # it must not: the fence is not confirmed
    assert not isinstance(ask(other, FetchRows("train", "other@1", 1, 0, timeout_s=0.0)), LeaseGrant)
    told.confirms.set()
    assert isinstance(registering.result(WAIT_S)[0], UnitAccepted)
    assert ask(other, FetchRows("train", "other@1", 1, 0, WAIT_S)).rows == [0]
    told.close()


def waiting_for(bench: Bench) -> str:
    """Return whom a restarted controller waits for."""
    reply = ask(bench.connection("other"), FetchRows("train", "other@1", 1, 0, timeout_s=0.0))
    prefix = "the controller was restarted and waits for "
    assert reply.waiting_for.startswith(prefix)
    return str(reply.waiting_for.removeprefix(prefix))


def test_only_a_put_of_rows_that_are_away_asks_the_store_what_tasks_write(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.unit([0]).close()
    until(lambda: bench.timers.running(GRACE_S) == [True])
    other = bench.connection("storage-1")
    ask(other, RegisterUnit("storage-1", "life", [], {}))
    reads, read = [], bench.service._shell._outputs
    monkeypatch.setattr(bench.service._shell, "_outputs", lambda: (reads.append(1), read())[1])
    for row, num_reads in ((5, 0), (6, 0), (0, 1), (7, 1)):
        ask(other, RowsCreated("storage-1", 1, [row], [row], ["x"], [1], 4))
        assert len(reads) == num_reads, f"after row {row}"


@pytest.mark.parametrize("fact", ["save_lost", "save_rows"])
def test_a_controller_whose_durable_write_fails_has_failed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fact: str
) -> None:
    """It must start again: an answer that it dropped would hold a lease for ever, and a loss would not be written."""
    bench.unit([0]).close()
    until(lambda: bench.timers.running(GRACE_S) == [True])
    waiting = bench.connection("other").submit(FetchRows("train", "other@1", 1, 0, timeout_s=WAIT_S))

    def fail(*_: Any) -> None:
        raise TransportError("no answer of the job store")

    again, ones = bench.connection("storage-0"), [1]
    records = [RowRecords(1, [1], [1], ones, ones, ones, ["x"], [])]
    with monkeypatch.context() as patch:
        patch.setattr(bench.service._durable, fact, fail)
        with pytest.raises(TransportError, match="no answer of the job store"):
            ask(again, RegisterUnit("storage-0", "another life", records, {1: [2]}))
    assert bench.service.threads.failed.is_set()
    assert "durable facts" in str(bench.service.threads.failure)
    assert not waiting.done()
