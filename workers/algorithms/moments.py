"""Mean and deviation of numbers that come in parts. Plain numbers, so that they travel as JSON."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Of some numbers.

    Attributes:
        count: how many.
        mean: 0 without any.
        squares: sum of the squared distances from the mean.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(values: Tensor) -> "Moments":
        """Return those of a tensor, computed in float64."""
        if not values.numel():
            return Moments()
        values = values.double()
        mean = values.mean()
        return Moments(values.numel(), float(mean), float((values - mean).square().sum()))

    @staticmethod
    def merged(parts: Iterable["Moments"]) -> "Moments":
        """Return those of all numbers together.

        Source: Chan, Golub, LeVeque 1983, eq. 2.1.
        """
        count, mean, squares = 0, 0.0, 0.0
        for part in parts:
            total = count + part.count
            if part.count:
                apart = part.mean - mean
                squares += part.squares + apart**2 * count * part.count / total
                mean += apart * part.count / total
            count = total
        return Moments(count, mean, squares)

    @property
    def deviation(self) -> float:
        """Population standard deviation; 0 without any numbers."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0
