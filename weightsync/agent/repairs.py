"""Damaged buckets that are being written again, and the trainer ranks that can do it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from weightsync.version import Version


@dataclass
class _Mender:
    """A trainer rank. `call`: what it waits with, None while it is busy; `wanted`: what it is to write again."""

    session: object
    call: object | None = None
    wanted: dict[Version, set[int]] = field(default_factory=dict)


class Repairs:
    """Who waits for which bucket, and what trainer ranks are asked to write again."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[Version, int], list[tuple[object, object]]] = {}
        self._menders: dict[int, _Mender] = {}

    def report(self, version: Version, bucket: int, call: object, session: object) -> bool:
        """A call waits for a bucket's repair; returns whether it is the first."""
        first = not self.pending(version, bucket)
        self._waiting.setdefault((version, bucket), []).append((call, session))
        return first

    def pending(self, version: Version, bucket: int) -> bool:
        """Return whether a bucket is being repaired."""
        return (version, bucket) in self._waiting

    def end(self, version: Version, bucket: int | None = None) -> dict[int, list[object]]:
        """Repairs of a version (None: all of it) are over; returns the calls that waited, by bucket."""
        keys = [key for key in self._waiting if key[0] == version and bucket in (None, key[1])]
        for mender in self._menders.values():
            wanted = mender.wanted.get(version, set())
            wanted.difference_update(key[1] for key in keys)
            if not wanted:
                mender.wanted.pop(version, None)
        return {key[1]: [call for call, _ in self._waiting.pop(key)] for key in keys}

    def ready(self, rank: int, session: object, call: object) -> Mapping[Version, set[int]]:
        """A trainer rank can be asked from now on; returns what it is to do at once, instead of waiting.

        One that comes again on a new channel, before the end of its old one was noticed, still does what it was asked.
        """
        known = self._menders.get(rank)
        wanted = {} if known is None else known.wanted
        self._menders[rank] = _Mender(session, None if wanted else call, wanted)
        return wanted

    def ask(self, rank: int, version: Version, bucket: int) -> tuple[object, object | None] | None:
        """Want a bucket from its rank; returns its session and the call that it waits with, or None: it is gone."""
        mender = self._menders.get(rank)
        if mender is None:
            return None
        mender.wanted.setdefault(version, set()).add(bucket)
        call, mender.call = mender.call, None
        return mender.session, call

    def wants(self, version: Version, rank: int | None = None) -> bool:
        """Return whether a rank (None: any) is to write buckets of a version again."""
        return any(version in mender.wanted for each, mender in self._menders.items() if rank in (None, each))

    def closed(self, session: object) -> list[Version]:
        """A client is gone; returns the versions that it would have repaired."""
        for key, calls in self._waiting.items():
            self._waiting[key] = [each for each in calls if each[1] != session]
        gone = [rank for rank, mender in self._menders.items() if mender.session == session]
        return [version for rank in gone for version in self._menders.pop(rank).wanted]
