"""Peers that hold the secret and break the protocol: one log line, their channel ends, nobody else notices."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from echo_peers import SECRET, Credentials, Echo, Ping, Pong, silent_client

from asyncflow.errors import PeerRefused, QueueFull, TransportError
from asyncflow.transport.channel import Channel, PipeChannel
from asyncflow.transport.frame import FRAME_BYTES, ArenaOffer, Frame, FrameKind, Limits, Payload, PeerArena, Route
from asyncflow.transport.server import ChannelServer, Connection


@pytest.fixture(name="here")
def _here(credentials: Credentials) -> Iterator[Echo]:
    echo = Echo()
    server = ChannelServer(
        Credentials(credentials.store, SECRET, 3.0), "here", Ping, echo, limits=Limits(payload_bytes=2**20)
    )
    yield echo
    server.close()


@pytest.fixture(name="bystander")
def _bystander(here: Echo, credentials: Credentials) -> Iterator[Connection]:
    connection = Connection(credentials, "here", "bystander", Pong)
    connection.call_service(Ping("x"), timeout_s=20)
    yield connection
    assert connection.call_service(Ping("still served"), timeout_s=20)[0].text == "still served"
    connection.close()


def _handle(offset: int, num_bytes: int = 64, generation: int | None = None) -> Callable[[Channel], None]:
    def send(channel: Channel) -> None:
        assert isinstance(channel, PipeChannel)
        own = channel._arena
        assert own is not None
        mine = own.offer.generation if generation is None else generation
        frame = Frame(FrameKind.REQUEST, 9, Route.SHARED, b"", payload_bytes=num_bytes, offset=offset)
        frame.generation = mine
        channel._send_frame(frame, None, 5)

    return send


def _frame(**fields: Any) -> Callable[[Channel], None]:
    return lambda channel: channel._send_frame(Frame(**fields), None, 5)


def _garbage(channel: Channel) -> None:
    assert isinstance(channel, PipeChannel)
    channel.pipes.send(memoryview(b"A" * FRAME_BYTES), 5)


def _release(offset: int) -> Callable[[Channel], None]:
    def send(channel: Channel) -> None:
        channel._released.append(offset)
        channel._send_frame(Frame(FrameKind.REQUEST, 9, body=msgspec.msgpack.encode(Ping("x"))), None, 5)

    return send


@pytest.mark.gate
@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(_garbage, id="no frame"),
        pytest.param(_frame(kind=FrameKind.REPLY, body=b"\x80"), id="reply to a server"),
        pytest.param(_frame(kind=FrameKind.HELLO, body=b"\x80"), id="second hello"),
        pytest.param(_frame(kind=FrameKind.REQUEST, route=Route.WIRE, payload_bytes=2**20 + 8), id="oversized"),
        pytest.param(
            _frame(kind=FrameKind.REQUEST, route=Route.WIRE, payload_bytes=80), id="segments that do not add up"
        ),
        pytest.param(_handle(0), id="handle to the token"),
        pytest.param(_handle(4097), id="crooked handle"),
        pytest.param(_handle(2**40), id="handle beyond the arena"),
        pytest.param(_handle(4096, generation=7), id="handle of another generation"),
        pytest.param(_release(4096), id="release of nothing"),
    ],
)
def test_broken_protocol_ends_its_channel_only(
    bystander: Connection, credentials: Credentials, attack: Callable[[Channel], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "asyncflow.transport.server")
    culprit = Connection(credentials, "here", "culprit", Pong)
    culprit.call_service(Ping("x"), timeout_s=20)
    serving = next(thread for thread in threading.enumerate() if thread.name == "serve-culprit")
    attack(culprit._channel)
    assert culprit.wait_closed(20)
    serving.join(20)
    lines = [record for record in caplog.records if record.name == "asyncflow.transport.server"]
    assert len(lines) == 1, caplog.text
    culprit.close()


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(msgspec.Raw(b"\xc1"), id="no msgpack"),
        pytest.param({"type": "Nope"}, id="unknown type"),
        pytest.param({"type": "Ping", "text": 3}, id="field of another type"),
        pytest.param({"type": "Ping"}, id="field left out"),
    ],
)
def test_request_that_cannot_be_read_is_refused_and_its_channel_goes_on(
    bystander: Connection, credentials: Credentials, message: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "asyncflow.transport.server")
    culprit = Connection(credentials, "here", "culprit", Pong)
    for _ in range(2):
        with pytest.raises(PeerRefused, match="a request of culprit cannot be read"):
            culprit.call_service(message, Payload.from_tensor(torch.ones(2**16, dtype=torch.uint8)), timeout_s=20)
    assert culprit.call_service(Ping("better"), timeout_s=20)[0].text == "better"
    lines = [record for record in caplog.records if record.name == "asyncflow.transport.server"]
    assert len(lines) == 2, caplog.text
    culprit.close()


def test_client_that_never_says_hello_is_given_up(
    bystander: Connection, start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    silent = start(silent_client)
    assert silent.hear() == 2
    greeting = [thread for thread in threading.enumerate() if thread.name == "greet-silent"]
    bystander.call_service(Ping("meanwhile"), timeout_s=20)
    for thread in greeting:
        thread.join(20)
        assert not thread.is_alive()
    assert "channel to silent: no valid hello" in caplog.text


def test_arena_that_cannot_be_mapped_leaves_the_wire(
    bystander: Connection, credentials: Credentials, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, offer: ArenaOffer) -> PeerArena:
        raise TransportError("no addresses left")

    monkeypatch.setattr("asyncflow.transport.meeting.PeerArena", refuse)
    caplog.set_level("INFO", "asyncflow.transport.meeting")
    connection = Connection(credentials, "here", "client", Pong)
    assert not connection.shared
    payload = torch.arange(2**16, dtype=torch.int64)
    for _ in range(3):
        echoed = connection.call_service(Ping("x"), Payload.from_tensor(payload), timeout_s=20)[1]
        assert torch.equal(echoed.view(torch.int64), payload)
    assert "channel to here: payloads go through the wire (no addresses left)" in caplog.text
    connection.close()


@pytest.mark.gate
def test_handle_of_a_peer_that_shares_no_memory_is_refused(bystander: Connection, credentials: Credentials) -> None:
    for frame in (
        Frame(FrameKind.REQUEST, 9, Route.SHARED, payload_bytes=8),
        Frame(FrameKind.REQUEST, 9, releases=[4096]),
    ):
        culprit = Connection(credentials, "here", "culprit", Pong, limits=Limits(shared_memory=False))
        culprit._channel._released.extend(frame.releases)
        culprit._channel._send_frame(frame, None, 5)
        assert culprit.wait_closed(20)
        culprit.close()


def test_no_room_is_told_apart_from_other_refusals(bystander: Connection) -> None:
    with pytest.raises(QueueFull, match="here: no room; waits for rows 3 to 5") as caught:
        bystander.call_service(Ping("full"), timeout_s=20)
    assert isinstance(caught.value, PeerRefused)


def test_request_to_a_server_that_takes_none_ends_with_its_deadline(here: Echo, credentials: Credentials) -> None:
    connection = Connection(credentials, "here", "client", Pong)
    blocked, release = threading.Event(), threading.Event()

    def block(call: Any) -> None:
        blocked.set()
        release.wait(60)

    here.handle = block  # type: ignore[method-assign]
    futures = [connection.submit(Ping("first"))]
    assert blocked.wait(20)
    try:
        with pytest.raises(TransportError):
            for _ in range(400):  # more than fit into the pipe
                futures.append(connection.submit(Ping("more"), timeout_s=0.5))
    finally:
        release.set()
    connection.close()
    for future in futures:
        with pytest.raises(TransportError):
            future.result(20)


def test_payload_that_cannot_be_written_costs_no_memory(bystander: Connection) -> None:
    class Unwritable(Payload):
        def write(self, out: torch.Tensor) -> None:
            raise ValueError("no such values")

    good = Payload.from_tensor(torch.ones(100_000, dtype=torch.uint8))
    bystander.call_service(Ping("x"), good, timeout_s=20)
    for num in (100, 100_000):
        with pytest.raises(ValueError, match="no such values"):
            bystander.submit(Ping("x"), Unwritable(Payload.from_tensor(torch.ones(num, dtype=torch.uint8)).pieces))
    bystander.call_service(Ping("x"), timeout_s=20)
    assert isinstance(bystander._channel, PipeChannel)
    own = bystander._channel._arena
    assert own is not None
    assert own.highest < 300_000
