"""Units and consumers that are connected to a controller, by channel, with the last heartbeat of each. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from asyncflow.clock import HeartbeatMonitor
from tq.timers import Timer, Timers

# Checks come at least this often; what is longer than that between two of them is no silence.
_LOOKS_PER_TIMEOUT = 4


@dataclass
class _Owner:
    session: int
    joined: bool = True


class OpenSessions:
    """Owners and units of open channels. The caller holds the lock and passes the clock (s, monotonic)."""

    def __init__(self, lease_timeout_s: float, unit_timeout_s: float) -> None:
        self._owners: dict[str, _Owner] = {}
        self._units: dict[str, int] = {}  # name -> session
        self._lease_timeout_s = lease_timeout_s
        self._unit_timeout_s = unit_timeout_s
        self._owner_beats: HeartbeatMonitor[str] = HeartbeatMonitor(lease_timeout_s / _LOOKS_PER_TIMEOUT)
        self._unit_beats: HeartbeatMonitor[str] = HeartbeatMonitor(unit_timeout_s / _LOOKS_PER_TIMEOUT)

    @property
    def owners(self) -> list[str]:
        """Consumers that joined and were neither closed nor given up."""
        return list(self._owners)

    def add_owner(self, session: int, owner: str, now: float) -> None:
        """A consumer joins, on a new channel or, after it was given up, again on the same one."""
        self._owners[owner] = _Owner(session)
        self._owner_beats.hear(owner, now)

    def watch_owner(self, session: int, owner: str, now: float) -> None:
        """A consumer may get rows: watch its channel again if it was given up. Its heartbeats count once it joins."""
        if owner not in self._owners:
            self._owners[owner] = _Owner(session, joined=False)
            self._owner_beats.hear(owner, now)

    def is_elsewhere(self, session: int, owner: str) -> bool:
        """Whether a consumer's known channel is another one than this, whose end was not noticed yet."""
        known = self._owners.get(owner)
        return known is not None and known.session != session

    def note_heartbeat(self, owner: str, now: float) -> bool:
        """Note a heartbeat; False when the owner is not known (any more), and must join."""
        known = self._owners.get(owner)
        if known is None:
            return False
        self._owner_beats.hear(owner, now)
        return known.joined

    def add_unit(self, session: int, unit: str, now: float) -> None:
        self._units[unit] = session
        self._unit_beats.hear(unit, now)

    def unit_heard(self, session: int, now: float) -> None:
        for unit, its_session in self._units.items():
            if its_session == session:
                self._unit_beats.hear(unit, now)

    def silent_units(self, now: float) -> list[tuple[str, int]]:
        """Return (unit, session) of those that were silent for `unit_timeout_s` while this process ran."""
        silences = self._unit_beats.silences(now)
        return [(unit, self._units[unit]) for unit, silent_s in silences.items() if silent_s > self._unit_timeout_s]

    def silent_owners(self, now: float) -> list[str]:
        """Return, and forget, the owners that were silent for `lease_timeout_s` while this process ran."""
        silences = self._owner_beats.silences(now)
        owners = [owner for owner, silent_s in silences.items() if silent_s > self._lease_timeout_s]
        self.remove_owners(owners)
        return owners

    def end_session(self, session: int) -> tuple[list[str], list[str]]:
        """A channel ended; returns (owners, units) that were reached over it and no other."""
        owners = [name for name, owner in self._owners.items() if owner.session == session]
        units = [name for name, its_session in self._units.items() if its_session == session]
        self.remove_owners(owners)
        for unit in units:
            del self._units[unit]
            self._unit_beats.forget(unit)
        return owners, units

    def remove_owners(self, owners: Iterable[str]) -> None:
        """Forget consumers that are known to be gone; unknown ones are skipped."""
        for owner in owners:
            self._owners.pop(owner, None)
            self._owner_beats.forget(owner)


class UnitGraces:
    """Units whose channel ended, until they are back or their time is up. The caller holds the lock.

    `expired` is called without the lock, with the arguments of `is_grace_over`.
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
            self._timers.call_later(self._grace_s, partial(self._expired, unit, self._breaks)),
        )

    def end(self, unit: str) -> None:
        """The unit is back."""
        _, timer = self._running.pop(unit, (0, None))
        if timer is not None:
            timer.cancel()

    def is_grace_over(self, unit: str, number: int) -> bool:
        """Whether this break has lasted too long: False if the unit came back just now."""
        if self._running.get(unit, (0, None))[0] != number:
            return False
        del self._running[unit]
        return True
