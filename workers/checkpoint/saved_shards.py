"""An engine's state on its way to disk: its copy in host memory, and its shards in one directory, written by
torch.distributed.checkpoint. Collective over its ranks: the actor's, or those of a critic in a role of its own."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.futures import Future

from asyncflow.device import CopiesDone, CopyStream
from asyncflow.errors import CheckpointError
from weightsync.plan import Box

_CHUNK_BYTES = 2**26
_ALIGNED = 64


class SavedEngine(Protocol):
    """The engine whose state is saved: a `TrainEngine` or a `ValueEngine`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""


def save_shards(state: dict[str, Any], target: Path, *, group: dist.ProcessGroup) -> None:
    """Write this rank's part of a state that is in host memory into a new directory. `group`: all ranks that hold the
    state, on the CPU."""
    # The copy is in host memory already, so read nothing ahead on streams that training uses.
    dcp.save(state, storage_writer=_ShardFiles(target, per_thread_copy_ahead=0), process_group=group)


def load_shards(engine: SavedEngine, source: Path, *, group: dist.ProcessGroup) -> None:
    """Restore an engine; any number of ranks may have saved it. Raises CheckpointError if there are no shards."""
    if not source.is_dir():
        raise CheckpointError(
            f"{source} is missing: the run that saved it trained no such model; resume from another one"
        )
    state = engine.state_dict()
    dcp.load(state, checkpoint_id=source, process_group=group)
    engine.load_state_dict(state)


def own_shards(work: Path, part: str, rank: int) -> Iterator[str]:
    """Yield the files that a rank wrote in `work / part`, relative to `work`."""
    for path in (work / part).glob(f"__{rank}_*"):
        yield f"{part}/{path.name}"


@dataclass(frozen=True)
class ExportShare:
    """Which part of an export a process writes, and when it gives up: `stop` is asked before each piece."""

    rank: int = 0
    num_ranks: int = 1
    stop: Callable[[], bool] = lambda: False


WHOLE = ExportShare()


class _ShardFiles(dcp.FileSystemWriter):
    """Raises the system's own error, e.g. a full disk; torch hides it behind one about the half-written file."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


@dataclass(frozen=True)
class BoxPart:
    box: Box  # Its place in the whole tensor
    values: Tensor  # Of the box's shape
    replica: bool = False  # Another rank saves the same elements; this one only reads them


class BoxedTensor(Tensor):
    """A tensor of which this rank holds any number of boxes, for torch.distributed.checkpoint.

    DTensor supports only regular cuts. Megatron's distributed optimizer gives a rank a run of a flattened parameter,
    which itself is part of one or three Hugging Face tensors: a few boxes of each, all of one dtype and device.

        whole [8, 4], this rank holds elements 6 .. 21:      [1:2, 2:4]  [2:5, 0:4]  [5:6, 0:2]

    It has the whole tensor's shape but no memory of its own, so nothing can be computed with it.
    """

    parts: tuple[BoxPart, ...]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], parts: Sequence[BoxPart]) -> "BoxedTensor":
        first = parts[0].values
        tensor: BoxedTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=first.dtype, device=first.device, requires_grad=False
        )
        tensor.parts = tuple(parts)
        return tensor

    def __init__(self, shape: tuple[int, ...], parts: Sequence[BoxPart]) -> None:
        """`__new__` has set everything."""

    def map_parts(self, copy: Callable[[int, Tensor], Tensor]) -> "BoxedTensor":
        """Return the same boxes with the values that `copy` returns for (number of the part, its values)."""
        parts = [BoxPart(part.box, copy(k, part.values), part.replica) for k, part in enumerate(self.parts)]
        return BoxedTensor(tuple(self.shape), parts)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub takes it for a plain function
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        raise AssertionError(f"{function} of a BoxedTensor; compute with its parts")

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        """Return what this rank saves; called by torch."""
        return [self._write_item(name, part) for part in self.parts if not part.replica]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return what this rank reads; called by torch."""
        return [_chunk(part.box) for part in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(part.values for part in self.parts if index.offset == torch.Size(part.box.offset))

    def _write_item(self, name: str, part: BoxPart) -> WriteItem:
        data = TensorWriteData(
            chunk=_chunk(part.box), properties=TensorProperties.create_from_tensor(part.values), size=self.size()
        )
        return WriteItem(MetadataIndex(name, torch.Size(part.box.offset)), WriteItemType.SHARD, tensor_data=data)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.size))


class HostCopy:
    """A copy of an engine's state in host memory, made in parallel with the computation; its memory is reused for the
    next.

        begin(state) ---- copies run: the state may be read, not changed ---- wait() ---- the copy is written ...
                          forward and backward of the next step continue     before the update

    There is one such copy per rank, which bounds the host memory that saving needs; on an accelerator it is
    page-locked. Used by one thread; another may read the copy until the next one begins.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type != "cpu"
        self._stream = CopyStream(device)
        self._buffers: dict[str, Tensor] = {}
        self._chunks: list[tuple[Tensor, int]] = []  # page-locked memory behind the buffers, and the bytes used of each
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}
        self._done: CopiesDone | None = None

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def begin(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state (nested dicts and lists of tensors, DTensors and plain values), complete once `wait`
        returned. With DTensors on an accelerator, the first call is collective over their meshes."""
        self.wait()
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        copied: dict[str, Any] = self._mirror_value(state, "", pairs)
        self._buffers = {path: target for path, (target, _) in pairs.items()}  # free what left the state
        targets, sources = [target for target, _ in pairs.values()], [source for _, source in pairs.values()]

        def run() -> None:
            if targets:
                with torch.no_grad():
                    torch._foreach_copy_(targets, sources, non_blocking=True)

        (self._done,) = self._stream.start_copies([run])
        return copied

    def wait(self) -> None:
        """Wait until the copy is complete and the state may change."""
        if self._done is not None:
            self._done.wait()

    def close(self) -> None:
        self._stream.close()

    def _mirror_value(self, value: Any, path: str, pairs: dict[str, tuple[Tensor, Tensor]]) -> Any:
        if isinstance(value, dict):
            return {name: self._mirror_value(one, f"{path}/{name}", pairs) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._mirror_value(one, f"{path}/{k}", pairs) for k, one in enumerate(value))
        if isinstance(value, DTensor):
            local = self._mirror_value(value.to_local(), path, pairs)
            mesh = self._host_mesh(value.device_mesh)
            shape, stride = value.shape, value.stride()
            return DTensor.from_local(local, mesh, value.placements, run_check=False, shape=shape, stride=stride)
        if isinstance(value, BoxedTensor):
            return value.map_parts(lambda k, part: self._mirror_value(part, f"{path}/{k}", pairs))
        if isinstance(value, Tensor):
            source = value.detach()
            pairs[path] = (self._find_buffer(path, source), source)
            return pairs[path][0]
        return copy.deepcopy(value)

    def _find_buffer(self, path: str, source: Tensor) -> Tensor:
        known = self._buffers.get(path)
        if known is not None and known.shape == source.shape and known.dtype == source.dtype:
            return known
        if not self._pinned:
            return torch.empty(source.shape, dtype=source.dtype)
        return self._allocate_pinned(source.nbytes).view(source.dtype).view(source.shape)

    def _allocate_pinned(self, num_bytes: int) -> Tensor:
        fitting = (k for k, (chunk, used) in enumerate(self._chunks) if used + num_bytes <= chunk.numel())
        number = next(fitting, len(self._chunks))
        if number == len(self._chunks):
            # PyTorch rounds each page-locked allocation up to a power of two. Sharing chunks of such sizes avoids
            # losing up to half the memory.
            size = max(_CHUNK_BYTES, 1 << max(0, num_bytes - 1).bit_length())
            self._chunks.append((torch.empty(size, dtype=torch.uint8, pin_memory=True), 0))
        chunk, used = self._chunks[number]
        self._chunks[number] = chunk, used + -(-num_bytes // _ALIGNED) * _ALIGNED
        return chunk[used : used + num_bytes]

    def _host_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        if mesh.device_type == "cpu":
            return mesh
        # A DTensor's local part is where its mesh says, so the copy needs a CPU mesh of the same ranks.
        if mesh not in self._meshes:
            self._meshes[mesh] = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
        return self._meshes[mesh]
