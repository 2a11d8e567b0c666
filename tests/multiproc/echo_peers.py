"""A service that answers with what it was sent, and processes that use it. Knows the transport alone."""

import os
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe

import msgspec
import torch
from torch import Tensor
from torch.distributed import TCPStore

from asyncflow.errors import QueueFull
from asyncflow.sealed_store import GlooStore
from asyncflow.transport.channel import gloo_group
from asyncflow.transport.frame import Limits, Payload
from asyncflow.transport.meeting import Credentials, ask_for_channel, pair_store
from asyncflow.transport.server import Call, ChannelServer, ChannelSession, Connection

SECRET = b"the job's secret"
HOST_VARIABLE = "TEST_STORE_HOST"
"""Where the test's store is, if it is not on loopback."""


def credentials(port: int, timeout_s: float = 20.0) -> Credentials:
    """Connect to the test's store."""
    timeout = timedelta(seconds=timeout_s)
    host = os.environ.get(HOST_VARIABLE, "127.0.0.1")
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return Credentials(store, SECRET, timeout_s)


class Ping(msgspec.Struct, tag=True):
    """Answered by `Pong`; `answer` False: not before it is told; `keep`: the server holds on to the payload."""

    text: str
    answer: bool = True
    keep: bool = False


class Pong(msgspec.Struct, tag=True):
    """The ping's text and payload come back."""

    text: str


class Echo:
    """Answers pings and reports clients that left."""

    def __init__(self, pipe: Pipe | None = None) -> None:
        self.pipe = pipe
        self.parked: list[Call] = []
        self.kept: list[Tensor] = []

    def handle(self, call: Call) -> None:
        if call.message.text == "full":
            raise QueueFull("no room; waits for rows 3 to 5")
        if call.message.text == "kept":
            call.send_reply(Pong("kept"), Payload.from_tensor(self.kept[0]))
            return
        if call.message.text == "forget":
            self.kept.clear()
        if call.message.keep:
            self.kept.append(call.payload)
            call.send_reply(Pong(call.message.text))
            return
        if call.message.answer:
            call.send_reply(Pong(call.message.text), Payload.from_tensor(call.payload))
        else:
            self.parked.append(call)

    def handle_disconnect(self, session: ChannelSession) -> None:
        if self.pipe is not None:
            self.pipe.send(("left", session.client))


def echo_server(port: int, pipe: Pipe) -> None:
    """Serve until told to close."""
    server = ChannelServer(credentials(port), "echo", Ping, Echo(pipe), limits=Limits(payload_bytes=2**26))
    pipe.send("ready")
    pipe.recv()
    server.close()
    pipe.send("closed")


def vanishing_client(port: int, pipe: Pipe) -> None:
    """Prove the secret, then die before the pair is built."""
    mine = credentials(port)
    ask_for_channel(mine.own_store(), SECRET, "echo", "vanishing")
    pipe.send("asked")
    os._exit(0)


def holding_client(port: int, pipe: Pipe) -> None:
    """Hold a large answer, and have the server hold a large request."""
    connection = Connection(credentials(port), "echo", "holder", Pong)
    payload = torch.ones(2**20, dtype=torch.uint8)
    connection.call_service(Ping("mine", keep=True), Payload.from_tensor(payload), timeout_s=20)
    _, held = connection.call_service(Ping("yours"), Payload.from_tensor(payload), timeout_s=20)
    pipe.send(int(held.sum(dtype=torch.int64)))
    pipe.recv()


def parked_client(port: int, pipe: Pipe, number: int, shared: bool) -> None:
    """Have so many requests open, and report how many were answered."""
    connection = Connection(credentials(port), "here", "parked", Pong, limits=Limits(shared_memory=shared))
    payload = Payload.from_tensor(torch.ones(50_000_000 // (1 + 999 * shared), dtype=torch.uint8))
    futures = [connection.submit(Ping(str(k), answer=False), payload if k % 4 == 0 else None) for k in range(number)]
    pipe.send("parked")
    answers = [future.result(60) for future in futures]
    pipe.send([(reply.text, payload.numel(), int(payload.sum(dtype=torch.int64))) for reply, payload in answers])
    connection.close()


def silent_client(port: int, pipe: Pipe) -> None:
    """Prove the secret, build the pair, and say nothing."""
    store = credentials(port).own_store()
    pair = GlooStore(pair_store(store, "here", ask_for_channel(store, SECRET, "here", "silent")))
    group = gloo_group(pair, 1, 2, timeout=timedelta(seconds=20))
    pipe.send(group.size())
    pipe.recv()


def early_server(port: int, pipe: Pipe, key: bytes) -> None:
    """Come to the meeting of a pair, and wait for the other end."""
    gloo_group(GlooStore(pair_store(credentials(port).own_store(), "early", key)), 0, 2, timeout=timedelta(seconds=60))
