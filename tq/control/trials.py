"""Which rows of a task are handed out alone: those whose next return would put their group into quarantine. Pure.

A consumer that dies has many rows in hand, and all of them come back; the one that it died of is among them. So the
last try of a row is made alone: its reader gets nothing more of the task until it is done with it, and what is blamed
for another death is one parcel.

    returns, of max_deliveries 3    0, 1: together with others    2: alone    3: quarantine
"""

from collections.abc import Sequence

from tq.control.leases import Leases
from tq.policies import Parcel


class Trials:
    """Of one task."""

    def __init__(self, leases: Leases, max_deliveries: int) -> None:
        """Args:
        leases: the task's.
        max_deliveries: see `TaskSpec`.
        """
        self._leases = leases
        self._last_try = max_deliveries - 1 if max_deliveries > 1 else 0

    def holds(self, owner: str) -> bool:
        """Whether a consumer has a row in hand that is on its last try."""
        return bool(self._last_try and self._leases.returns) and any(map(self._is_last, self._leases.of(owner)))

    def together(self, parcels: Sequence[Parcel]) -> int:
        """Return how many of the parcels, from the first on, may be in one lease; all of them as a rule."""
        if not self._last_try or not self._leases.returns:
            return len(parcels)
        alone = (k for k, parcel in enumerate(parcels) if any(map(self._is_last, parcel.rows)))
        return max(1, next(alone, len(parcels)))

    def _is_last(self, row: int) -> bool:
        return self._leases.returns.get(row, 0) >= self._last_try
