"""Payloads between real processes, through shared memory and over the wire: same bytes, bounded memory, any death."""

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from echo_peers import Credentials, Echo, Ping, Pong, holding_client, parked_client
from torch import Tensor

from asyncflow.transport.frame import Payload, PayloadPiece
from asyncflow.transport.meeting import SWITCH
from asyncflow.transport.server import ChannelServer, Connection

Start = Callable[..., Any]
Connect = Callable[..., Connection]

_KEPT_STORES = 4  # clients of the job store that greeting threads needed at the same time


@pytest.fixture(name="here")
def _here(credentials: Credentials) -> Iterator[tuple[ChannelServer, Echo]]:
    echo = Echo()
    server = ChannelServer(credentials, "here", Ping, echo)
    yield server, echo
    server.close()


@pytest.mark.gate
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("text_bytes", [1, 100_000])
def test_pieces_arrive_as_if_they_were_packed(server: Any, connect: Connect, shared: bool, text_bytes: int) -> None:
    connection = connect(shared_memory=shared)
    assert connection.shared is shared
    generator = torch.Generator().manual_seed(1)
    for sizes in ([], [0], [3], [1000, 5], [4000], [2**18, 9, 2**18 + 3, 2**20, 1, 7], [3, 2**22 + 1]):
        pieces = [
            PayloadPiece((torch.randint(0, 200, (size,), generator=generator, dtype=dtype),), torch.uint8)
            for size in sizes
            for dtype in (torch.uint8, torch.int32)
        ]
        payload = Payload(pieces)
        reply, echoed = connection.call_service(Ping("x" * text_bytes), payload, timeout_s=30)
        assert len(reply.text) == text_bytes
        assert echoed.numel() == payload.num_bytes
        assert echoed.is_contiguous()
        offset = 0
        for piece in pieces:
            assert torch.equal(echoed[offset : offset + piece.num_bytes], piece.parts[0].to(torch.uint8))
            offset += -(-piece.num_bytes // 8) * 8


@pytest.mark.parametrize("shared", [True, False])
def test_many_threads_get_their_own_bytes_in_any_size(server: Any, connect: Connect, shared: bool) -> None:
    connection = connect(shared_memory=shared)
    wrong: list[str] = []

    def ask(k: int) -> None:
        for i in range(15):
            value = (k * 37 + i) % 251
            payload = torch.full((8 * (1 + (k * i * 9973) % 80_000),), value, dtype=torch.uint8)
            text = f"{k}/{i}" * (1 + 2000 * (i % 3 == 0))
            reply, echoed = connection.call_service(Ping(text), Payload.from_tensor(payload), timeout_s=30)
            if reply.text != text or not torch.equal(echoed, payload):
                wrong.append(text[:10])

    _in_threads([lambda k=k: ask(k) for k in range(6)])  # type: ignore[misc]
    assert wrong == []


def test_arena_does_not_grow_in_a_thousand_rounds(server: Any, connect: Connect) -> None:
    connection = connect()
    payload = Payload.from_tensor(torch.ones(100_000, dtype=torch.uint8))
    for _ in range(1000):
        connection.call_service(Ping("x"), payload, timeout_s=30)
    own = connection._channel._arena  # type: ignore[attr-defined]
    assert own is not None
    assert own.highest < 500_000


def test_answer_stays_as_it_is_while_messages_pass_and_after_its_sender_was_killed(
    server: Any, connect: Connect
) -> None:
    connection = connect()
    payload = torch.arange(0, 2**17, dtype=torch.int32)
    held = connection.call_service(Ping("held"), Payload.from_tensor(payload), timeout_s=30)[1]
    other = Payload.from_tensor(torch.full((100_000,), 7, dtype=torch.uint8))
    for _ in range(1000):
        connection.call_service(Ping("x"), other, timeout_s=30)
    assert torch.equal(held.view(torch.int32), payload)
    server.signal(signal.SIGKILL)
    assert connection.wait_closed(30)
    assert torch.equal(held.view(torch.int32), payload)
    connection.close()
    gc.collect()
    held += 1
    assert torch.equal(held.view(torch.uint8)[4:5], torch.tensor([2], dtype=torch.uint8))


@pytest.mark.gate
def test_killed_client_takes_nothing_with_it_that_the_server_holds(server: Any, start: Start, connect: Connect) -> None:
    connection = connect()
    client = start(holding_client)
    assert client.hear() == 2**20
    client.signal(signal.SIGKILL)
    assert server.hear() == ("left", "holder")
    kept = connection.call_service(Ping("kept"), timeout_s=30)[1]
    assert torch.equal(kept, torch.ones(2**20, dtype=torch.uint8))


@pytest.mark.parametrize("keep", [True, False])
def test_what_finds_no_room_goes_over_the_wire(server: Any, connect: Connect, keep: bool) -> None:
    connection = connect(arena_bytes=2**20)
    payload = torch.full((400_000 if keep else 2**21,), 5, dtype=torch.uint8)
    for _ in range(5):
        connection.call_service(Ping("x", keep=keep), Payload.from_tensor(payload), timeout_s=30)
    if keep:
        assert torch.equal(connection.call_service(Ping("kept"), timeout_s=30)[1], payload)
        connection.call_service(Ping("forget"), timeout_s=30)
        connection.call_service(Ping("releases come with this answer"), timeout_s=30)
    own = connection._channel._arena  # type: ignore[attr-defined]
    assert own is not None
    assert own.idle


def test_sharing_can_be_switched_off_for_a_process(
    here: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert connect(service="here").shared
    monkeypatch.setenv(SWITCH, "0")
    connection = connect(service="here")
    assert not connection.shared
    payload = torch.ones(2**20, dtype=torch.uint8)
    assert torch.equal(connection.call_service(Ping("x"), Payload.from_tensor(payload), timeout_s=30)[1], payload)


def test_other_hosts_use_the_wire(
    here: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = iter(["one", "another"])
    monkeypatch.setattr("asyncflow.transport.meeting.this_host", lambda: next(hosts))
    caplog.set_level("INFO", "asyncflow.transport.meeting")
    connection = connect(service="here")
    assert not connection.shared
    assert "channel to here: payloads go through the wire (another host)" in caplog.text
    assert connection.call_service(Ping("x"), Payload.from_tensor(torch.ones(2**20)), timeout_s=30)[1].numel() == 2**22


def test_stopped_client_with_parked_requests_delays_nobody_who_answers_it(
    here: tuple[ChannelServer, Echo], start: Start, connect: Connect
) -> None:
    _, echo = here
    other = connect("other", service="here")
    stopped = start(parked_client, 60, True)
    assert stopped.hear() == "parked"
    while len(echo.parked) < 60:
        other.call_service(Ping("let the server go on"), timeout_s=30)
    waiting = other.submit(Ping("waits", answer=False))
    while len(echo.parked) < 61:
        other.call_service(Ping("let the server go on"), timeout_s=30)
    stopped.signal(signal.SIGSTOP)
    try:
        replying = threading.Thread(target=_answer, args=(echo,), daemon=True)
        replying.start()
        assert waiting.result(30)[0].text == "waits"  # the last one answered
    finally:
        stopped.signal(signal.SIGCONT)
    expected = [(str(k), 50_000 * (k % 4 == 0), 50_000 * (k % 4 == 0)) for k in range(60)]
    assert stopped.hear() == expected


def test_small_replies_pass_a_payload_that_a_stopped_client_does_not_take(
    here: tuple[ChannelServer, Echo], start: Start, connect: Connect
) -> None:
    _, echo = here
    other = connect("other", service="here")
    stopped = start(parked_client, 4, False)
    assert stopped.hear() == "parked"
    while len(echo.parked) < 4:
        other.call_service(Ping("let the server go on"), timeout_s=30)
    large, *small = echo.parked
    stopped.signal(signal.SIGSTOP)
    stuck = threading.Thread(target=large.send_reply, args=(Pong("0"), Payload.from_tensor(large.payload)), daemon=True)
    try:
        stuck.start()
        passing = [
            threading.Thread(target=call.send_reply, args=(Pong(call.message.text),), daemon=True) for call in small
        ]
        for thread in passing:
            thread.start()
        for thread in passing:
            thread.join(30)
            assert not thread.is_alive()
        assert stuck.is_alive(), "the payload should not fit into the kernel's buffers"
    finally:
        stopped.signal(signal.SIGCONT)
    assert stopped.hear() == [("0", 50_000_000, 50_000_000), *((str(k), 0, 0) for k in range(1, 4))]
    stuck.join(30)


def test_channels_cost_little_and_leave_neither_descriptors_nor_threads(here: Any, credentials: Credentials) -> None:
    payload = Payload.from_tensor(torch.ones(2**20, dtype=torch.uint8))
    Connection(credentials, "here", "first", Pong).close()
    gc.collect()
    before, threads = _descriptors(), threading.active_count()
    connections = [Connection(credentials, "here", f"c{k}", Pong) for k in range(20)]
    for connection in connections:
        connection.call_service(Ping("x"), timeout_s=30)
    idle = _descriptors()
    # Both ends are here: Gloo's descriptor and two pipe ends each, and at the client a bell for its reading thread.
    assert idle - before <= 20 * (3 + 4) + _KEPT_STORES
    assert threading.active_count() - threads <= 20 * 2
    for connection in connections:
        for _ in range(3):  # the releases come back with the second
            connection.call_service(Ping("x"), payload, timeout_s=30)
    assert _descriptors() <= idle, "an arena that the peer has mapped needs none"
    serving = [thread for thread in threading.enumerate() if thread.name.startswith("serve-c")]
    while connections:
        connections.pop().close()
    for thread in serving:
        thread.join(30)
    del connection, thread, serving
    gc.collect()
    assert threading.active_count() <= threads
    assert _descriptors() <= before + _KEPT_STORES


def test_waiting_for_the_end_of_a_channel(server: Any, connect: Connect) -> None:
    connection = connect()
    assert not connection.wait_closed(0)
    server.tell("close")
    assert connection.wait_closed(30)
    assert connection.closed


def _answer(echo: Echo) -> None:
    for call in list(echo.parked):
        payload: Tensor | None = call.payload if call.payload.numel() else None
        call.send_reply(Pong(call.message.text), None if payload is None else Payload.from_tensor(payload))


def _in_threads(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive()


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
