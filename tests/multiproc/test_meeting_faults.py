"""What breaks while a channel is opened: the acceptor's store client, or the client's thread."""

import threading
from typing import Any

import pytest
from echo_peers import SECRET, Credentials, Echo, Ping, Pong
from torch.distributed import DistNetworkError

from asyncflow.errors import RoleFailed, TransportError
from asyncflow.process import ServiceThreads
from asyncflow.sealed_store import SealedStore
from asyncflow.transport.server import ChannelServer, ChannelSession, Connection
from weightsync.messages import connections


class BreakingCredentials(Credentials):
    """The store clients of the acceptor (they alone have a deadline of their own) break as often as told."""

    breaks: list[Exception]

    def own_store(self, timeout_s: float | None = None) -> SealedStore:
        """Return a client that works, or breaks at the first pop."""
        store = super().own_store(timeout_s)
        if timeout_s is not None and self.breaks:
            error = self.breaks.pop()

            def broken(_: str) -> bytes:
                raise error

            store.queue_pop = broken  # type: ignore[method-assign]
        return store


def breaking(credentials: Credentials, *breaks: Exception) -> BreakingCredentials:
    broken = BreakingCredentials(credentials.store, SECRET, credentials.timeout_s)
    object.__setattr__(broken, "breaks", list(breaks))
    return broken


def test_server_whose_store_client_breaks_takes_another_one(credentials: Credentials) -> None:
    threads = ServiceThreads("here")
    lost = DistNetworkError("connection reset")
    server = ChannelServer(breaking(credentials, lost, lost), "here", Ping, Echo(), threads=threads)
    try:
        connection = Connection(credentials, "here", "client", Pong)
        assert connection.call_service(Ping("hello"), timeout_s=10)[0].text == "hello"
        connection.close()
        threads.check()
    finally:
        server.close()


@pytest.mark.parametrize(
    "breaks", [[DistNetworkError("connection reset")] * 100, [KeyError("nobody thought of this")]], ids=["store", "bug"]
)
def test_server_that_can_accept_nobody_fails_its_service(credentials: Credentials, breaks: list[Exception]) -> None:
    threads = ServiceThreads("here")
    server = ChannelServer(breaking(credentials, *breaks), "here", Ping, Echo(), threads=threads)
    try:
        assert threads.failed.wait(30)
        with pytest.raises(RoleFailed, match=f"here: thread accept-here died: .*{breaks[0].args[0]}"):
            threads.check()
    finally:
        server.close()


def refuse_thread(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Let the next thread of that name not start; returns a list that is empty once that has happened."""
    start, refusals = threading.Thread.start, ["can't start new thread"]

    def start_unless_refused(thread: threading.Thread) -> None:
        if thread.name == name and refusals:
            raise RuntimeError(refusals.pop())
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_unless_refused)
    return refusals


class LeavingEcho(Echo):
    """Knows that a client left."""

    def __init__(self) -> None:
        super().__init__()
        self.left = threading.Event()

    def handle_disconnect(self, session: ChannelSession) -> None:
        self.left.set()


def test_client_that_gets_no_thread_for_replies_is_told_and_connects_again(
    credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_thread(monkeypatch, "replies-here")
    echo, stop, failures = LeavingEcho(), threading.Event(), list[TransportError]()
    server = ChannelServer(credentials, "here", Ping, echo)
    try:
        opened: Any = connections(credentials, "here", "client", stop=stop, failed=failures.append)
        assert not next(opened).closed
        assert [str(error) for error in failures] == ["channel to here: can't start new thread"]
        assert echo.left.wait(20), "the channel that nobody reads from was not cut"
        opened.close()
    finally:
        server.close()


def test_client_that_the_server_has_no_thread_for_is_cut_off_and_takes_no_place(
    credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = refuse_thread(monkeypatch, "serve-client")
    server = ChannelServer(credentials, "here", Ping, Echo(), max_clients=1)
    try:
        unheard = Connection(credentials, "here", "client", Pong)
        assert unheard.wait_closed(20)
        assert refusals == []
        unheard.close()
        connection = Connection(credentials, "here", "client", Pong)
        assert connection.call_service(Ping("hello"), timeout_s=20)[0].text == "hello"
        connection.close()
    finally:
        server.close()
