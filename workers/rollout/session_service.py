"""The session service of a rollout process: its own process, and the thread that reads its messages.

A hung service would hang all of its rollouts forever, including their deadlines, which it keeps itself. So it is
pinged, and killed after a long silence.
"""

import contextlib
import logging
import queue
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Sequence

from asyncflow.decoding import msgpack_decoder
from asyncflow.errors import ConfigError, UserCodeNotStarted
from workers.agents.wire import FromService, NotStarted, PingLoop, PongLoop, ServiceReady, Setup, ToService
from workers.calls.child_process import START_TIMEOUT_S, ChildProcess, Refused, ended_how, frame, receive_frame

logger = logging.getLogger(__name__)

STALL_S = 30.0
"""Silence of the service after which it is killed (s)."""
_PING_S = 1.0
_MOST_STARTS = 3
_DYING_S = 5.0  # time that a service has to exit after closing its connection (s)


class _NotStarted(Exception):
    """The service ended during its start; says how."""


def open_service(setup: Setup, wake: threading.Event, *, worked: bool = False) -> "SessionService":
    """Start the service, up to three times: memory may be short for a moment.

    `worked`: an earlier service did; otherwise give up once the same failure repeats.

    Raises:
        ConfigError: the user's function is unusable.
        UserCodeNotStarted: it did not start; describes the last failure.
    """
    how: list[str] = []
    while len(how) < _MOST_STARTS:
        try:
            return SessionService(setup, wake)
        except _NotStarted as error:
            how.append(str(error))
            logger.warning("the session service %s while it started", error)
            if not worked and how.count(how[-1]) > 1:
                break
    raise UserCodeNotStarted(f"the session service did not start in {len(how)} attempts: it {how[-1]}; see this log")


class SessionService(ChildProcess[ToService, FromService]):
    """One process of the service, and the thread that reads its messages.

    The constructor waits until the service is ready. It raises ConfigError if the user's function is unusable, and
    `_NotStarted` if the service ended or took too long.
    """

    def __init__(self, setup: Setup, wake: threading.Event) -> None:
        super().__init__("workers.agents.service", FromService, in_our_group=True)
        # A hung service does not read either: no send may block forever.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(STALL_S), 0))
        self._wake = wake
        self.hung = ""
        """How it was silent, if it was killed for that."""
        self._heard: queue.SimpleQueue[FromService | None] = queue.SimpleQueue()
        self._decoder = msgpack_decoder(FromService)
        self._watched = time.monotonic()
        self._silent_s = 0.0
        self.send(setup)
        self._thread = threading.Thread(target=self._read_messages, name="sessions", daemon=True)
        self._thread.start()
        # The service starts its workers one after the other.
        timeout_s, first, how = START_TIMEOUT_S * (1 + setup.num_workers), None, ""
        try:
            first = self._heard.get(timeout=timeout_s)
        except queue.Empty:
            how = f"did not serve within {timeout_s:g} s"
        match first:
            case ServiceReady(port=port):
                self.port = port
            case Refused(text=text):
                self.kill()
                raise ConfigError(text)
            case NotStarted(text=text):
                self.kill()
                raise _NotStarted(f"said: {text}")
            case _:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    how = how or ended_how(self._process.wait(_DYING_S))
                self.kill()
                raise _NotStarted(how or "closed its connection, and did not exit")

    def send(self, message: ToService) -> None:
        """Send a message; it is lost if the service is gone."""
        try:
            self._socket.sendall(frame(message))
        except BlockingIOError:
            self._give_up("read nothing")
        except OSError:
            self._wake.set()

    def take_messages(self) -> Sequence[FromService | None]:
        """Return the messages since the previous call; None: the service is gone. Kills a hung one."""
        self._watch_silence()
        messages: list[FromService | None] = []
        while not self._heard.empty():
            messages.append(self._heard.get())
        return messages

    def kill(self) -> None:
        """Kill it; idempotent. Its workers die with it."""
        self.kill_process()
        self._process.wait()
        self._socket.close()

    def _watch_silence(self) -> None:
        """Count the seconds of silence."""
        now = time.monotonic()
        if now - self._watched < _PING_S:
            return
        self._watched = now
        # At most one second per call, since this process may have been stalled itself.
        self._silent_s += _PING_S
        if self._silent_s > STALL_S:
            self._give_up("sent nothing")
        else:
            self.send(PingLoop())

    def _give_up(self, how: str) -> None:
        self.hung = f"{how} for {STALL_S:g} s"
        logger.warning("the session service %s; it is killed", self.hung)
        self.kill_process()

    def _read_messages(self) -> None:
        try:
            while True:
                message = self._decoder.decode(receive_frame(self._socket))
                self._silent_s = 0.0
                if not isinstance(message, PongLoop):
                    self._heard.put(message)
                    self._wake.set()
        except Exception as error:  # noqa: BLE001  boundary of a thread; half a message counts as a death, too
            logger.debug("the session service's last words: %s", error)
        self._heard.put(None)
        self._wake.set()
