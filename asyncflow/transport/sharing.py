"""What one end of a channel shares with a peer on the same host: both arenas, for payloads, and both pipes, for frames.

Used by `channel.Channel` alone. An arena that nobody writes to costs a page, no thread, and after the hellos no
descriptor.
"""

import logging
import os

from torch import Tensor

from asyncflow.errors import TransportError
from asyncflow.transport.arena import Arena, PeerArena
from asyncflow.transport.extents import ALIGN_BYTES
from asyncflow.transport.frame import MOST_RELEASES, Frame, Limits
from asyncflow.transport.hello import Hello, Verdict, this_host, wants_sharing
from asyncflow.transport.payload import Payload
from asyncflow.transport.pipes import Pipes

logger = logging.getLogger(__name__)


class Sharing:
    """Shared memory of a channel. Any thread may place; the receiving thread does the rest."""

    def __init__(self, peer: str, limits: Limits) -> None:
        """Args:
        peer: the other end's name, for messages.
        limits: whether to share, and how much.
        """
        self._peer = peer
        self._own: Arena | None = None
        self._peers: PeerArena | None = None
        host = ""
        if wants_sharing(configured=limits.shared_memory):
            try:
                host = this_host()
                self._own = Arena(limits.arena_bytes)
            except (OSError, RuntimeError) as error:
                logger.warning("channel to %s: no shared memory here (%s)", peer, error)
        self._judged_well = False
        self.pipes: Pipes | None = None
        """Carry the frames, once settled; None: Gloo does."""
        if self._own is not None:
            self.pipes = Pipes()
        self.hello = Hello(
            host,
            os.getpid(),
            None if self._own is None else self._own.offer,
            None if self.pipes is None else self.pipes.offer,
        )

    @property
    def usable(self) -> bool:
        """Whether the peer reads our arena: payloads go through it."""
        return self._own is not None

    def judge(self, hello: Hello) -> Verdict:
        """Map the peer's arena, if possible."""
        if self.hello.arena is None or hello.arena is None or self.pipes is None or hello.pipe is None:
            return Verdict("switched off")
        if self.hello.host != hello.host:
            return Verdict("another host")
        try:
            self._peers = PeerArena(hello.pid, hello.arena)
            self.pipes.open_peer(hello.pid, hello.pipe)
        except TransportError as error:
            return Verdict(str(error))
        self._judged_well = True
        return Verdict("")

    def settle(self, verdict: Verdict) -> None:
        """Believe what the peer found out about ours."""
        own = self._own
        if own is not None:
            own.close()
        if verdict.obstacle:
            self._own = None
        if self.pipes is not None:
            if self._judged_well and not verdict.obstacle:
                self.pipes.settle()
            else:
                self.pipes = None
        path = f"the wire ({verdict.obstacle})" if verdict.obstacle else "shared memory"
        logger.info("channel to %s: payloads go through %s", self._peer, path)

    def place(self, frame: Frame, payload: Payload | None) -> bool:
        """Copy the payload, and the body if it is outside, into a region; False: send them over the wire."""
        arena = self._own
        body_bytes = _body_room(frame, len(frame.body))
        num_bytes = body_bytes + frame.payload_bytes
        offset = None if arena is None else arena.allocate(num_bytes)
        if arena is None or offset is None:
            return False
        region = arena.region(offset, num_bytes)
        try:
            if frame.outside:
                region.numpy()[: len(frame.body)] = memoryview(frame.body)
            if payload is not None:
                payload.write(region[body_bytes:])
        except BaseException:
            arena.release([offset])
            raise
        frame.offset, frame.generation = offset, arena.offer.generation
        return True

    def take(self, frame: Frame) -> Tensor:
        """Return the payload that a frame points to; takes the body in if it is outside.

        Raises:
            TransportError: the handle does not belong to the peer's arena.
        """
        peers = self._peers
        if peers is None:
            raise TransportError(f"channel to {self._peer}: a handle, but no memory is shared")
        body_bytes = _body_room(frame, frame.body_bytes)
        region = peers.lend(frame.offset, body_bytes + frame.payload_bytes, frame.generation)
        if frame.outside:
            frame.accept_body(region[: frame.body_bytes].numpy().tobytes())
        return region[body_bytes:]

    def take_released(self) -> list[int]:
        """Return regions to mention in the next frame."""
        peers = self._peers
        return [] if peers is None else peers.take_released(MOST_RELEASES)

    def release(self, frame: Frame) -> None:
        """Take back what the peer has no views of any more.

        Raises:
            TransportError: nothing was lent there.
        """
        own = self._own
        if not frame.releases:
            return
        if own is not None:
            own.release(frame.releases)
        else:
            raise TransportError(f"channel to {self._peer}: releases, but no memory is shared")

    def end(self) -> None:
        """The channel ended: our memory goes as a whole; what others still view of it lives on."""
        own, self._own, self._peers = self._own, None, None
        if own is not None:
            own.close()


def _body_room(frame: Frame, body_bytes: int) -> int:
    return -(-body_bytes // ALIGN_BYTES) * ALIGN_BYTES if frame.outside else 0
