"""Spans of a values tensor: which runs of values some rows take up, and copying those together.

Rows are found by arithmetic on int64 arrays: a lease of 64 rows must not cost 64 tensor objects.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int64s = NDArray[np.int64]

SMALL_BYTES = 1 << 16
"""Runs of values below this are worth a copy more, if that makes them one tensor (a tensor object costs as much)."""

_GATHER_BELOW = 48
"""Mean span length under which one indexed read beats copying slices (measured: 8 bytes of index per value)."""


def as_array(values: Tensor) -> NDArray[Any]:
    """View a CPU tensor as an array; bfloat16, which numpy lacks, as int16."""
    return (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()


def as_tensor(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Undo `as_array`."""
    tensor = torch.from_numpy(array)
    return tensor.view(dtype) if dtype == torch.bfloat16 else tensor


def offsets_of(lengths: NDArray[Any]) -> Int64s:
    """Return int64 [N + 1]: where each row begins, and the end."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def merge_neighbours(starts: Int64s, stops: Int64s) -> tuple[Int64s, Int64s]:
    """Join spans that touch, so that neighbouring rows become one slice."""
    gaps = starts[1:] != stops[:-1]
    if gaps.all():
        return starts, stops
    return starts[np.concatenate(((True,), gaps))], stops[np.concatenate((gaps, (True,)))]


def take(values: Tensor, starts: Int64s, stops: Int64s) -> Tensor:
    """Return the values of all spans, one after the other: a view if they touch each other, else a copy."""
    starts, stops = merge_neighbours(starts, stops)
    if len(starts) == 0:
        return values[:0]
    if len(starts) == 1:
        return values[int(starts[0]) : int(stops[0])]
    lengths = stops - starts
    total = int(lengths.sum())
    array = as_array(values)
    if total < _GATHER_BELOW * len(starts):
        ends = np.cumsum(lengths)
        index = np.repeat(starts - (ends - lengths), lengths)
        index += np.arange(total)
        return as_tensor(array[index], values.dtype)
    slices = [array[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    return as_tensor(np.concatenate(slices), values.dtype)


def positions_array(positions: Sequence[int]) -> Int64s:
    """Return positions as int64 [P]."""
    if isinstance(positions, range):
        return np.arange(positions.start, positions.stop, positions.step, dtype=np.int64)
    return np.asarray(positions, dtype=np.int64)
