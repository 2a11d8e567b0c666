"""Asks a weight agent what it holds and who computes with what; changes nothing there."""

from asyncflow.transport.connection import Connection
from asyncflow.transport.handshake import Credentials
from weightsync.messages import AgentStatus, AskStatus, Reply


def ask_agent(credentials: Credentials, agent: str, name: str, *, timeout_s: float) -> AgentStatus:
    """Return the state of `agent`.

    Args:
        credentials: store and secret.
        agent: its name, e.g. `weights-0`.
        name: who asks.
        timeout_s: for it to answer.

    Raises:
        TransportError: it does not.
    """
    connection = Connection(credentials, agent, name, Reply, timeout_s=timeout_s)
    try:
        status, _ = connection.call(AskStatus(), timeout_s=timeout_s)
        assert isinstance(status, AgentStatus)
        return status
    finally:
        connection.close()
