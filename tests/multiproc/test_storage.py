"""A storage unit beside a controller that confirms when the test says so."""

import threading
from collections.abc import Iterator

import pytest
import torch
from peers import QUEUE, Credentials

from asyncflow.errors import PeerRefused, Superseded
from asyncflow.transport.connection import Connection
from asyncflow.transport.server import Call, ChannelServer, Session
from tq import Column, StorageUnit
from tq.messages import (
    CONTROLLER_REQUESTS,
    UNIT_REPLIES,
    Done,
    FenceRows,
    GetUnitStats,
    OutputsWritten,
    PutOutputs,
    PutRows,
)
from tq.wire import pack


class SlowController:
    """Confirms creations at once, outputs when told."""

    def __init__(self) -> None:
        self.written: list[Call] = []
        self.arrived = threading.Event()
        self.refusing = False

    def handle(self, call: Call) -> None:
        if self.refusing:
            raise PeerRefused("not today")
        if isinstance(call.message, OutputsWritten):
            self.written.append(call)
            self.arrived.set()
        else:
            call.reply(Done())

    def disconnected(self, session: Session) -> None:
        """Nothing hangs on a session."""


Bench = tuple[SlowController, Connection, Connection, Connection]


@pytest.fixture(name="bench")
def _bench(credentials: Credentials) -> Iterator[Bench]:
    """The controller, and three clients of a unit that holds rows 0 and 1."""
    slow = SlowController()
    server = ChannelServer(credentials, "controller", CONTROLLER_REQUESTS, slow)
    unit = StorageUnit(credentials, "storage-0", QUEUE, controller="controller")
    clients = [Connection(credentials, "storage-0", f"client-{k}", UNIT_REPLIES) for k in range(3)]
    clients[0].call(PutRows(1, [0, 1], [0, 0], []), timeout_s=10)
    yield slow, clients[0], clients[1], clients[2]
    for client in clients:
        client.close()
    unit.close()
    server.close()


def outputs(token: int, value: float = 1.0) -> tuple[PutOutputs, torch.Tensor]:
    """Return a put of row 0."""
    headers, payload = pack({"ref": Column.of_scalars(torch.tensor([value]))})
    return PutOutputs("ref", "a", token, [0], headers), payload


def test_fence_is_confirmed_only_when_the_controller_knows_what_was_written_before(bench: Bench) -> None:
    """Else the controller would hand out a row that is done."""
    slow, owner, other, bystander = bench
    put = owner.submit(*outputs(3))
    assert slow.arrived.wait(10)
    fence = other.submit(FenceRows("ref", 5, [0]))
    bystander.call(FenceRows("ref", 5, [1]), timeout_s=10)
    assert not fence.done()
    assert not put.done()
    slow.written[0].reply(Done())
    assert isinstance(put.result(10)[0], Done)
    assert isinstance(fence.result(10)[0], Done)
    with pytest.raises(Superseded):
        other.call(*outputs(4), timeout_s=10)
    with pytest.raises(Superseded):
        other.call(*outputs(6), timeout_s=10)


def test_repeated_put_is_notified_again_and_a_different_one_is_refused(bench: Bench) -> None:
    slow, owner, _, _ = bench
    for attempt in range(2):
        put = owner.submit(*outputs(3))
        assert slow.arrived.wait(10)
        slow.arrived.clear()
        slow.written[attempt].reply(Done())
        put.result(10)
    with pytest.raises(PeerRefused, match="something else"):
        owner.call(*outputs(3, value=2.0), timeout_s=10)


def test_failed_notification_fails_the_put_of_new_rows_and_leaves_none(bench: Bench) -> None:
    slow, owner, _, _ = bench
    slow.refusing = True
    with pytest.raises(PeerRefused, match="not today"):
        owner.call(PutRows(1, [7], [7], []), timeout_s=10)
    slow.refusing = False
    assert owner.call(GetUnitStats(), timeout_s=10)[0].num_rows == 2
    owner.call(PutRows(1, [7], [7], []), timeout_s=10)
