"""Which unit a put goes to: the one that holds least, as far as this client knows. Pure."""

from collections.abc import Collection, Mapping

from asyncflow.errors import TransportError


class UnitLoads:
    """What heartbeats said last, corrected by the answers to this client's own puts."""

    def __init__(self) -> None:
        self._reported: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._puts: dict[str, int] = {}

    def put(self, unit: str, num_bytes: int) -> None:
        """A put succeeded; the unit holds so many bytes now."""
        self._seen[unit] = num_bytes
        self._puts[unit] = self._puts.get(unit, 0) + 1

    def emptiest(self, units: Mapping[str, int], passed_over: Collection[str]) -> str:
        """Choose a unit.

        Args:
            units: those that are up, with the bytes that they hold as last reported.
            passed_over: chosen only when no other is left.

        Raises:
            TransportError: no unit is up.
        """
        if not units:
            raise TransportError("no storage unit is up")
        for unit, num_bytes in units.items():
            if self._reported.get(unit) != num_bytes:  # newer than what the last put said
                self._reported[unit] = num_bytes
                self._seen[unit] = num_bytes
        return min(
            units,
            key=lambda unit: (unit in passed_over, self._seen.get(unit, 0), self._puts.get(unit, 0), unit),
        )
