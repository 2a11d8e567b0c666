"""The trainer ranks of this node: how far each is, which ones wait for a slot, which ones rewrite buckets. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from weightsync.version import Version


@dataclass(frozen=True)
class Taker:
    """A rank that wants to write its part of a version; `plan` is a digest, and `deadline` ends its wait.

    `patient_until`: until then it rather waits for a slot that is about to be free than takes more memory.
    """

    call: object
    session: object
    rank: int
    version: Version
    plan: str
    deadline: float
    patient_until: float = 0.0


class Ranks:
    """Each rank asks for one version after another, never for an older one than last time."""

    def __init__(self) -> None:
        self._waiting: list[Taker] = []
        # By rank, by session; the session that asked last comes last.
        self._asked: dict[int, dict[object, Version]] = {}

    def add_taker(self, taker: Taker) -> None:
        asked = self._asked.setdefault(taker.rank, {})
        newest = max(taker.version, asked.pop(taker.session, taker.version))
        # Popped and inserted again, so that this session comes last.
        asked[taker.session] = newest
        self._waiting.append(taker)

    def remove_taker(self, taker: Taker) -> None:
        self._waiting.remove(taker)

    def list_waiting(self) -> list[Taker]:
        """Return the waiting ones: newest lineage first, and in it the oldest step, which is completed first."""
        return sorted(self._waiting, key=lambda taker: (-taker.version.lineage, taker.version.step))

    def newest_asked(self, rank: int) -> Version | None:
        """Return the newest version that a rank asked for; None: it is gone, or on another node."""
        asked = self._asked.get(rank)
        return asked[next(reversed(asked))] if asked else None

    def is_overtaken(self, taker: Taker, *, is_begun: bool) -> bool:
        """Return whether ranks have moved on, so that the version will never be complete.

        `is_begun`: the version has a slot, with what other ranks wrote.
        """
        if self._asked[taker.rank][taker.session] > taker.version:
            return True
        asked = [self.newest_asked(rank) for rank in self._asked]
        return not is_begun and any(each is not None and each > taker.version for each in asked)

    def closed(self, session: object) -> None:
        self._waiting = [taker for taker in self._waiting if taker.session != session]
        for asked in self._asked.values():
            asked.pop(session, None)

    def are_overdue(self, now: float) -> bool:
        return any(taker.deadline <= now for taker in self._waiting)

    def take_overdue(self, now: float) -> list[Taker]:
        late = [taker for taker in self._waiting if taker.deadline <= now]
        self._waiting = [taker for taker in self._waiting if taker.deadline > now]
        return late


@dataclass
class _Mender:
    """A trainer rank. `call`: the one it waits with, None while it is busy; `wanted`: what it must rewrite."""

    session: object
    call: object | None = None
    wanted: dict[Version, set[int]] = field(default_factory=dict)


class Repairs:
    """The calls that wait for a bucket's repair, and the buckets that trainer ranks must rewrite."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[Version, int], list[tuple[object, object]]] = {}
        self._menders: dict[int, _Mender] = {}

    def add_repair(self, version: Version, bucket: int, call: object, session: object) -> bool:
        """A call waits for a bucket's repair; return whether it is the first one."""
        first = not self.pending(version, bucket)
        self._waiting.setdefault((version, bucket), []).append((call, session))
        return first

    def pending(self, version: Version, bucket: int) -> bool:
        return (version, bucket) in self._waiting

    def end(self, version: Version, bucket: int | None = None) -> dict[int, list[object]]:
        """Repairs of a version (`bucket` None: all of them) are over; return the calls that waited, by bucket."""
        keys = [key for key in self._waiting if key[0] == version and bucket in (None, key[1])]
        for mender in self._menders.values():
            wanted = mender.wanted.get(version, set())
            wanted.difference_update(key[1] for key in keys)
            if not wanted:
                mender.wanted.pop(version, None)
        return {key[1]: [call for call, _ in self._waiting.pop(key)] for key in keys}

    def ready(self, rank: int, session: object, call: object) -> Mapping[Version, set[int]]:
        """A trainer rank can be asked from now on; return what it must do at once, instead of waiting.

        A rank that returns on a new channel before its old one was seen to end keeps its orders.
        """
        known = self._menders.get(rank)
        wanted = {} if known is None else known.wanted
        self._menders[rank] = _Mender(session, None if wanted else call, wanted)
        return wanted

    def ask(self, rank: int, version: Version, bucket: int) -> tuple[object, object | None] | None:
        """Ask a bucket's rank for it; return its session and the call that it waits with; None: it is gone."""
        mender = self._menders.get(rank)
        if mender is None:
            return None
        mender.wanted.setdefault(version, set()).add(bucket)
        call, mender.call = mender.call, None
        return mender.session, call

    def wants_rewrite(self, version: Version, rank: int | None = None) -> bool:
        """Return whether a rank (None: any) must rewrite buckets of a version."""
        return any(version in mender.wanted for each, mender in self._menders.items() if rank in (None, each))

    def closed(self, session: object) -> list[Version]:
        """A client is gone; return the versions that it would have repaired."""
        for key, calls in self._waiting.items():
            self._waiting[key] = [each for each in calls if each[1] != session]
        gone = [rank for rank, mender in self._menders.items() if mender.session == session]
        return [version for rank in gone for version in self._menders.pop(rank).wanted]
