"""Channels between real processes: what travels, who is refused, what a death does."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import torch
from echo_peers import SECRET, Credentials, Echo, Ping, Pong, early_server, vanishing_client
from torch.distributed import TCPStore

from asyncflow.errors import PeerRefused, TransportError
from asyncflow.sealed_store import GlooStore
from asyncflow.transport import channel as gloo
from asyncflow.transport import server as serving
from asyncflow.transport.frame import Limits, Payload
from asyncflow.transport.meeting import ChannelAsk, ask_key, open_channel, pair_store
from asyncflow.transport.server import ChannelServer, Connection

Start = Callable[..., Any]
Connect = Callable[..., Connection]
KEY = b"of a pair"


@pytest.mark.gate
def test_large_message_and_payload_come_back_as_they_were(server: Any, connect: Connect) -> None:
    payload = torch.randint(0, 256, (2**25 + 3,), dtype=torch.uint8)
    reply, echoed = connect().call_service(Ping("x" * 100_000), Payload.from_tensor(payload), timeout_s=30)
    assert reply.text == "x" * 100_000
    assert torch.equal(echoed[: payload.numel()], payload)


def test_many_threads_share_a_channel_and_each_gets_its_own_answer(server: Any, connect: Connect) -> None:
    connection = connect()
    wrong: list[str] = []

    def ask(k: int) -> None:
        for i in range(20):
            payload = torch.full((k * 5000 + i,), k, dtype=torch.uint8)
            reply, echoed = connection.call_service(Ping(f"{k}/{i}"), Payload.from_tensor(payload), timeout_s=30)
            if reply.text != f"{k}/{i}" or not torch.equal(echoed[: len(payload)], payload):
                wrong.append(reply.text)

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_callback_may_look_at_the_reply(server: Any, connect: Connect) -> None:
    seen: list[str] = []
    called = threading.Event()

    def look(done: Any) -> None:
        seen.append(done.result()[0].text)
        called.set()

    connect().submit(Ping("back")).add_done_callback(look)
    assert called.wait(10)
    assert seen == ["back"]


@pytest.mark.gate
def test_wrong_secret_is_refused_while_others_are_served(
    server: Any, connect: Connect, credentials: Credentials
) -> None:
    good = connect()
    with pytest.raises(TransportError, match="echo did not answer; is it running"):
        connect("stranger", proof=Credentials(credentials.store, b"guess", 1.0))
    assert good.call_service(Ping("still here"), timeout_s=10)[0].text == "still here"
    assert connect("next").call_service(Ping("me too"), timeout_s=10)[0].text == "me too"


def test_client_that_asks_and_vanishes_blocks_nobody(
    server: Any, start: Start, store: TCPStore, credentials: Credentials, connect: Connect
) -> None:
    ask = msgspec.msgpack.encode(ChannelAsk("00", "ghost", b"n" * 16))
    credentials.own_store().queue_push(ask_key("echo"), ask)
    for stranger in (ask, b"not an ask", b"close"):
        store.queue_push(ask_key("echo"), stranger)
    vanishing = start(vanishing_client)
    assert vanishing.hear() == "asked"
    vanishing.end()
    began = time.monotonic()
    connect().call_service(Ping("hello"), timeout_s=60)
    assert time.monotonic() - began < 15  # of the 20 s of a handshake


@pytest.mark.parametrize("came", [False, True])
def test_end_that_died_before_the_pair_was_connected_is_not_waited_for_for_ever(
    start: Start, credentials: Credentials, monkeypatch: pytest.MonkeyPatch, came: bool
) -> None:
    monkeypatch.setattr(gloo, "_LEAST_MEETING", timedelta(seconds=0.2))
    pair = pair_store(credentials.own_store(), "early", KEY)
    if came:
        early = start(early_server, KEY)
        deadline, pause = time.monotonic() + 20, threading.Event()
        while not pair.list_keys():
            assert time.monotonic() < deadline
            pause.wait(0.01)
        early.kill()
    ended: list[str] = []

    def connect() -> None:
        with pytest.raises(TransportError) as caught:
            open_channel(pair, KEY, is_server=False, peer="early", limits=Limits(), timeout_s=1.0)
        ended.append(str(caught.value))

    connecting = threading.Thread(target=connect, daemon=True)
    connecting.start()
    connecting.join(10)
    assert ended == ["channel to early: the peer did not connect"]


@pytest.mark.gate
def test_address_that_a_stranger_put_in_the_place_of_the_servers_is_refused(
    server: Any, connect: Connect, store: TCPStore, credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo would connect to it; a listener there could pass everything on, and change it."""
    wait, attacks = GlooStore.wait, []

    def wait_while_it_is_changed(self: GlooStore, keys: list[str], timeout: timedelta) -> None:
        wait(self, keys, timeout)
        if keys == ["0/0"] and not attacks:
            (key,) = (key for key in store.list_keys() if "/pair/" in key and key.endswith(keys[0]))
            attacks.append(key)
            genuine = store.get(key)
            store.set(key, genuine[:-16] + bytes(16))  # type: ignore[arg-type]  # the stub lacks bytes

    monkeypatch.setattr(GlooStore, "wait", wait_while_it_is_changed)
    with pytest.raises(TransportError, match="echo: another process took its place .*channel/echo/pair/.*/0/0"):
        connect("first")
    assert len(attacks) == 1
    assert connect("second").call_service(Ping("hello"), timeout_s=20)[0].text == "hello"


@pytest.mark.gate
def test_end_that_does_not_have_the_pairs_key_is_refused_inside_it(credentials: Credentials) -> None:
    """An intruder in a pair whose handshake it did not see."""
    ended: dict[bool, str] = {}

    def meet(is_server: bool, key: bytes) -> None:
        pair = pair_store(credentials.own_store(), "here", KEY)
        with pytest.raises(TransportError) as caught:
            open_channel(pair, key, is_server=is_server, peer="other", limits=Limits(), timeout_s=20.0)
        ended[is_server] = str(caught.value)

    ends = [threading.Thread(target=meet, args=arguments) for arguments in ((True, KEY), (False, b"a guess"))]
    for end in ends:
        end.start()
    for end in ends:
        end.join(40)
    refusal = "channel to other: no valid hello (it does not know the job's secret)"
    assert len(ended) == 2 and refusal in ended.values(), ended


def test_oversized_message_ends_only_the_channel_that_carried_it(server: Any, connect: Connect) -> None:
    bystander, culprit = connect("bystander"), connect("culprit")
    with pytest.raises(TransportError):
        culprit.call_service(Ping("big"), Payload.from_tensor(torch.zeros(2**26 + 1, dtype=torch.uint8)), timeout_s=10)
    assert server.hear() == ("left", "culprit")
    assert bystander.call_service(Ping("fine"), timeout_s=10)[0].text == "fine"
    connect("culprit").call_service(Ping("again"), timeout_s=10)


def test_message_that_cannot_be_read_is_refused_and_nobody_else_notices(server: Any, connect: Connect) -> None:
    bystander, culprit = connect("bystander"), connect("culprit")
    with pytest.raises(PeerRefused, match="cannot be read"):
        culprit.call_service({"type": "Nonsense"}, timeout_s=10)
    for connection in (bystander, culprit):
        connection.call_service(Ping("fine"), timeout_s=10)


def test_oversized_reply_is_refused_by_the_client(server: Any, connect: Connect) -> None:
    connection = connect("small", payload_bytes=1000)
    with pytest.raises(TransportError, match="limit 1000"):
        connection.call_service(Ping("big"), Payload.from_tensor(torch.zeros(1001, dtype=torch.uint8)), timeout_s=10)
    assert server.hear() == ("left", "small")


@pytest.mark.gate
def test_killed_server_fails_the_requests_in_flight_within_seconds(server: Any, connect: Connect) -> None:
    connection = connect()
    futures = [connection.submit(Ping("never", answer=False)) for _ in range(3)]
    server.signal(signal.SIGKILL)
    for future in futures:
        with pytest.raises(TransportError):  # they have no deadline of their own
            future.result(30)
    with pytest.raises(TransportError, match="closed"):
        connection.submit(Ping("more"))


@pytest.mark.gate
def test_passed_deadline_gives_the_channel_up_on_both_ends(server: Any, connect: Connect) -> None:
    connection = connect("impatient")
    with pytest.raises(TransportError, match="no reply to Ping within"):
        connection.call_service(Ping("never", answer=False), timeout_s=0.2)
    assert server.hear() == ("left", "impatient")
    assert connection.closed


def test_stopped_server_delays_a_close_by_its_deadline_only(server: Any, connect: Connect) -> None:
    connection = connect()
    connection.call_service(Ping("one"), timeout_s=10)
    server.signal(signal.SIGSTOP)
    try:
        stuck = threading.Thread(target=_swallow, args=(connection,))
        stuck.start()
        began = time.monotonic()
        connection.close()
        stuck.join(10)
        assert time.monotonic() - began < 15
        assert not stuck.is_alive()
        assert not connection._thread.is_alive()
    finally:
        server.signal(signal.SIGCONT)


def _swallow(connection: Connection) -> None:
    try:
        connection.call_service(Ping("big"), Payload.from_tensor(torch.zeros(2**24, dtype=torch.uint8)), timeout_s=20)
    except TransportError:
        return


def test_closing_server_says_goodbye_to_its_clients(server: Any, connect: Connect) -> None:
    connection = connect()
    connection.call_service(Ping("hello"), timeout_s=10)
    future = connection.submit(Ping("never", answer=False))
    server.tell("close")
    with pytest.raises(TransportError, match="the service closed it"):
        future.result(10)
    assert server.hear() == ("left", "client")
    assert server.hear() == "closed"


def test_both_ends_may_close_at_once_from_many_threads(
    credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_CLOSE_TIMEOUT_S", 60.0)
    monkeypatch.setattr(serving, "_SEND_CLOSE_TIMEOUT_S", 60.0)
    monkeypatch.setattr(gloo, "_GOODBYE_TIMEOUT_S", 60.0)
    server = ChannelServer(credentials, "here", Ping, Echo())
    connections = [Connection(credentials, "here", f"c{k}", Pong) for k in range(4)]
    for connection in connections:
        connection.call_service(Ping("hello"), timeout_s=10)
    ends = [*(connection.close for connection in connections for _ in range(3)), server.close, server.close]
    threads = [threading.Thread(target=end) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "somebody waits for a deadline"
    for thread in threading.enumerate():
        if thread.name.startswith(("serve-c", "replies-here")):
            thread.join(5)
            assert not thread.is_alive(), thread


def test_requests_and_a_close_race_without_hanging_or_strange_errors(credentials: Credentials) -> None:
    server = ChannelServer(credentials, "here", Ping, Echo())
    try:
        for _ in range(10):
            connection = Connection(credentials, "here", "racer", Pong)
            strange: list[BaseException] = []
            threads = [threading.Thread(target=_call_until_closed, args=(connection, strange)) for _ in range(4)]
            for thread in threads:
                thread.start()
            connection.call_service(Ping("one"), timeout_s=10)
            connection.close()
            for thread in threads:
                thread.join(10)
                assert not thread.is_alive()
            assert strange == []
    finally:
        server.close()


def _call_until_closed(connection: Connection, strange: list[BaseException]) -> None:
    try:
        while True:
            connection.call_service(
                Ping("more"), Payload.from_tensor(torch.zeros(5000, dtype=torch.uint8)), timeout_s=10
            )
    except TransportError as error:
        if "no reply" in str(error):
            strange.append(error)
    except BaseException as error:  # noqa: BLE001 - what the test looks for
        strange.append(error)


def test_ask_after_the_close_is_not_served(credentials: Credentials) -> None:
    server = ChannelServer(credentials, "here", Ping, Echo())
    server.close()
    server.close()
    with pytest.raises(TransportError, match="here did not answer; is it running"):
        Connection(Credentials(credentials.store, SECRET, 0.5), "here", "late", Pong)


def test_clients_beyond_the_cap_are_refused_until_one_leaves(credentials: Credentials) -> None:
    server = ChannelServer(credentials, "here", Ping, Echo(), max_clients=1)
    try:
        first = Connection(credentials, "here", "first", Pong)
        first.call_service(Ping("hello"), timeout_s=10)
        before = set(credentials.store.list_keys())
        with pytest.raises(PeerRefused, match="second: here is full: 1 clients; raise max_clients"):
            Connection(credentials, "here", "second", Pong)
        assert set(credentials.store.list_keys()) == before
        serving = next(thread for _, thread in server._channels.values())
        first.close()
        serving.join(10)
        Connection(credentials, "here", "third", Pong).close()
    finally:
        server.close()


def test_client_counts_from_its_greeting_until_it_leaves(
    credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, counts = threading.Event(), []
    start = threading.Thread.start

    def late(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("serve-"):  # whoever registers it afterwards is too late
            served.wait(10)

    def numbers() -> Iterator[int]:
        counts.append(server._greeting + len(server._channels))
        yield 0

    echo = Echo()
    server = ChannelServer(credentials, "here", Ping, echo)
    server._numbers = numbers()  # type: ignore[assignment]
    monkeypatch.setattr(threading.Thread, "start", late)
    try:
        with contextlib.closing(Connection(credentials, "here", "first", Pong)) as first:
            first.call_service(Ping("hello"), timeout_s=10)
            counts.append(len(server._channels))
            served.set()
        assert counts == [1, 1]
    finally:
        server.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_client_whose_end_the_service_cannot_take_keeps_no_place(credentials: Credentials) -> None:
    echo = Echo()
    echo.handle_disconnect = lambda session: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    server = ChannelServer(credentials, "here", Ping, echo, max_clients=1)
    try:
        first = Connection(credentials, "here", "first", Pong)
        first.call_service(Ping("hello"), timeout_s=10)
        serving = next(thread for _, thread in server._channels.values())
        first.close()
        serving.join(10)
        Connection(credentials, "here", "second", Pong).close()
    finally:
        server.close()


def test_error_that_nobody_expects_fails_the_channel_and_whoever_waits(
    server: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connect()
    asked = [connection.submit(Ping(str(k), answer=False)) for k in range(2)]

    def broken(*_: Any) -> None:
        raise KeyError("nobody thought of this")

    monkeypatch.setattr(connection._channel, "receive", broken)
    with pytest.raises(TransportError, match="channel to echo: KeyError: 'nobody thought of this'"):
        connection.call_service(Ping("hello"), timeout_s=30)
    for future in asked:
        with pytest.raises(TransportError, match="nobody thought of this"):
            future.result(30)
    assert connection.wait_closed(30)


def test_no_keys_stay_in_the_store_after_the_first_answer(store: TCPStore, credentials: Credentials) -> None:
    server = ChannelServer(credentials, "here", Ping, Echo())
    before = set(store.list_keys())
    connections = [Connection(credentials, "here", f"c{k}", Pong) for k in range(5)]
    for connection in connections:
        connection.call_service(Ping("hello"), timeout_s=10)
    after = set(store.list_keys())
    for connection in connections:
        connection.close()
    server.close()
    assert {key for key in after - before if "queue" not in key} == set()
