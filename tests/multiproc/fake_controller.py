"""A storage unit's surroundings: clients, and controllers that hear everything and confirm, park or refuse as told."""

import queue
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncflow.errors import AsyncFlowError
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Call, ChannelServer, ChannelSession, Connection
from tq import Column, StorageUnit
from tq.config import QueueConfig
from tq.messages import (
    CONTROLLER_REQUESTS,
    UNIT_REPLIES,
    Done,
    GetColumns,
    GetUnitStats,
    Message,
    PutOutputs,
    PutRows,
    RegisterUnit,
    RowsAccepted,
    RowsConfirmed,
    RowsCreated,
    UnitAccepted,
    UnitAlive,
    UnitStats,
)
from tq.wire import describe, unpack

WAIT_S = 20.0


class FakeController:
    """One life of a controller.

    Attributes:
        accept: its answer to every inventory.
        parking: message types that are kept unanswered in `parked`.
        refusals: message type -> error.
        heard: everything, in order.
    """

    def __init__(
        self,
        credentials: Credentials,
        name: str = "controller-0",
        *,
        accept: UnitAccepted | None = None,
        parking: Collection[type[Message]] = (),
    ) -> None:
        self.accept = accept or UnitAccepted(["ref", "train"], [])
        self.parking: set[type[Message]] = set(parking)
        self.refusals: dict[type[Message], AsyncFlowError] = {}
        self.parked: queue.Queue[Call] = queue.Queue()
        self.heard: queue.Queue[Any] = queue.Queue()
        self._server = ChannelServer(credentials, name, CONTROLLER_REQUESTS, self)

    def handle(self, call: Call) -> None:
        """Note the message, then do as told."""
        kind = type(call.message)
        if kind is UnitAlive:  # comes at any time
            call.send_reply(Done())
            return
        self.heard.put(call.message)
        if kind in self.parking:
            self.parked.put(call)
        elif kind in self.refusals:
            raise self.refusals[kind]
        else:
            replies = {RegisterUnit: self.accept, RowsCreated: RowsAccepted(), RowsConfirmed: RowsAccepted()}
            call.send_reply(replies.get(kind, Done()))

    def handle_disconnect(self, session: ChannelSession) -> None:
        """Nothing hangs on a session."""

    def hears(self, kind: type[Message]) -> Any:
        """Return the next message, which must be of this type."""
        message = self.heard.get(timeout=WAIT_S)
        assert isinstance(message, kind), message
        return message

    def parks(self) -> Call:
        """Return the next parked request."""
        return self.parked.get(timeout=WAIT_S)

    def close(self) -> None:
        """Die, as far as units can tell."""
        self._server.close()


class UnitClient:
    """A client of one unit, in terms of columns."""

    def __init__(self, credentials: Credentials, unit: str = "storage-0", name: str = "client") -> None:
        self.connection = Connection(credentials, unit, name, UNIT_REPLIES)

    def create(self, rows: list[int], columns: Mapping[str, Column] | None = None, **fields: Any) -> Any:
        """Put new rows; returns the future of the answer."""
        headers, payload = describe(columns or {}, narrow=not self.connection.shared)
        message = PutRows(fields.pop("partition", 1), rows, fields.pop("groups", rows), headers, **fields)
        return self.connection.submit(message, payload)

    def put(self, task: str, token: int, rows: list[int], columns: Mapping[str, Column] | None = None) -> Any:
        """Put outputs; returns the future of the answer."""
        headers, payload = describe(columns or {}, narrow=not self.connection.shared)
        return self.connection.submit(PutOutputs(task, token, rows, headers), payload)

    def get(self, rows: list[int], *names: str) -> dict[str, Column]:
        """Read columns."""
        reply, payload = self.connection.call_service(GetColumns(rows, list(names)), timeout_s=WAIT_S)
        return unpack(reply.columns, payload)

    def ask(self, message: Message) -> Any:
        """Send a request and wait for its answer."""
        return self.connection.call_service(message, timeout_s=WAIT_S)[0]

    def close(self) -> None:
        """Leave."""
        self.connection.close()


def numbers(*values: float) -> Column:
    """Return one float per row."""
    return Column.of_scalars(torch.tensor(values, dtype=torch.float32))


def done(future: Any) -> Any:
    """Return a put's answer."""
    return future.result(WAIT_S)[0]


def same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    return first.dtype == second.dtype and torch.equal(first.view(torch.uint8), second.view(torch.uint8))


CONFIG = QueueConfig(request_timeout_s=20)


class Bench:
    """Starts controllers, units and clients, and closes them whatever happens."""

    def __init__(self, credentials: Credentials) -> None:
        self.credentials = credentials
        self._started: list[Any] = []

    def controller(self, name: str = "controller-0", **options: Any) -> FakeController:
        return self._keep(FakeController(self.credentials, name, **options))

    def unit(self, config: QueueConfig = CONFIG, *, controllers: int = 1, name: str = "storage-0") -> StorageUnit:
        names = [f"controller-{k}" for k in range(controllers)]
        return self._keep(StorageUnit(self.credentials, name, config, controllers=names))

    def client(self, name: str = "client", unit: str = "storage-0") -> UnitClient:
        return self._keep(UnitClient(self.credentials, unit, name))

    def started(self, config: QueueConfig = CONFIG) -> tuple[FakeController, UnitClient]:
        """Return a controller that knows an empty unit, and a client."""
        controller = self.controller()
        unit = self.unit(config)
        controller.hears(RegisterUnit)
        until(unit._links.is_registered)
        return controller, self.client()

    def close(self) -> None:
        for one in reversed(self._started):
            one.close()

    def _keep(self, one: Any) -> Any:
        self._started.append(one)
        return one


def refused(future: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        future.result(WAIT_S)


def stats(client: UnitClient) -> UnitStats:
    return client.ask(GetUnitStats())


def until(happened: Callable[[], bool]) -> None:
    """Ask again until something that runs in the background has happened."""
    pause = threading.Event()
    for _ in range(400):
        if happened():
            return
        pause.wait(0.05)
    raise AssertionError("that did not happen")
