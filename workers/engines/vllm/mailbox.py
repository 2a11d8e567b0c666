"""Weights in shared memory, for an engine whose model lives in separate processes on this host.

    rollout                WeightMailbox.fill(weights) -> letter (plain values, travels as JSON)
    the engine's worker    MailboxReader.read(letter)  -> (name, tensor), ...

The memory is allocated once and overwritten by every `fill`; the caller waits until the previous letter has been read.
It has no name in a file system, so a kill leaves nothing behind.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from weightsync.plan import Need
from weightsync.slot_memory import SlotMemory, SlotOffer, map_slot

BACKEND = "asyncflow"  # the weight transfer engine that vLLM's workers register; it reads the mailbox
_ALIGN_BYTES = 64


@dataclass(frozen=True)
class Letter:
    """Where a version of the weights lies; plain values only."""

    # `pid`, `fd`, `num_bytes`, `token`: of the memory, see `SlotOffer`; the token in hexadecimal.
    pid: int
    fd: int
    num_bytes: int
    token: str
    # `names`, `dtypes`, `shapes`, `offsets`: of the tensors, in model order; offsets in bytes.
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class WeightMailbox:
    """The writing end. `needs` lists the weights in model order; they travel as `dtype`."""

    def __init__(self, needs: Mapping[str, Need], dtype: torch.dtype) -> None:
        self._shapes = {name: need.shape for name, need in needs.items()}
        self._dtype = dtype
        self._offsets: list[int] = []
        end = 0
        for shape in self._shapes.values():
            self._offsets.append(end)
            end += -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
        self._num_bytes = end
        # Memory is reserved by the first `fill`.
        self._slot: SlotMemory | None = None

    def fill(self, weights: Mapping[str, Tensor]) -> Letter:
        """Copy weights of the planned shapes; other element types are cast.
        Raises WeightSyncError if shared memory is exhausted."""
        if self._slot is None:
            self._slot = SlotMemory(self._num_bytes)
        for (name, shape), offset in zip(self._shapes.items(), self._offsets, strict=True):
            _view(self._slot.memory, offset, shape, self._dtype).copy_(weights[name])
        offer = self._slot.offer
        return Letter(
            pid=offer.pid,
            fd=offer.fd,
            num_bytes=offer.num_bytes,
            token=offer.token.hex(),
            names=list(self._shapes),
            dtypes=[str(self._dtype).removeprefix("torch.")] * len(self._shapes),
            shapes=[list(shape) for shape in self._shapes.values()],
            offsets=self._offsets,
        )


class MailboxReader:
    """The reading end; keeps the memory mapped. `device` is the one that copies from it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mapped: tuple[SlotOffer, Tensor] | None = None

    def read(self, letter: Letter) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors: CPU views of the shared memory, valid until the next `fill`.
        Raises WeightSyncError if the memory is gone."""
        memory = self._memory(SlotOffer(letter.pid, letter.fd, letter.num_bytes, bytes.fromhex(letter.token)))
        for name, dtype, shape, offset in zip(letter.names, letter.dtypes, letter.shapes, letter.offsets, strict=True):
            yield name, _view(memory, offset, tuple(shape), getattr(torch, dtype))

    def close(self) -> None:
        self._mapped = None

    def _memory(self, offer: SlotOffer) -> Tensor:
        if self._mapped is None or self._mapped[0] != offer:
            self._mapped = offer, map_slot(offer, write=False, device=self._device)
        return self._mapped[1]


def _view(memory: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return memory[offset : offset + num_bytes].view(dtype).view(shape)
