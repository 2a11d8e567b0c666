"""A tensor of which this rank holds any number of boxes, for torch.distributed.checkpoint.

DTensor knows regular cuts only. Megatron's distributed optimizer gives a rank a run of a flattened parameter that is
itself a part of one or three Hugging Face tensors: that is a few boxes of each, which this class names.

    whole [8, 4], this rank holds elements 6 .. 21:      [1:2, 2:4]  [2:5, 0:4]  [5:6, 0:2]
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from weightsync.boxes import Box


@dataclass(frozen=True)
class BoxPart:
    """Attributes:
    box: of the whole tensor.
    values: of the box's shape.
    replica: another rank saves the same elements; this one only reads them.
    """

    box: Box
    values: Tensor
    replica: bool = False


class BoxedTensor(Tensor):
    """Has the whole tensor's shape, and no memory of its own; nothing can be computed with it."""

    parts: tuple[BoxPart, ...]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], parts: Sequence[BoxPart]) -> "BoxedTensor":
        """Args:
        shape: of the whole tensor.
        parts: at least one, all of one element type and device.
        """
        first = parts[0].values
        tensor: BoxedTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=first.dtype, device=first.device, requires_grad=False
        )
        tensor.parts = tuple(parts)
        return tensor

    def __init__(self, shape: tuple[int, ...], parts: Sequence[BoxPart]) -> None:
        """See `__new__`."""

    def mapped(self, copy: Callable[[int, Tensor], Tensor]) -> "BoxedTensor":
        """Return the same boxes with the values that `copy` returns for (number of the part, its values)."""
        parts = [BoxPart(part.box, copy(k, part.values), part.replica) for k, part in enumerate(self.parts)]
        return BoxedTensor(tuple(self.shape), parts)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub takes it for a plain function
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        """Refuse: there are no values of the whole tensor."""
        raise AssertionError(f"{function} of a BoxedTensor; compute with its parts")

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        """Return what this rank saves; called by torch."""
        return [self._write_item(name, part) for part in self.parts if not part.replica]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return what this rank reads; called by torch."""
        return [_chunk(part.box) for part in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the values of one part; called by torch."""
        return next(part.values for part in self.parts if index.offset == torch.Size(part.box.offset))

    def _write_item(self, name: str, part: BoxPart) -> WriteItem:
        data = TensorWriteData(
            chunk=_chunk(part.box), properties=TensorProperties.create_from_tensor(part.values), size=self.size()
        )
        return WriteItem(MetadataIndex(name, torch.Size(part.box.offset)), WriteItemType.SHARD, tensor_data=data)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.size))
