"""The export of a saved state in Hugging Face's layout, read from the shards on disk by any number of processes.

    dcp/__0_0.distcp   rows 0 .. 9 of w     --rank 0-->   model-00001-of-00002.safetensors, bytes 4096 .. 8191
    dcp/__1_0.distcp   rows 10 .. 19        --rank 1-->   "                                 bytes 8192 .. 12287

All processes compute the same layout from names, shapes and element types, so each writes at its own offsets: the rows
that it saved itself, and its share of the weights whose columns were divided, which one process gathers from all
shards. There is no collective here: a rank that fails or is stopped keeps nobody waiting. The caller makes the result
visible once every rank has written its share (`workers.checkpoint.writer`, `asyncflow export`). Needs no device and no
process group; at most one shard of a weight, or one gathered weight, is in memory.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from asyncflow.errors import CheckpointError
from asyncflow.json_lines import sync
from weightsync.plan import Box
from workers.checkpoint.saved_shards import WHOLE, BoxedTensor, BoxPart, ExportShare
from workers.engines.hf.weights import FILE_BYTES, HfWeights, copy_without_weights, divide_into_files, write_index
from workers.engines.lora import PREFIX, A, B, adapter_shapes, adapter_targets, merge, write_adapter
from workers.settings.lora import LoraConfig

# safetensors' names of element types, and its order of the tensors in a file: wide ones first, then by name.
_DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_WIDEST_FIRST = tuple(_DTYPE_NAMES)
_MODEL = "model."  # of the weights in a saved state
_WRITTEN_BY = re.compile(r"__(\d+)_")  # a shard file's rank, as torch.distributed.checkpoint names it


class SavedTensors:
    """Reads a saved state piece by piece in a single process, so that exports can run while the ranks train on.

    `saved` is a directory written by torch.distributed.checkpoint.
    """

    def __init__(self, saved: Path) -> None:
        self._reader = dcp.FileSystemReader(saved)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def shapes_below(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors below a dotted path, keyed by the rest of their path, sorted."""
        entries = sorted(self._metadata.state_dict_metadata.items())
        return {
            name.removeprefix(prefix): tuple(entry.size)
            for name, entry in entries
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }

    def shards_of(self, name: str) -> Iterator[tuple[int, Box]]:
        """Yield the parts of a tensor as they were saved: the rank that wrote each, and its place."""
        for chunk in self._entry(name).chunks:
            stored = self._metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            writer = _WRITTEN_BY.match(stored.relative_path)
            yield int(writer[1]) if writer else 0, Box(tuple(chunk.offsets), tuple(chunk.sizes))

    def read(self, name: str) -> Tensor:
        """Return a tensor by its dotted path in the state."""
        shape = tuple(self._entry(name).size)
        return self.read_box(name, Box.from_shape(shape))

    def read_box(self, name: str, box: Box) -> Tensor:
        """Return a part of a tensor, of the box's shape."""
        entry = self._entry(name)
        values = torch.empty(box.size, dtype=entry.properties.dtype)
        target = BoxedTensor(tuple(entry.size), [BoxPart(box, values)])
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner({name: target}, self._metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        (plan,) = self._reader.prepare_global_plan(planner.create_global_plan([plan]))
        self._reader.read_data(planner.finish_plan(plan), planner).wait()
        return values

    def _entry(self, name: str) -> TensorStorageMetadata:
        entry = self._metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata), f"{name} is not a tensor"
        return entry


def export_saved(
    saved: Path,
    target: Path,
    model_dir: Path,
    names: Mapping[str, Iterable[str]],
    share: ExportShare = WHOLE,
    *,
    file_bytes: int = FILE_BYTES,
) -> bool:
    """Write a share of a saved state as a Hugging Face directory, in the element types of the files in `model_dir`,
    whose other files are copied. The bytes are the same for any number of ranks.

    Args:
        saved: written by torch.distributed.checkpoint, with the weights below `model.`.
        target: created if missing; holds files of the full size, with gaps, until all ranks have returned.
        names: of the weights, in the order of writing, each with the names that files in `model_dir` may use for it.
        file_bytes: see `write_weights`.
    Returns:
        Whether this share is complete and durable; False: `share.stop` said so.
    Raises:
        CheckpointError: the state lacks a weight. ConfigError: `model_dir` does. OSError: the file system refuses.
    """
    return _write_model(SavedTensors(saved), saved, target, model_dir, names, share, file_bytes=file_bytes)


ADAPTER = "adapter"  # directory in an export: the adapter in peft's form


def export_adapted(
    saved: Path,
    target: Path,
    model_dir: Path,
    names: Mapping[str, Iterable[str]],
    lora: LoraConfig,
    share: ExportShare = WHOLE,
) -> bool:
    """Write a share of a saved adapter: the model with the adapter merged into it, like `export_saved`, and in
    `adapter/` the adapter itself, which rank 0 writes whole, float32."""
    tensors = MergedTensors(SavedTensors(saved), HfWeights(model_dir), names, lora)
    if not _write_model(tensors, saved, target, model_dir, names, share, file_bytes=FILE_BYTES):
        return False
    if share.rank == 0:
        write_adapter(target / ADAPTER, tensors.adapter(), lora, tensors.targets, base=str(model_dir))
        for path in (target / ADAPTER).iterdir():
            sync(path)
    return True


class MergedTensors:
    """Reads the model that a base and a saved adapter make together, weight by weight; like `SavedTensors`.

    Args:
        names: of the base's weights, each with the names that its files may use.
    Raises:
        CheckpointError: the state lacks a part of the adapter.
    """

    def __init__(
        self, saved: SavedTensors, base: HfWeights, names: Mapping[str, Iterable[str]], lora: LoraConfig
    ) -> None:
        self._saved, self._base, self._names, self._lora = saved, base, names, lora
        self._shapes = {name: base.shape(base.find_name(name, aliases)) for name, aliases in names.items()}
        self._numbers = {name: number for number, name in enumerate(names)}
        self._held = saved.shapes_below(_MODEL)
        self.targets = adapter_targets(self._shapes, lora)
        for name, shape in adapter_shapes(self.targets, lora.rank).items():
            if self._held.get(name.removeprefix(PREFIX)) != shape:
                raise CheckpointError(f"the saved state has no {name} of shape {shape}, which lora asks for")

    def shapes_below(self, prefix: str) -> dict[str, tuple[int, ...]]:
        assert prefix == _MODEL
        return self._shapes

    def shards_of(self, name: str) -> Iterator[tuple[int, Box]]:
        """Yield the whole weight, in turn for every rank: the base's files are there for all of them."""
        path = name.removeprefix(_MODEL)
        yield self._numbers[path], Box.from_shape(self._shapes[path])

    def read_box(self, name: str, box: Box) -> Tensor:
        path = name.removeprefix(_MODEL)
        if path in self._held:  # trained whole
            return self._saved.read_box(name, box)
        weight = self._base.read_whole(self._base.find_name(path, self._names[path]))[box.slices]
        module = path.removesuffix(".weight")
        if module not in self.targets:
            return weight
        a, b = (self._saved.read(f"{_MODEL}{module}{end}") for end in (A, B))
        return merge(weight, a[:, box.slices[1]], b[box.slices[0]], self._lora.scaling)

    def adapter(self) -> dict[str, Tensor]:
        """Return what peft's file holds, by its names; besides the adapter, weights that were trained whole."""
        return {PREFIX + name: self._saved.read(_MODEL + name).contiguous() for name in self._held}


def _write_model(
    tensors: SavedTensors | MergedTensors,
    saved: Path,
    target: Path,
    model_dir: Path,
    names: Mapping[str, Iterable[str]],
    share: ExportShare,
    *,
    file_bytes: int,
) -> bool:
    source = HfWeights(model_dir)
    saved_shapes = tensors.shapes_below(_MODEL)
    if lacking := [name for name in names if name not in saved_shapes]:
        raise CheckpointError(f"{saved} lacks the weight {lacking[0]}, which the model in {model_dir} has")
    dtypes = {name: source.dtype(source.find_name(name, aliases)) for name, aliases in names.items()}
    shapes = {name: saved_shapes[name] for name in names}
    files = divide_into_files(shapes, file_bytes)
    target.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total_bytes = gathered = 0
    for file, held in files.items():
        layout = _FileLayout.of({name: (shapes[name], dtypes[name]) for name in held})
        with _SharedFile(target / file) as out:
            if share.rank == 0:
                out.write_at(0, layout.header)
            for name, start in layout.starts.items():
                dtype = dtypes[name]
                shards = list(tensors.shards_of(_MODEL + name))
                if not all(_is_run(box, shapes[name]) for _, box in shards):
                    # Columns were divided: one rank gathers the weight, in turn.
                    shards = [(gathered, Box.from_shape(shapes[name]))]
                    gathered += 1
                for writer, box in shards:
                    if writer % share.num_ranks != share.rank or not box.numel:
                        continue
                    if share.stop():
                        return False
                    values = tensors.read_box(_MODEL + name, box).to(dtype).contiguous()
                    first = start + _first_element(box, shapes[name]) * dtype.itemsize
                    out.write_at(first, values.reshape(-1).view(torch.uint8).numpy().data)
        weight_map |= dict.fromkeys(held, file)
        total_bytes += layout.num_bytes
    if share.rank == 0:
        copy_without_weights(model_dir, target)
        if len(files) > 1:
            write_index(target, weight_map, total_bytes)
    return True


class _FileLayout(NamedTuple):
    """Where the bytes of a safetensors file are; the same as `safetensors.torch.save_file` makes."""

    header: bytes
    starts: dict[str, int]  # name -> its first byte in the file
    num_bytes: int  # of the tensors

    @staticmethod
    def of(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> "_FileLayout":
        ordered = sorted(tensors, key=lambda name: (_WIDEST_FIRST.index(tensors[name][1]), name))
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts: dict[str, int] = {}
        end = 0
        for name in ordered:
            shape, dtype = tensors[name]
            starts[name] = end
            end += int(torch.Size(shape).numel()) * dtype.itemsize
            entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [starts[name], end]}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        return _FileLayout(header, {name: len(header) + start for name, start in starts.items()}, end)


class _SharedFile:
    """A file that several processes write at once, each its own bytes; durable on leaving the block without error."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)

    def __enter__(self) -> "_SharedFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:  # a call writes 2 GiB at most
            written = os.pwrite(self._descriptor, left, offset)
            left, offset = left[written:], offset + written


def _is_run(box: Box, shape: tuple[int, ...]) -> bool:
    """Return whether a box's elements follow each other in the whole tensor."""
    whole_from = len(shape)
    while whole_from and box.size[whole_from - 1] == shape[whole_from - 1]:
        whole_from -= 1
    return all(size == 1 for size in box.size[: max(0, whole_from - 1)])


def _first_element(box: Box, shape: tuple[int, ...]) -> int:
    index = 0
    for offset, size in zip(box.offset, shape, strict=True):
        index = index * size + offset
    return index
