"""95 % intervals over seeds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Mean:
    """A mean, and half the width of its 95 % interval; infinite for a single value."""

    value: float
    half_width: float

    def text(self, digits: int = 2) -> str:
        """Return it for a table."""
        if math.isinf(self.half_width):
            return f"{self.value:.{digits}f}"
        return f"{self.value:.{digits}f} ± {self.half_width:.{digits}f}"


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean of independent values, with Student's interval."""
    if len(values) < 2:
        return Mean(statistics.fmean(values), math.inf)
    half_width = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Mean(statistics.fmean(values), half_width)


def difference_of(one: Sequence[float], other: Sequence[float]) -> Mean:
    """Return the difference of two means, with Welch's interval (1947)."""
    difference = statistics.fmean(one) - statistics.fmean(other)
    if min(len(one), len(other)) < 2:
        return Mean(difference, math.inf)
    parts = [statistics.variance(each) / len(each) for each in (one, other)]
    if not sum(parts):
        return Mean(difference, 0.0)
    freedom = sum(parts) ** 2 / sum(part**2 / (len(each) - 1) for part, each in zip(parts, (one, other), strict=True))
    return Mean(difference, t_quantile(freedom) * math.sqrt(sum(parts)))


def t_quantile(freedom: float) -> float:
    """Return Student's 97.5 % quantile, for 1 degree of freedom or more.

    With t = sqrt(freedom) tan(angle), the density is proportional to cos(angle) ** (freedom - 1).
    """
    angles = np.linspace(0.0, math.pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(0.95, below / below[-1], angles)))
