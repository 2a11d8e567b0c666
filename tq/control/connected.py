"""Units and consumers that are connected to a controller, by channel, with the last heartbeat of each. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from asyncflow.clock import excused
from tq.timers import Timer, Timers

# Checks come at least this often. After a longer pause this process stood still itself, with heartbeats unread.
_LOOKS_PER_TIMEOUT = 4


@dataclass
class _Owner:
    session: int
    last_heard: float
    joined: bool = True


@dataclass
class _Unit:
    session: int
    last_heard: float


class Sessions:
    """Owners and units of open channels. The caller holds the lock and passes the clock (s, monotonic)."""

    def __init__(self) -> None:
        self._owners: dict[str, _Owner] = {}
        self._units: dict[str, _Unit] = {}
        self._owners_looked_at = 0.0
        self._units_looked_at = 0.0

    @property
    def owners(self) -> list[str]:
        """Consumers that joined and were neither closed nor given up."""
        return list(self._owners)

    def joined(self, session: int, owner: str, now: float) -> None:
        """A consumer joins, on a new channel or, after it was given up, again on the same one."""
        self._owners[owner] = _Owner(session, now)

    def asked(self, session: int, owner: str, now: float) -> None:
        """A consumer may get rows: watch its channel again if it was given up, but it must join to be `heard`."""
        if owner not in self._owners:
            self._owners[owner] = _Owner(session, now, joined=False)

    def elsewhere(self, session: int, owner: str) -> bool:
        """Whether a consumer's known channel is another one than this, whose end was not noticed yet."""
        known = self._owners.get(owner)
        return known is not None and known.session != session

    def heard(self, owner: str, now: float) -> bool:
        """Note a heartbeat; False when the owner is not known (any more), and must join."""
        known = self._owners.get(owner)
        if known is not None:
            known.last_heard = now
        return known is not None and known.joined

    def registered(self, session: int, unit: str, now: float) -> None:
        self._units[unit] = _Unit(session, now)

    def unit_heard(self, session: int, now: float) -> None:
        for unit in self._units.values():
            if unit.session == session:
                unit.last_heard = now

    def silent_units(self, now: float, timeout_s: float) -> list[tuple[str, int]]:
        """Return (unit, session) of those that were silent for `timeout_s` while this process ran."""
        _excuse(self._units.values(), self._units_looked_at, now, timeout_s)
        self._units_looked_at = now
        return [(name, unit.session) for name, unit in self._units.items() if now - unit.last_heard > timeout_s]

    def ended(self, session: int) -> tuple[list[str], list[str]]:
        """A channel ended; returns (owners, units) that were reached over it and no other."""
        owners = [name for name, owner in self._owners.items() if owner.session == session]
        units = [name for name, unit in self._units.items() if unit.session == session]
        self._forget(owners, units)
        return owners, units

    def silent(self, now: float, timeout_s: float) -> list[str]:
        """Return, and forget, the owners that were silent for `timeout_s` while this process ran."""
        _excuse(self._owners.values(), self._owners_looked_at, now, timeout_s)
        self._owners_looked_at = now
        owners = [name for name, owner in self._owners.items() if now - owner.last_heard > timeout_s]
        self._forget(owners, ())
        return owners

    def gone(self, owners: Iterable[str]) -> None:
        """Forget consumers that are known to be gone; unknown ones are skipped."""
        self._forget([owner for owner in owners if owner in self._owners], ())

    def _forget(self, owners: Iterable[str], units: Iterable[str]) -> None:
        for name in owners:
            del self._owners[name]
        for unit in units:
            del self._units[unit]


def _excuse(those: Iterable[_Owner | _Unit], looked_at: float, now: float, timeout_s: float) -> None:
    """Subtract the time for which this process stood still from every peer's silence."""
    for one in those:
        one.last_heard = excused(one.last_heard, looked_at=looked_at, now=now, longest_s=timeout_s / _LOOKS_PER_TIMEOUT)


class UnitGraces:
    """Units whose channel ended, until they are back or their time is up. The caller holds the lock.

    `expired` is called without the lock, with the arguments of `over`.
    """

    def __init__(self, timers: Timers, grace_s: float, expired: Callable[[str, int], None]) -> None:
        self._timers = timers
        self._grace_s = grace_s
        self._expired = expired
        self._running: dict[str, tuple[int, Timer]] = {}
        self._breaks = 0

    def begin(self, unit: str) -> None:
        """A unit's channel ended."""
        self.end(unit)
        # Number the breaks, so that the grace of an earlier one never ends a later one.
        self._breaks += 1
        self._running[unit] = (
            self._breaks,
            self._timers.after(self._grace_s, partial(self._expired, unit, self._breaks)),
        )

    def end(self, unit: str) -> None:
        """The unit is back."""
        _, timer = self._running.pop(unit, (0, None))
        if timer is not None:
            timer.cancel()

    def over(self, unit: str, number: int) -> bool:
        """Whether this break has lasted too long: False if the unit came back just now."""
        if self._running.get(unit, (0, None))[0] != number:
            return False
        del self._running[unit]
        return True
