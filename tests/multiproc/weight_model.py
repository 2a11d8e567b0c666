"""The small model of the weight tests: how it is cut among trainer ranks, and what it is at every version.

The weights of a version are a function of that version, so every receiver can tell whether what it loads is whole and
is what it claims to be.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from weightsync.plan import Box, Need
from weightsync.version import Version

DEADLINE_S = 30.0
SHAPES = {"embed": (48, 8), "norm": (8,), "head": (8, 50), "scale": ()}
"""Floating-point parameters: float32 masters."""
BUFFERS = {"positions": (6,), "num_calls": ()}
"""int64, on every rank."""
NEEDS = {
    **{name: Need(shape) for name, shape in SHAPES.items()},
    **{name: Need(shape) for name, shape in BUFFERS.items()},
    "tied": Need(SHAPES["embed"], aliases=("unknown", "embed")),
}


@dataclass(frozen=True)
class Setup:
    """What all processes of a test agree on.

    Attributes:
        epoch: of the trainer's gang.
        num_ranks: trainer ranks.
        cut: how parameters are cut among them: by `rows` or `columns`.
        dtype, bucket_bytes, num_slots, timeout_s: see `WeightSyncConfig`.
        broadcast: the path is `broadcast`.
        adopts: receivers compute with what they load, in place.
        takes_turns: receivers ask the agent before they swap.
        wide: the embedding's rows are so many times longer.
        tampers: so many messages of the first broadcast are damaged on their way.
    """

    epoch: str = "0"
    num_ranks: int = 2
    cut: str = "rows"
    dtype: str = "float32"
    bucket_bytes: int = 1024
    num_slots: int = 3
    timeout_s: float = DEADLINE_S
    broadcast: bool = False
    adopts: bool = False
    takes_turns: bool = True
    wide: int = 1
    tampers: int = 0


def shapes(wide: int) -> dict[str, tuple[int, ...]]:
    """The parameters' shapes."""
    return SHAPES | {"embed": (48, 8 * wide)}


def needs(wide: int = 1) -> dict[str, Need]:
    """What a receiver of the whole model wants."""
    return NEEDS | {"embed": Need((48, 8 * wide)), "tied": Need((48, 8 * wide), aliases=("unknown", "embed"))}


@cache
def weights(version: Version, wide: int = 1) -> dict[str, Tensor]:
    """Return the trainer's tensors of a version; consecutive steps differ in one row of the embedding and the rest."""
    generator = torch.Generator().manual_seed(1_000_003 * version.lineage + 1)
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes(wide).items()}
    generator.manual_seed(1_000_003 * version.lineage + version.step)
    for name in ("norm", "head", "scale"):
        values[name] = torch.randn(SHAPES[name], generator=generator)
    values["embed"][version.step % 48] = version.step + 0.5
    values["positions"] = torch.arange(6) + version.step
    values["num_calls"] = torch.tensor(version.step)
    return values


def same(loaded: Mapping[str, Tensor], version: Version, *, dtype: str = "float32", wide: int = 1) -> bool:
    """Return whether tensors are those of a version, bit by bit, under a receiver's names."""
    expected = dict(weights(version, wide))
    expected["tied"] = expected["embed"]
    wire = getattr(torch, dtype)
    return all(
        torch.equal(value, expected[name].to(wire) if expected[name].is_floating_point() else expected[name])
        for name, value in loaded.items()
    )


def box_of(name: str, shape: tuple[int, ...], rank: int, setup: Setup) -> Box:
    """Return what a rank holds of a parameter."""
    if name in BUFFERS or not shape:
        return Box.from_shape(shape)  # everybody does
    axis = len(shape) - 1 if setup.cut == "columns" else 0
    length = shape[axis] // setup.num_ranks
    offset, size = [0] * len(shape), list(shape)
    offset[axis] = rank * length
    size[axis] = shape[axis] - offset[axis] if rank == setup.num_ranks - 1 else length
    return Box(tuple(offset), tuple(size))
