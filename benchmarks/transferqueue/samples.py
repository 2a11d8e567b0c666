"""Repeated measurements, taken in alternating rounds so that what disturbs the machine disturbs both sides. Pure."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Measure = Callable[[], Mapping[str, float]]
"""One round of one side: quantity -> value."""


@dataclass(frozen=True)
class Samples:
    """Values of one quantity over the rounds after warm-up."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.values)

    def rates(self, amount: float) -> "Samples":
        """Turn seconds into `amount` per second."""
        return Samples(tuple(amount / value for value in self.values))

    def report(self, scale: float = 1.0) -> dict[str, Any]:
        """Return median and spread for the details."""
        values = sorted(value * scale for value in self.values)
        return {"median": self.median * scale, "low": values[0], "high": values[-1], "rounds": len(values)}


def alternate(sides: Mapping[str, Measure], *, rounds: int, warm_up: int = 1) -> dict[str, dict[str, Samples]]:
    """Run one round of each side in turn, so often.

    Args:
        sides: name -> a function that carries out one round while the others are idle.
        rounds: that count, after `warm_up` that do not.

    Returns:
        Side -> quantity -> samples.
    """
    collected: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    for number in range(warm_up + rounds):
        for name, measure in sides.items():
            for quantity, value in measure().items():
                if number >= warm_up:
                    collected[name].setdefault(quantity, []).append(value)
    return {
        name: {quantity: Samples(tuple(values)) for quantity, values in quantities.items()}
        for name, quantities in collected.items()
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
