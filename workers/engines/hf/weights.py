"""Weights in files: safetensors of a Hugging Face directory, read and written piece by piece.

A trainer rank reads only its own rows; writing never keeps more than one file's tensors in memory.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from asyncflow.errors import ConfigError
from workers.data.model_files import (
    FLOATS,
    INDEX_FILE,
    POLICY_KEY,
    WEIGHTS_FILE,
    few_of,
    quantized,
    same_values,
    stored_tensors,
    untied,
)
from workers.engines.base import LocalShard

NO_ALIASES: Mapping[str, Iterable[str]] = {}
FILE_BYTES = 4 * 2**30  # at which a new file of weights begins, counting 4 bytes per element
WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx"})


class HfWeights:
    """The weights of the model in one directory (`stored_tensors`); files are opened when they are read.

    Args:
        model_dir: Hugging Face directory, or one with the weights alone.
        key: the setting that names it; begins messages.
    Raises:
        ConfigError: see `stored_tensors`.
    """

    def __init__(self, model_dir: Path, *, key: str = POLICY_KEY) -> None:
        self._stored = stored_tensors(model_dir, key=key)
        self._opened: dict[Path, Any] = {}
        self._model_dir = model_dir
        self._key = key

    @property
    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def find_name(self, name: str, aliases: Iterable[str] = ()) -> str:
        """Return the first of the names that is in the files. Raises ConfigError if none is."""
        for candidate in (name, *aliases):
            if candidate in self._stored:
                return candidate
        raise ConfigError(f"{self._key}: {self._model_dir} lacks the weight {name} that its config.json asks for")

    def check_used(
        self,
        names: Mapping[str, Iterable[str]],
        *,
        model: str,
        unused: Iterable[str] = (),
        ignored: re.Pattern[str] | None = None,
    ) -> None:
        """Refuse files with tensors that the model would not use.

        Args:
            names: of all the model's weights, each with its aliases.
            model: what messages call it.
            unused: names to tolerate although no weight has them.
            ignored: pattern for further such names.
        Raises:
            ConfigError: a weight is quantized, a tied weight has two values, or no weight has a tensor's name.
        """
        for name, aliases in names.items():
            first, *others = [each for each in (name, *aliases) if each in self._stored] or [""]
            if first and self._stored[first].dtype not in FLOATS:
                why = f"has elements of type {self._stored[first].dtype}"
                raise quantized(self._model_dir, first, why, key=self._key)
            for other in others:
                if not same_values(self._stored[first], self._stored[other]):
                    raise untied(self._model_dir, first, other, key=self._key)
        known = {*names, *unused, *(alias for aliases in names.values() for alias in aliases)}
        left = [name for name in self.names if name not in known and not (ignored and ignored.search(name))]
        if left:
            raise ConfigError(
                f"{self._key}: {self._model_dir} holds {few_of(left)}, for which {model} has no weight, so it would be "
                f"dropped; use the config.json that belongs to the weights, or remove what is not the model's"
            )

    def read_rows(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of a weight, in the file's element type.
        Raises ConfigError if the weight's shape is not `shape`."""
        piece = self._open_slice(name)
        if tuple(piece.get_shape()) != shape:
            raise ConfigError(
                f"{self._key}: weight {name} in {self._model_dir} has shape {tuple(piece.get_shape())}, "
                f"but config.json asks for {shape}"
            )
        rows: Tensor = piece[start:stop] if shape else piece[...]
        return rows

    def fill(self, shards: Iterable[LocalShard], aliases: Mapping[str, Iterable[str]] = NO_ALIASES) -> None:
        """Read the values of shards, only their rows; errors as in `find_name` and `read_rows`."""
        for shard in shards:
            rows, *columns = shard.box.slices or (slice(0, 1),)
            name = self.find_name(shard.name, aliases.get(shard.name, ()))
            values = self.read_rows(name, shard.shape, rows.start, rows.stop)
            part = values[(slice(None), *columns)] if columns else values
            shard.values.copy_(part.reshape(shard.values.shape))

    def read_whole(self, name: str) -> Tensor:
        """Return a tensor, whatever its shape."""
        values: Tensor = self._open_slice(name)[...]
        return values

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = self._open_slice(name)[:0].dtype
        return dtype

    def _open_slice(self, name: str) -> Any:
        path = self._stored[name].file
        if path not in self._opened:
            self._opened[path] = safe_open(path, framework="pt")
        return self._opened[path].get_slice(name)


def write_weights(
    target: Path,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    *,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write weights as safetensors files of about `file_bytes` at most, with an index if there are several.

    Args:
        target: existing directory.
        shapes: of every weight, in the order of writing.
        read: called once per name, in that order; returns the contiguous CPU tensor to store.
        file_bytes: size at which a new file begins, counting 4 bytes per element.
    """
    weight_map: dict[str, str] = {}
    total_bytes = 0
    files = divide_into_files(shapes, file_bytes)
    for file, names in files.items():
        tensors = {name: read(name) for name in names}
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, target / file, metadata={"format": "pt"})
        (target / file).chmod(_readable(target))  # safetensors makes it readable by its owner only
        weight_map.update(dict.fromkeys(names, file))
    if len(files) > 1:
        write_index(target, weight_map, total_bytes)


def divide_into_files(shapes: Mapping[str, tuple[int, ...]], file_bytes: int) -> dict[str, list[str]]:
    """Return file -> names of its weights; see `write_weights`."""
    groups: list[list[str]] = [[]]
    size_bytes = 0
    for name, shape in shapes.items():
        weight_bytes = 4 * int(torch.Size(shape).numel())
        if groups[-1] and size_bytes + weight_bytes > file_bytes:
            groups.append([])
            size_bytes = 0
        groups[-1].append(name)
        size_bytes += weight_bytes
    if len(groups) == 1:
        return {WEIGHTS_FILE: groups[0]}
    return {f"model-{k:05}-of-{len(groups):05}.safetensors": names for k, names in enumerate(groups, start=1)}


def write_index(target: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Write the file that says which file has which weight."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (target / INDEX_FILE).write_text(json.dumps(index, indent=2))


def _readable(directory: Path) -> int:
    """Return a file mode with the directory's read permissions."""
    mode = directory.stat().st_mode
    return 0o600 | (0o040 if mode & 0o050 == 0o050 else 0) | (0o004 if mode & 0o005 == 0o005 else 0)


def copy_without_weights(source: Path, target: Path) -> None:
    """Copy config.json, generation_config.json, tokenizer and template files, creating `target`."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        # Adapter settings stay behind with the adapter's weights: with them the copy would be loaded as an adapter.
        is_of_weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith((".index.json", "adapter_config.json"))
        if path.is_file() and not is_of_weights:
            shutil.copyfile(path, target / path.name)
