"""What a controller tells the units, over fake channels."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from asyncflow.errors import PeerRefused, Superseded, TransportError
from tq.control import unit_orders
from tq.control.state import Commit, Fence, FenceAll, Fenced, Quarantine
from tq.control.unit_orders import UnitOrders
from tq.messages import Done, FenceRows, FenceTask, PutOutputs, QuarantineRows


class FakeUnits:
    """All units of a queue behind one `ServiceChannels`; `answers` says what a unit does with the next message."""

    def __init__(self, *arguments: Any) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.answers: dict[str, list[Exception]] = {}

    def get(self, unit: str, replies: Any) -> Any:
        return FakeConnection(self, unit)

    def close(self) -> None:
        pass


class FakeConnection:
    def __init__(self, units: FakeUnits, unit: str) -> None:
        self._units = units
        self._unit = unit

    def submit(self, message: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        failures = self._units.answers.get(self._unit)
        if failures:
            future.set_exception(failures.pop(0))
        else:
            self._units.heard.append((self._unit, message))
            future.set_result((Done(), torch.empty(0)))
        return future


class Bench:
    """Chores with fake units; `carry_out` waits until all of them were carried out."""

    def __init__(self) -> None:
        self.fenced: list[Fenced] = []
        self._told = threading.Semaphore(0)
        self.orders = UnitOrders(None, "controller-0", timeout_s=5, fenced=self._hold)  # type: ignore[arg-type]
        self.units: FakeUnits = self.orders._links  # type: ignore[assignment]

    def carry_out(self, *orders: Any) -> None:
        for order in (*orders, FenceAll("last", 99, (), ())):
            self.orders.add(order)
        while not self.fenced or self.fenced[-1].task != "last":
            assert self._told.acquire(timeout=5)
        self.fenced.pop()

    def _hold(self, event: Fenced) -> None:
        self.fenced.append(event)
        self._told.release()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(unit_orders, "ServiceChannels", FakeUnits)
    bench = Bench()
    yield bench
    bench.orders.close()


def test_each_chore_becomes_the_unit_s_message(bench: Bench) -> None:
    bench.carry_out(
        Fence("ref", 7, {"storage-0": (1, 2)}),
        FenceAll("train", 8, (3,), ("storage-1",)),
        Quarantine("ref", 4, {"storage-0": (5,)}),
        Commit("train", "actor@1", 6, {"storage-1": (9,)}),
    )
    assert bench.units.heard == [
        ("storage-0", FenceRows("ref", 7, [1, 2])),
        ("storage-1", FenceTask("train", 8, [3])),
        ("storage-0", QuarantineRows("ref", 4, [5])),
        ("storage-1", PutOutputs("train", "actor@1", 6, [9], [])),
    ]
    assert bench.fenced == [Fenced("ref", 7), Fenced("train", 8)]


def test_unit_that_was_down_is_told_when_it_registers(bench: Bench) -> None:
    bench.units.answers["storage-0"] = [TransportError("down")]
    bench.carry_out(Fence("ref", 7, {"storage-0": (1,)}))
    assert bench.fenced == [Fenced("ref", 7)] and bench.units.heard == []
    bench.orders.catch_up("storage-0")
    assert bench.units.heard == [("storage-0", FenceRows("ref", 7, [1]))]
    bench.orders.catch_up("storage-0")
    assert len(bench.units.heard) == 1


def test_what_a_registering_unit_could_not_be_told_is_still_owed(bench: Bench) -> None:
    bench.units.answers["storage-0"] = [TransportError("down") for _ in range(3)]
    bench.carry_out(Fence("ref", 7, {"storage-0": (1,)}), Quarantine("ref", 2, {"storage-0": (3,)}))
    with pytest.raises(TransportError, match="down"):
        bench.orders.catch_up("storage-0")
    bench.orders.catch_up("storage-0")
    assert [message for _, message in bench.units.heard] == [FenceRows("ref", 7, [1]), QuarantineRows("ref", 2, [3])]


@pytest.mark.parametrize("refusal", [Superseded("gone again"), PeerRefused("controller-1 has not confirmed")])
def test_refused_ack_of_lost_rows_is_not_told_again(bench: Bench, refusal: Exception) -> None:
    bench.units.answers["storage-0"] = [refusal]
    bench.carry_out(Commit("train", "actor@1", 6, {"storage-0": (9,)}))
    bench.orders.catch_up("storage-0")
    assert bench.units.heard == []
