"""Asks a weight agent what it holds and who computes with what; changes nothing there."""

import threading

from asyncflow.transport.connection import Connection
from asyncflow.transport.handshake import Credentials
from weightsync.messages import AgentStatus, AskStatus, Reply


def connect_agent(
    credentials: Credentials, agent: str, name: str, *, timeout_s: float, stop: threading.Event | None = None
) -> Connection:
    """Return a channel to `agent`, e.g. `weights-0`, for a process called `name`; no longer wait once `stop` is set.

    Raises:
        TransportError: the agent does not answer within `timeout_s`.
    """
    return Connection(credentials, agent, name, Reply, timeout_s=timeout_s, stop=stop)


def agent_status(connection: Connection, *, timeout_s: float) -> AgentStatus:
    """Return the state of the agent at the other end.

    Raises:
        TransportError: it does not answer within `timeout_s`.
    """
    status, _ = connection.call(AskStatus(), timeout_s=timeout_s)
    assert isinstance(status, AgentStatus)
    return status
