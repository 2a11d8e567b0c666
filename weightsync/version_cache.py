"""A receiver's versions for its engine: the newest one that was checked, and memory on its device for the next."""

#     receiver's threads     memory() ... write, check ... put(v2)                  (v1 is released: it is not used)
#     engine's thread        load() v1 ....................... load() v2
#
# Thread-safe. It knows neither agents nor broadcasts: each version comes with what to do once it is no longer used.

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from asyncflow.errors import EngineFailed, PlanError, TransportError, WeightsLate
from asyncflow.transport.server import Connection
from weightsync.device_copies import HandedOver
from weightsync.messages import fetch_plan
from weightsync.plan import Box, Bucket, Need, Piece, buckets_of, match_needs
from weightsync.slot_memory import Region, RegionLayout, private_memory
from weightsync.version import Version

_CPU = torch.device("cpu")
# How often a wait checks its stop event (s).
_LOOK_S = 0.5


@dataclass(frozen=True, eq=False)
class ReadyVersion:
    """A version that was checked."""

    version: Version
    views: Mapping[str, Tensor]  # by the engine's names
    own: bool  # in memory of the cache; otherwise in the agent's
    release: Callable[[], None]  # called once, when the version is not used any more
    on_devices: HandedOver | None = None  # the same, where it may be read on devices; then `views` were not checked

    def opened(self) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Provide the tensors for one load."""
        return nullcontext(self.views) if self.on_devices is None else self.on_devices.opened()


class VersionCache:
    """Between the threads that get versions and the one that loads them.

    Args:
        source: the agent's name, for errors.
        adopts: a loaded version stays in use until the next one is loaded.
        arrived: called when a newer version is ready.
        device: of its memory.
    """

    def __init__(
        self,
        source: str,
        *,
        adopts: bool,
        arrived: Callable[[], None] = lambda: None,
        device: torch.device = _CPU,
    ) -> None:
        self._device = device
        self._arrived = arrived
        self._source = source
        self._adopts = adopts
        self._changed = threading.Condition()
        self._ready: ReadyVersion | None = None
        self._used: list[ReadyVersion] = []  # by the engine: during `load_newest`, and afterwards if it adopts
        self._newest: Version | None = None
        self._loaded: Version | None = None
        self._coming: Version | None = None
        self._free: list[Region] = []
        self._error: Exception | None = None

    @property
    def newest(self) -> Version | None:
        """The newest version that was ready, except one that made room before it was loaded."""
        return self._newest

    @property
    def loaded(self) -> Version | None:
        return self._loaded

    def put(self, ready: ReadyVersion) -> bool:
        """Offer a version to the engine; False: a newer one is here already, and this one is released."""
        with self._changed:
            unused = [ready]
            if self._newest is None or ready.version > self._newest:
                unused = [] if self._ready is None else [self._ready]
                self._ready = ready
                self._newest, self._error = ready.version, None
                self._changed.notify_all()
            unused = self._filter_unused(unused)
        # Outside the lock, since a release may send a message.
        _release(unused)
        taken = ready not in unused
        if taken:
            self._arrived()
        return taken

    def has_newer(self, version: Version | None) -> bool:
        ready = self._ready
        return ready is not None and (version is None or ready.version > version)

    def load_newest(
        self, apply: Callable[[Mapping[str, Tensor]], None], *, newer_than: Version | None
    ) -> Version | None:
        """Give the newest version to `apply` if it is newer; returns it, or None."""
        ready = self.hold(lambda version: newer_than is None or version > newer_than)
        if ready is None:
            return None
        with ready.opened() as tensors:
            apply(tensors)
        self.let_go(ready)
        return ready.version

    def hold(self, wanted: Callable[[Version], bool]) -> ReadyVersion | None:
        """Return the newest version if it is `wanted`; it stays intact until `let_go` or the next `hold`."""
        with self._changed:
            ready = self._ready
            if ready is None or not wanted(ready.version):
                return None
            former, kept = self._used, self._used if self._adopts else []
            self._used = [*kept, ready]
            unused = self._filter_unused(former)
        _release(unused)
        return ready

    def let_go(self, ready: ReadyVersion) -> None:
        with self._changed:
            former = self._used
            self._loaded = ready.version
            self._used = [ready] if self._adopts else []
            unused = self._filter_unused([*former, ready])
        _release(unused)

    def drop_loaded(self) -> None:
        """Forget the ready version if it was loaded, so that its memory can be reused."""
        with self._changed:
            unused = self._forget_loaded()
        _release(unused)

    def memory(self, layout: RegionLayout) -> Region:
        """Return unused memory of this process for a coming version; then `put` it or `recycle_memory`.

        A version in such memory that the engine has neither loaded nor is loading makes room.
        """
        # Keep only one version beside the engine's own. If the coming one breaks, the agent still has it.
        with self._changed:
            unused = [] if self._adopts else self._give_up()
        _release(unused)
        # A release above may have recycled a region.
        with self._changed:
            fitting = [region for region in self._free if region.layout is layout]
            self._free = fitting[1:]
        if fitting:
            return fitting[0]
        num_bytes = layout.num_bytes
        on_host = self._device.type == "cpu"
        return Region(
            private_memory(num_bytes) if on_host else torch.empty(num_bytes, dtype=torch.uint8, device=self._device),
            layout,
        )

    def recycle_memory(self, region: Region) -> None:
        """Let memory be reused; only one version's memory is kept."""
        with self._changed:
            self._free = [region]

    @contextmanager
    def coming_version(self, version: Version) -> Iterator[None]:
        """Make others wait in `wait_for_coming` for this version while it is being received."""
        with self._changed:
            self._coming = version
        try:
            yield
        finally:
            with self._changed:
                self._coming = None
                self._changed.notify_all()

    def wait_for_coming(self, version: Version, *, stop: threading.Event) -> bool:
        """Return whether a version is already here; waits while one is arriving."""
        with self._changed:
            while not stop.is_set() and self._coming is not None and self._coming >= version:
                if self._coming > version and self._newest is None:
                    break  # better an older version now than none
                self._changed.wait(_LOOK_S)
            return self._newest is not None and self._newest >= version

    def fail(self, error: Exception) -> bool:
        """Note why there is no newer version; False: that was known."""
        with self._changed:
            changed = str(error) != str(self._error)
            self._error = error
            self._changed.notify_all()
        return changed

    def connected(self) -> None:
        """The agent answers again: forget an error that said otherwise."""
        with self._changed:
            if isinstance(self._error, TransportError):
                self._error = None

    def wait(self, wanted: Callable[[], bool], what: str, *, timeout_s: float, over: Callable[[], bool]) -> bool:
        """Wait until `wanted()`; False: `over()` came first.

        Args:
            wanted: asked whenever something changes.
            what: is missing, for the error.
            over: asked twice a second.

        Raises:
            WeightsLate: not within `timeout_s`; the message says why.
            PlanError: trainer and engine disagree on a tensor.
            EngineFailed: the engine has ended.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                if not wanted():
                    self._changed.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic())))
                if wanted():
                    return True
                error = self._error
            if over():
                return False
            if isinstance(error, PlanError | EngineFailed):
                raise error
            if time.monotonic() >= deadline:
                why = f": {error}" if error is not None else f"; {self._source} has none"
                raise WeightsLate(f"{what} did not come within {timeout_s:g} s{why}")

    def wake_waiters(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _give_up(self) -> list[ReadyVersion]:
        ready = self._ready
        if ready is None or not ready.own or ready in self._used:
            return []
        self._ready, self._newest = None, self._loaded
        return [ready]

    def _forget_loaded(self) -> list[ReadyVersion]:
        ready = self._ready
        if ready is None or ready.version != self._loaded:
            return []
        self._ready = None
        return self._filter_unused([ready])

    def _filter_unused(self, each: Iterable[ReadyVersion]) -> list[ReadyVersion]:
        return [one for one in dict.fromkeys(each) if one is not self._ready and one not in self._used]


class _Matched(NamedTuple):
    """An engine's needs in one plan."""

    layout: RegionLayout  # of the agent's slots
    matched: dict[str, Piece]
    pieces: Sequence[Piece] | None  # see `EngineViews.pieces`
    buckets: frozenset[int]  # that this process reads
    own: RegionLayout  # of copies in this process's memory


class EngineViews:
    """Which parts of a version an engine wants, under its own names; found once per plan.

    Args:
        needs: what the engine wants, by its own names; None: everything, by the trainer's names.
        whole: the engine takes the whole model; False: its ranks share it.
        share: names that this process reads and keeps copies of; None: all.
    """

    def __init__(self, needs: Mapping[str, Need] | None, *, whole: bool, share: Collection[str] | None = None) -> None:
        self._needs = needs
        self._whole = whole
        self._share = share
        self._known: dict[str, _Matched] = {}

    def layout(self, digest: str, connection: Connection) -> RegionLayout:
        """Return a plan's layout, the same object every time; `connection` is to an agent that knows the plan.

        Raises PlanError if the engine does not fit the trainer, TransportError if the plan was not known here, and the
        agent is gone.
        """
        if digest not in self._known:
            plan, needs = fetch_plan(connection, digest), self._needs
            if needs is None:
                needs = {name: Need(tensor.shape) for name, tensor in plan.tensors.items()}
            matched, layout = match_needs(plan, needs, whole=self._whole), RegionLayout(plan)
            read = list(matched.values()) if self._share is None else [matched[name] for name in self._share]
            partial = not self._whole or self._share is not None
            own = RegionLayout(plan, _hulls(read)) if partial else layout
            pieces = read if partial else None
            self._known.setdefault(digest, _Matched(layout, matched, pieces, buckets_of(plan, read), own))
        return self._known[digest].layout

    def own_layout(self, layout: RegionLayout) -> RegionLayout:
        """Return the layout of copies in this process's memory; `layout` comes from this object, as below."""
        return self._known[layout.plan.digest()].own

    def pieces(self, layout: RegionLayout) -> Sequence[Piece] | None:
        """Return what this process needs of a version; None: all of it."""
        return self._known[layout.plan.digest()].pieces

    def slot_extents(
        self, layout: RegionLayout, *, elsewhere: Callable[[Bucket], bool] = lambda _: False
    ) -> tuple[tuple[int, int], ...]:
        """Return the byte ranges (start, stop) of a slot that this process reads; `elsewhere`: buckets that it does not
        read there."""
        read = (each for each in layout.plan.buckets if self.reads_bucket(each, layout) and not elsewhere(each))
        return tuple(layout.bucket_extents(read))

    def matched(self, layout: RegionLayout) -> Mapping[str, Piece]:
        """Return where what the engine wants is, by its own names; see `match_needs`."""
        return self._known[layout.plan.digest()].matched

    def reads_bucket(self, bucket: Bucket, layout: RegionLayout) -> bool:
        return bucket.index in self._known[layout.plan.digest()].buckets

    def views_of_region(self, region: Region) -> dict[str, Tensor]:
        """Return the engine's views of a region; on device `meta` where the region has nothing."""
        return region.view_matched(self._known[region.layout.plan.digest()].matched)


def _release(unused: Iterable[ReadyVersion]) -> None:
    for each in unused:
        each.release()


def _hulls(pieces: Iterable[Piece]) -> dict[int, Box]:
    """Return by tensor the smallest box that contains all of its pieces."""
    hulls: dict[int, Box] = {}
    for piece in pieces:
        known = hulls.get(piece.tensor)
        hulls[piece.tensor] = piece.box if known is None else known.hull(piece.box)
    return hulls
