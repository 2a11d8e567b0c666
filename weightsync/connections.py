"""Channels to a service that may die and come back: one after the other, until its user closes."""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from torch import Tensor

from asyncflow.errors import TransportError
from asyncflow.transport.frame import Limits
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Connection
from weightsync.messages import FetchPlan, PlanFetched, Reply
from weightsync.plan import TransferPlan

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_PLAN_TIMEOUT_S = 60.0
_PAUSE_S = 0.2
_LOOK_S = 0.5
"""How often the wait for a parked answer looks at its stop event (s)."""


def connections(
    credentials: Credentials,
    target: str,
    name: str,
    *,
    stop: threading.Event,
    failed: Callable[[TransportError], None] | None = None,
    limits: Limits | None = None,
) -> Iterator[Connection]:
    """Yield a channel to `target`, and another whenever the body of the loop is done with it, until `stop` is set.

    The body handles what breaks inside it; the channel is closed after it, which is harmless if it was before.

    Args:
        credentials: store and secret.
        target: the service.
        name: of this end.
        stop: ends the waiting, too.
        failed: is told when there was no connecting; None: that is only logged.
        limits: of the channel; None: the usual ones.
    """
    while not stop.is_set():
        try:
            connection = Connection(
                credentials, target, name, Reply, limits=limits, timeout_s=_CONNECT_TIMEOUT_S, stop=stop
            )
        except TransportError as error:
            logger.debug("%s: %s", name, error)
            if failed is not None:
                failed(error)
        else:
            try:
                yield connection
            finally:
                connection.close()
        stop.wait(_PAUSE_S)


def parked_reply(future: "Future[tuple[Any, Tensor]]", *, stop: threading.Event) -> Any:
    """Wait for an answer that comes when there is something to say; None: `stop` was set first.

    Raises:
        TransportError: the channel broke.
    """
    while not stop.is_set():
        try:
            return future.result(timeout=_LOOK_S)[0]
        except FutureTimeout:
            continue
    return None


def fetch_plan(connection: Connection, digest: str) -> TransferPlan:
    """Ask an agent for a plan.

    Raises:
        TransportError: the channel broke, or that agent does not know it, either.
    """
    reply, _ = connection.call(FetchPlan(digest), timeout_s=_PLAN_TIMEOUT_S)
    assert isinstance(reply, PlanFetched)
    return TransferPlan.decode(reply.plan)
