"""The queue's storage backend, if it is not memory: is its package there, and does its server answer."""

import importlib
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from asyncflow.extras import pip_line
from launcher.doctor.finding import Finding, reason
from launcher.doctor.needs import Needs

CHECK = "storage backend"
_MODULES = {"redis": "redis", "mooncake": "mooncake.store"}
_ANSWER_S = 5.0
_REDIS_PORT = 6379


@dataclass(frozen=True)
class BackendFacts:
    """What was tried.

    Attributes:
        import_error: of the backend's package; empty: none.
        server: where it is, without a password.
        server_error: why it does not answer; empty: it does.
    """

    import_error: str = ""
    server: str = ""
    server_error: str = ""


def check(needs: Needs) -> list[Finding]:
    """Look and judge."""
    return judge(gather(needs), needs)


def gather(needs: Needs) -> BackendFacts:
    """Import the package and connect to the server."""
    if needs.backend not in _MODULES:
        return BackendFacts()
    try:
        importlib.import_module(_MODULES[needs.backend])
    except ImportError as error:
        return BackendFacts(import_error=reason(error))
    if needs.backend == "redis":
        return BackendFacts("", *_ask_redis(needs.backend_address))
    return BackendFacts("", needs.backend_address, _connection_error(needs.backend_address))


def judge(facts: BackendFacts, needs: Needs) -> list[Finding]:
    """Say what is missing."""
    if needs.backend not in _MODULES:
        return [Finding.ok(CHECK, f"{needs.backend}: nothing else is needed")]
    if facts.import_error:
        text = f"{needs.backend} cannot be imported ({facts.import_error})"
        return [Finding.error(CHECK, text, pip_line(needs.backend))]
    if facts.server_error:
        text = f"{needs.backend} at {facts.server} does not answer ({facts.server_error})"
        start = "redis-server --port PORT" if needs.backend == "redis" else "mooncake_master --port=PORT"
        return [Finding.error(CHECK, text, f"start it ({start}), or correct tq.backend.address")]
    return [Finding.ok(CHECK, f"{needs.backend} at {facts.server} answers")]


def _ask_redis(address: str) -> tuple[str, str]:
    """Return (where it is, why it does not answer)."""
    import redis

    parts = urlsplit(address)
    server = f"{parts.hostname}:{parts.port or _REDIS_PORT}" if parts.hostname else parts.path
    try:
        client = redis.Redis.from_url(address, socket_timeout=_ANSWER_S, socket_connect_timeout=_ANSWER_S)
        client.ping()
        client.close()
    except (redis.RedisError, ValueError) as error:
        return server, reason(error)
    return server, ""


def _connection_error(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return "not HOST:PORT"
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        return reason(error)
    return ""
