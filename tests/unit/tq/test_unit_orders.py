"""What a controller tells the units, over fake channels."""

import queue
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from asyncflow.errors import LeaseFenced, PeerRefused, TransportError
from asyncflow.process import ServiceThreads
from tq.control import durable_facts as unit_orders
from tq.control.durable_facts import UnitOrders
from tq.control.events import Fenced, ForwardAck, OrderFenceRows, OrderFenceTask, OrderRemoveRows
from tq.messages import Done, FenceRows, FenceTask, PutOutputs, RemoveRows
from tq.refill import UNKNOWN


class FakeUnits:
    """All units of a queue behind one `ServiceChannels`.

    Attributes:
        heard: (unit, message) in order.
        answers: unit -> what it answers next instead of `Done`.
        silent: units that hear, and answer only when the test does it for them.
        asked: (unit, future) of those, in order.
    """

    def __init__(self, *arguments: Any) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.answers: dict[str, list[Exception]] = {}
        self.silent: set[str] = set()
        self.asked: queue.SimpleQueue[tuple[str, Future[Any]]] = queue.SimpleQueue()
        self._open: list[Future[Any]] = []

    def get(self, unit: str, replies: Any) -> Any:
        return FakeConnection(self, unit)

    def give_up_waiting(self, unit: str) -> None:
        """Nobody connects."""

    def by_unit(self, unit: str) -> list[Any]:
        return [message for name, message in self.heard if name == unit]

    def submit(self, unit: str, message: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        failures = self.answers.get(unit)
        if failures:
            future.set_exception(failures.pop(0))
        elif unit in self.silent:
            self._open.append(future)
            self.asked.put((unit, future))
        else:
            self.heard.append((unit, message))
            future.set_result((Done(), torch.empty(0)))
        return future

    def close(self) -> None:
        for future in self._open:
            if not future.done():
                future.set_exception(TransportError("closed"))


class FakeConnection:
    def __init__(self, units: FakeUnits, unit: str) -> None:
        self._units = units
        self._unit = unit

    def submit(self, message: Any) -> "Future[Any]":
        return self._units.submit(self._unit, message)


class Bench:
    """Orders to fake units; `carry_out` waits until all of them were carried out."""

    def __init__(self) -> None:
        self.fenced: list[Fenced] = []
        self.reports: queue.SimpleQueue[Fenced] = queue.SimpleQueue()
        self.threads = ServiceThreads("controller-0")
        self.orders = UnitOrders(
            None,  # type: ignore[arg-type]
            "controller-0",
            timeout_s=60,
            fenced=self.reports.put,
            threads=self.threads,
        )
        self.units: FakeUnits = self.orders._links  # type: ignore[assignment]

    def carry_out(self, *orders: Any) -> None:
        for order in (*orders, *(OrderFenceTask("last", 99, unit, ()) for unit in UNITS)):
            self.orders.add_order(order)
        for _ in UNITS:
            while (report := self.reports.get(timeout=10)).task != "last":
                self.fenced.append(report)
        self.units.heard = [heard for heard in self.units.heard if heard[1] != LAST]


UNITS = ("storage-0", "storage-1")
LAST = FenceTask("last", 99, [])


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(unit_orders, "ServiceChannels", FakeUnits)
    monkeypatch.setattr(unit_orders, "_RETRY_S", 0.0)
    bench = Bench()
    yield bench
    bench.orders.close()
    bench.threads.check()


def test_each_order_becomes_the_unit_s_message_and_each_unit_hears_them_in_order(bench: Bench) -> None:
    bench.carry_out(
        OrderFenceRows("ref", 7, "storage-0", (1, 2)),
        OrderFenceTask("train", 8, "storage-1", (3,)),
        OrderRemoveRows({"storage-0": (5,)}, UNKNOWN),
        ForwardAck("train", 6, {"storage-1": (9,)}),
    )
    assert bench.units.by_unit("storage-0") == [FenceRows("ref", 7, [1, 2]), RemoveRows([5])]
    assert bench.units.by_unit("storage-1") == [FenceTask("train", 8, [3]), PutOutputs("train", 6, [9], [])]
    assert set(bench.fenced) == {Fenced("ref", 7), Fenced("train", 8)}


def test_unit_that_never_answers_delays_no_other(bench: Bench) -> None:
    bench.units.silent.add("storage-0")
    bench.orders.add_order(OrderFenceRows("ref", 7, "storage-0", (1,)))
    bench.orders.add_order(OrderFenceRows("ref", 8, "storage-1", (3,)))
    bench.orders.add_order(OrderFenceRows("ref", 9, "storage-1", (4,)))
    assert [bench.reports.get(timeout=10) for _ in range(2)] == [Fenced("ref", 8), Fenced("ref", 9)]
    assert bench.units.heard == [("storage-1", FenceRows("ref", 8, [3])), ("storage-1", FenceRows("ref", 9, [4]))]
    unit, asked = bench.units.asked.get(timeout=10)
    assert unit == "storage-0" and bench.reports.empty()
    bench.units.silent.clear()
    asked.set_result((Done(), torch.empty(0)))
    assert bench.reports.get(timeout=10) == Fenced("ref", 7)


def test_unit_that_was_down_is_told_when_it_registers(bench: Bench) -> None:
    bench.units.answers["storage-0"] = [TransportError("down")] * 2
    bench.orders.add_order(OrderFenceRows("ref", 7, "storage-0", (1,)))
    assert bench.reports.get(timeout=10) == Fenced("ref", 7)
    with pytest.raises(TransportError, match="down"):
        bench.orders.catch_up("storage-0")
    assert bench.units.heard == []
    bench.orders.catch_up("storage-0")
    assert bench.units.heard == [("storage-0", FenceRows("ref", 7, [1]))]
    bench.orders.catch_up("storage-0")
    assert len(bench.units.heard) == 1


def test_what_a_unit_is_owed_comes_before_what_is_ordered_later(bench: Bench) -> None:
    bench.units.answers["storage-0"] = [TransportError("down")]
    bench.orders.add_order(OrderFenceRows("ref", 7, "storage-0", (1,)))
    assert bench.reports.get(timeout=10) == Fenced("ref", 7)
    bench.carry_out(OrderRemoveRows({"storage-0": (3,)}, UNKNOWN))
    assert bench.units.by_unit("storage-0") == [FenceRows("ref", 7, [1]), RemoveRows([3])]


def test_fence_that_a_unit_cannot_confirm_yet_does_not_hold_before_it_does(bench: Bench) -> None:
    bench.units.answers["storage-0"] = [PeerRefused("controller-1 has not confirmed a put")] * 2
    bench.orders.add_order(OrderFenceRows("ref", 7, "storage-0", (1,)))
    bench.orders.add_order(OrderRemoveRows({"storage-0": (3,)}, UNKNOWN))
    assert bench.reports.get(timeout=10) == Fenced("ref", 7)
    assert bench.units.answers["storage-0"] == [], "it was told until it confirmed"
    assert FenceRows("ref", 7, [1]) in bench.units.by_unit("storage-0")


def test_unit_that_registers_again_does_not_wait_for_what_its_earlier_life_was_told(bench: Bench) -> None:
    bench.units.silent.add("storage-0")
    bench.orders.add_order(OrderFenceRows("ref", 7, "storage-0", (1,)))
    _, earlier = bench.units.asked.get(timeout=10)
    bench.units.silent.clear()
    bench.orders.catch_up("storage-0")
    assert bench.reports.get(timeout=10) == Fenced("ref", 7)
    assert bench.units.heard == [("storage-0", FenceRows("ref", 7, [1]))]
    earlier.set_exception(TransportError("it died"))
    bench.carry_out(OrderRemoveRows({"storage-0": (3,)}, UNKNOWN))
    assert bench.units.by_unit("storage-0")[1:] == [RemoveRows([3])]
    assert bench.fenced == [], "reported once"


def test_what_is_ordered_after_a_unit_registered_again_does_not_wait_for_its_earlier_life(bench: Bench) -> None:
    """The thread that connects to a process that dies may wait for long: a row that is put again must not."""
    bench.units.silent.add("storage-0")
    bench.orders.add_order(OrderFenceRows("ref", 7, "storage-0", (1,)))
    _, earlier = bench.units.asked.get(timeout=10)
    bench.units.silent.clear()
    bench.orders.catch_up("storage-0")
    assert bench.reports.get(timeout=10) == Fenced("ref", 7)
    bench.orders.add_order(OrderFenceRows("ref", 8, "storage-0", (1,)))
    assert bench.reports.get(timeout=10) == Fenced("ref", 8)
    assert not earlier.done()
    earlier.set_exception(TransportError("it died"))
    bench.carry_out(OrderRemoveRows({"storage-0": (3,)}, UNKNOWN))
    assert bench.units.by_unit("storage-0") == [
        FenceRows("ref", 7, [1]),
        FenceRows("ref", 8, [1]),
        RemoveRows([3]),
    ]
    assert bench.fenced == [], "reported once"


@pytest.mark.parametrize("refusal", [LeaseFenced("gone again"), PeerRefused("controller-1 has not confirmed")])
def test_refused_ack_of_lost_rows_is_not_told_again(bench: Bench, refusal: Exception) -> None:
    bench.units.answers["storage-0"] = [refusal]
    bench.carry_out(ForwardAck("train", 6, {"storage-0": (9,)}))
    bench.orders.catch_up("storage-0")
    assert bench.units.heard == []
