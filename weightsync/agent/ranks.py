"""The trainer ranks of this node: how far each of them is, and who waits for a slot. Pure."""

from dataclasses import dataclass

from weightsync.version import Version


@dataclass(frozen=True)
class Taker:
    """A rank that wants to write its part of a version.

    Attributes:
        call, session: whom to answer.
        plan: digest.
        deadline: when it stops waiting.
    """

    call: object
    session: object
    rank: int
    version: Version
    plan: str
    deadline: float


class Ranks:
    """Each rank asks for one version after the other; who asked for a newer one never comes back to an older one."""

    def __init__(self) -> None:
        self._waiting: list[Taker] = []
        self._asked: dict[int, dict[object, Version]] = {}  # by rank, by session: the one that asked last is its last

    def asks(self, taker: Taker) -> None:
        """A rank wants a slot; it waits until `answered`."""
        asked = self._asked.setdefault(taker.rank, {})
        newest = max(taker.version, asked.pop(taker.session, taker.version))
        asked[taker.session] = newest
        self._waiting.append(taker)

    def answered(self, taker: Taker) -> None:
        """It does not wait any more."""
        self._waiting.remove(taker)

    def waiting(self) -> list[Taker]:
        """Return who waits: the newest lineage first, and in it the oldest step, which is completed first."""
        return sorted(self._waiting, key=lambda taker: (-taker.version.lineage, taker.version.step))

    def asked(self, rank: int) -> Version | None:
        """Return the newest version that a rank asked for; None: it is not there, or of another node."""
        asked = self._asked.get(rank)
        return asked[next(reversed(asked))] if asked else None

    def overtaken(self, taker: Taker, *, is_begun: bool) -> bool:
        """Return whether ranks have gone on, so that the version will never be complete.

        Args:
            taker: who wants to write it.
            is_begun: it has a slot, with what the others wrote.
        """
        if self._asked[taker.rank][taker.session] > taker.version:
            return True
        asked = [self.asked(rank) for rank in self._asked]
        return not is_begun and any(each is not None and each > taker.version for each in asked)

    def closed(self, session: object) -> None:
        """A client is gone."""
        self._waiting = [taker for taker in self._waiting if taker.session != session]
        for asked in self._asked.values():
            asked.pop(session, None)

    def are_overdue(self, now: float) -> bool:
        """Return whether anybody waited long enough."""
        return any(taker.deadline <= now for taker in self._waiting)

    def overdue(self, now: float) -> list[Taker]:
        """Return who waited long enough, and forget that they do."""
        late = [taker for taker in self._waiting if taker.deadline <= now]
        self._waiting = [taker for taker in self._waiting if taker.deadline > now]
        return late
