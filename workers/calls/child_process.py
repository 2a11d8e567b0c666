"""A module of ours in a process of its own, and the messages with it: both ends. Torch-free.

parent                                             child (`python -m MODULE PARENT_PID SOCKET ...`)
ChildProcess(MODULE)      ------- starts ------->  parent_socket()
load(first message)       ---------------------->  imports what it names
                          <----------------------  Loaded, or Refused
StreamChannel             <-- other messages --->  StreamChannel
kill_process, gone        ------- SIGKILL ------>  and to everything that it started

Messages are msgpack after a four-byte length, over a socket pair, which no other process has. What to do about a call
that is late, a silent child or one that ended is up to the owner: `workers.calls.pool` (users' functions),
`workers.agents.user_workers` (rollouts) and `workers.rollout.session_service`.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import Any, Generic, TypeVar

import msgspec

from asyncflow.decoding import msgpack_decoder
from asyncflow.errors import ConfigError
from asyncflow.process import STOP_SIGNALS, die_with_parent

# Messages over a stream socket.

LENGTH_BYTES = 4
MOST_BYTES = 2**28
"""Longest message: the texts of a response, or a function's result."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The child has imported what it needs."""

    is_async: bool = True  # it accepts concurrent calls


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The user's module or function is unusable; says why."""

    text: str


def frame(message: Any) -> bytes:
    """Encode a message; raises ValueError if it is too long, or contains text that is not Unicode."""
    data = msgspec.msgpack.encode(message)
    if len(data) > MOST_BYTES:
        raise ValueError(f"a message of {len(data)} bytes is longer than {MOST_BYTES}")
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def receive_frame(connection: socket.socket) -> bytes:
    """Wait for the next frame's message; EOFError: the peer is gone, or sent no frame."""
    return _exactly(connection, _length(_exactly(connection, LENGTH_BYTES)))


def _length(header: bytes) -> int:
    length = int.from_bytes(header, "little")
    if length > MOST_BYTES:  # the user's code wrote into the socket
        raise EOFError(f"a frame of {length} bytes")
    return length


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


S = TypeVar("S")
R = TypeVar("R")


class StreamChannel(Generic[S, R]):
    """Sends messages of type S and receives those of type R, in an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgpack_decoder(received)

    @classmethod
    async def open(cls, connection: socket.socket, received: Any) -> "StreamChannel[Any, Any]":
        """Take over a connected socket (`close` closes it); `received` is the union of types to expect."""
        reader, writer = await asyncio.open_connection(sock=connection)
        return cls(reader, writer, received)

    def send(self, message: S) -> None:
        """Send a message without waiting; drop it if the peer is gone. Raises TypeError or ValueError if it cannot be
        encoded."""
        data = frame(message)
        if not self._writer.is_closing():
            self._writer.write(data)

    async def receive(self) -> R | None:
        """Return the next message, or None if the peer is gone or sent something that is not a message."""
        try:
            length = _length(await self._reader.readexactly(LENGTH_BYTES))
            message: R = self._decoder.decode(await self._reader.readexactly(length))
        except (EOFError, ConnectionError, msgspec.DecodeError):
            return None
        return message

    async def drain(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        """Close it once what was sent is out; idempotent."""
        self._writer.close()

    def abort(self) -> None:
        """Close it at once: `receive` returns None. Idempotent."""
        self._writer.transport.abort()

    async def closed(self) -> None:
        """Wait until it is closed."""
        with contextlib.suppress(OSError):
            # All who wait share one future, which the cancellation of one would cancel for the others.
            await asyncio.shield(self._writer.wait_closed())


# The parent's end.

START_TIMEOUT_S = 120.0
"""Time that a child has to import what it needs (s)."""
RESPONSE_S = 1.0
"""Time for a child to confirm what takes no work, and for us to read what a dead one sent (s)."""
_GOODBYE_S = 10.0  # time that a child has to exit after closing its connection (s)
_LOOK_S = 0.01


class ChildDied(Exception):
    """The process ended, or had to be killed."""


class ChildProcess(Generic[S, R]):
    """A child, which gets messages of type S and sends those of type R; it dies with the thread that constructs this.

    It is started afresh, never forked, since this process may have torch's threads. It leads its own process group, so
    that processes started by a user's function end with it.

    Args:
        received: the union R.
        descriptors: files that it inherits; their numbers follow on its command line.
        python: another interpreter, which searches modules in its own places; None: this one.
        in_our_group: it leads no group; what it started ends by its own care (`end_session_with_me`).
    """

    def __init__(
        self, module: str, received: Any, *descriptors: int, in_our_group: bool = False, python: str | None = None
    ) -> None:
        places = sys.path if python is None else []
        path = frame([os.fsencode(place) for place in places])  # in file-system encoding, which need not be UTF-8
        ours, theirs = socket.socketpair()
        ours.sendall(path)
        with theirs, contextlib.ExitStack() as unless_started:
            unless_started.callback(ours.close)
            inherited = (theirs.fileno(), *descriptors)
            self._process = subprocess.Popen(
                [python or sys.executable, "-u", "-P", "-m", module, *map(str, (os.getpid(), *inherited))],
                stdin=subprocess.DEVNULL,
                pass_fds=inherited,
                process_group=None if in_our_group else 0,
            )
            unless_started.pop_all()
        self._kill = os.kill if in_our_group else os.killpg
        self._socket = ours
        self._received = received
        self._channel: StreamChannel[S, R] | None = None
        self._death: int | None = None

    @property
    def exit_code(self) -> int:
        """Of a process that ended, see `kill_and_wait`; negative: the signal that ended it."""
        return self._process.returncode or 0

    async def load(self, first: S) -> Loaded:
        """Send the first message and wait until the child has imported what it names. If that fails, it is killed.

        Raises:
            ConfigError: the user's function is unusable.
            ChildDied: it ended.
            TimeoutError: it took too long.
        """
        try:
            return await self._load(first)
        except ChildDied:
            await self.kill_and_wait(within_s=_GOODBYE_S)  # it has ended, or is about to
            raise
        except BaseException:
            await self.kill_and_wait()
            raise

    def send(self, message: S) -> None:
        """Send a message without waiting; see `StreamChannel.send`."""
        assert self._channel is not None
        self._channel.send(message)

    async def receive(self) -> R | None:
        """Return the next message, or None if there will be none."""
        assert self._channel is not None
        return await self._channel.receive()

    def has_ended(self) -> bool:
        """Return whether the process is gone; its last messages may not have been received yet."""
        # WNOWAIT: its number stays its own, so that what it started can still be killed by it.
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self._process.returncode is not None or os.waitid(os.P_PID, self._process.pid, how) is not None

    def kill_process(self) -> None:
        """Kill it and what it started; idempotent."""
        if self._process.returncode is None:  # otherwise the number may belong to another process by now
            with contextlib.suppress(ProcessLookupError):
                self._kill(self._process.pid, signal.SIGKILL)

    async def kill_and_wait(self, *, within_s: float = 0.0) -> None:
        """Wait for its end, and kill it after `within_s`; idempotent."""
        for _ in range(round(within_s / _LOOK_S)):
            if self.has_ended():
                break
            await asyncio.sleep(_LOOK_S)
        self.kill_process()
        self._watch_no_more()
        if self._channel is None:
            self._socket.close()
        else:
            self._channel.abort()
            await self._channel.closed()
        while self._process.poll() is None:  # short, since it was killed
            await asyncio.sleep(_LOOK_S)

    async def _load(self, first: S) -> Loaded:
        self._channel = await StreamChannel.open(self._socket, self._received)
        with contextlib.suppress(OSError):
            self._death = os.pidfd_open(self._process.pid)  # becomes readable when the process ends
            asyncio.get_running_loop().add_reader(self._death, self._process_ended)
        self._channel.send(first)
        reply = asyncio.ensure_future(self._channel.receive())
        try:
            if not await done_within(reply, START_TIMEOUT_S):
                raise TimeoutError(f"importing it took longer than {START_TIMEOUT_S:g} s")
        finally:
            reply.cancel()
        match reply.result():
            case Loaded() as loaded:
                return loaded
            case Refused(text=text):
                raise ConfigError(text)
        raise ChildDied

    def _process_ended(self) -> None:
        assert self._channel is not None
        self._watch_no_more()
        self.kill_process()
        # Its last messages are still read. End of file usually follows, but a process that it forked into another
        # session may hold the socket open.
        asyncio.get_running_loop().call_later(RESPONSE_S, self._channel.abort)

    def _watch_no_more(self) -> None:
        if self._death is not None:
            asyncio.get_running_loop().remove_reader(self._death)
            os.close(self._death)
            self._death = None


async def done_within(future: "asyncio.Future[Any]", timeout_s: float) -> bool:
    """Wait for a future and return whether it is done; time in which this process was stalled does not count."""
    from asyncflow.clock import awake_slices  # only for parents: children import no more than they need

    for slice_s in awake_slices(timeout_s):
        if (await asyncio.wait({future}, timeout=slice_s))[0]:
            return True
    return future.done()


def ended_how(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"


# The child's end.


def parent_socket() -> socket.socket:
    """Die with the parent, but by no stop signal; search modules where it says; return the socket to it."""
    parent_pid, descriptor = map(int, sys.argv[1:3])
    die_with_parent(parent_pid)
    for number in STOP_SIGNALS:
        # A handler, since programs started by the user's code would inherit ignored signals. Forks get the default
        # handling.
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=_obey_stop_signals)
    connection = socket.socket(fileno=descriptor)
    # Programs started by the user's code must not hold it open.
    connection.set_inheritable(False)
    # `-P` left out the working directory.
    if places := msgpack_decoder(list[bytes]).decode(receive_frame(connection)):
        sys.path[:] = map(os.fsdecode, places)
    return connection


def _obey_stop_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
