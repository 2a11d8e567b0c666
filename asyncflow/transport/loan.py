"""A tensor over somebody's memory that says when nobody looks at it any more."""

import weakref
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def lend(memory: NDArray[np.uint8], start: int, num_bytes: int, released: deque[int]) -> Tensor:
    """Return a view of `memory`; `start` is appended to `released` when the last tensor or array over it is gone.

    That happens in whatever thread drops the last one, perhaps in the middle of anything: an append needs no lock.
    The memory as a whole lives as long as one loan does.

    Args:
        memory: uint8, 1-D.
        start, num_bytes: which part; not empty.
        released: read by whoever manages the memory.
    """
    view = memory[start : start + num_bytes]
    weakref.finalize(view, released.append, start).atexit = False
    return torch.from_numpy(view)
