"""A snapshot of a queue on disk: one directory, files of every unit, a manifest that makes them a snapshot.

    DIRECTORY/storage-0-0000-CHECKSUM.safetensors ...    written by the units (`tq.unit.snapshots`)
    DIRECTORY/queue.json                                 written last, by the client that took the snapshot

A file is safetensors: per chunk k of rows `k/values/COLUMN` (as narrow as they were stored) and, where rows differ in
shape, `k/shapes/COLUMN` (int32 [N, R]). Its metadata holds the rest as JSON (`ChunkRecord`). The name ends with the
file's checksum, so that the manifest needs no second pass over the data.

Rows come back as chunks that any number of units can take. Values are bit for bit those that were put.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncflow.decoding import json_decoder
from asyncflow.errors import CheckpointError, TransportError
from asyncflow.json_lines import sync
from asyncflow.transport.frame import Payload, PayloadPiece
from tq.columns import Column
from tq.wire import ColumnHeader, unpack

MANIFEST = "queue.json"
METADATA_KEY = "chunks"
_FORMAT = 1
_READ_BYTES = 2**24
_DAMAGED = (OSError, KeyError, SafetensorError, msgspec.DecodeError, TransportError)


class SnapshotFile(msgspec.Struct, frozen=True):
    name: str
    num_bytes: int
    xxh3: str


class Manifest(msgspec.Struct, frozen=True):
    """What a snapshot consists of; `outputs`: task -> columns that it was seen to write."""

    format: int
    num_rows: int
    files: list[SnapshotFile]
    outputs: dict[str, list[str]] = {}


class ChunkRecord(msgspec.Struct):
    """Rows that can be put again with one `PutRows`, as its metadata; `columns` describes the tensors."""

    partition: int
    group_size: int
    rows: list[int]
    groups: list[int]
    columns: list[ColumnHeader]
    commits: dict[str, list[int]]


@dataclass(frozen=True)
class SnapshotChunk:
    """Rows of a snapshot that can be put with one `PutRows`; a group may have rows in other chunks."""

    partition: int
    group_size: int
    # `rows`, `groups`: parallel.
    rows: list[int]
    groups: list[int]
    columns: Mapping[str, Column]
    commits: dict[str, list[int]]  # task -> positions in `rows`


@dataclass(frozen=True)
class ChunkPlace:
    """Where a chunk is: its file, its number in it, and what it holds."""

    path: Path
    number: int
    record: ChunkRecord

    def read(self, names: Collection[str] | None = None) -> SnapshotChunk:
        """Read the values of some columns (None: of all); raises CheckpointError."""
        record = self.record
        headers = [header for header in record.columns if names is None or header.name in names]
        try:
            with safe_open(self.path, framework="pt") as file:
                keys = set(file.keys())
                wanted = [f"{self.number}/{part}/{header.name}" for header in headers for part in ("values", "shapes")]
                tensors = {name: file.get_tensor(name) for name in wanted if name in keys}
            columns = unpack(headers, _chunk_payload(headers, tensors, self.number))
        except _DAMAGED as error:
            raise _unreadable(self.path, error) from error
        return SnapshotChunk(record.partition, record.group_size, record.rows, record.groups, columns, record.commits)


def write_manifest(
    directory: Path, files: Sequence[str], *, num_rows: int, outputs: Mapping[str, list[str]] | None = None
) -> Path:
    """Make the files a snapshot, atomically, once all units have written theirs (`SnapshotWritten.files`).

    Raises:
        CheckpointError: a file is missing, or the manifest cannot be written.
    """
    try:
        entries = [SnapshotFile(name, (directory / name).stat().st_size, _checksum_in(name)) for name in sorted(files)]
        data = msgspec.json.encode(Manifest(_FORMAT, num_rows, entries, dict(outputs or {})))
        part = directory / f"{MANIFEST}.part"
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # The data is on disk before the name: a crash leaves a complete manifest or none.
        part.replace(directory / MANIFEST)
        sync(directory)
    except OSError as error:
        raise CheckpointError(f"queue snapshot in {directory}: cannot be completed: {error}") from error
    return directory / MANIFEST


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest after verifying every file; raises CheckpointError if one is missing or was changed."""
    manifest = _manifest(directory)
    for entry in manifest.files:
        _verify(directory / entry.name, entry)
    return manifest


def _manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    try:
        manifest = json_decoder(Manifest).decode(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"queue snapshot: {path} does not exist; the snapshot was never completed") from error
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"queue snapshot: {path} cannot be read: {error}") from error
    if manifest.format != _FORMAT:
        raise CheckpointError(f"queue snapshot: {path} has format {manifest.format}, not {_FORMAT}")
    for entry in manifest.files:
        if Path(entry.name).name != entry.name:
            raise CheckpointError(f"queue snapshot: {path} names {entry.name!r}, which is outside of the snapshot")
    return manifest


def chunk_places(directory: Path) -> Iterator[ChunkPlace]:
    """Return where the chunks are, without reading values; raises CheckpointError for a malformed file."""
    for entry in _manifest(directory).files:
        path = directory / entry.name
        try:
            with safe_open(path, framework="pt") as file:
                records = json_decoder(list[ChunkRecord]).decode(file.metadata()[METADATA_KEY])
        except _DAMAGED as error:
            raise _unreadable(path, error) from error
        for number, record in enumerate(records):
            yield ChunkPlace(path, number, record)


def read_snapshot(directory: Path) -> Iterator[SnapshotChunk]:
    """Return the rows, chunk by chunk; everything is verified before the first one. Raises CheckpointError."""
    read_manifest(directory)
    for place in chunk_places(directory):
        yield place.read()


def last_rows(directory: Path) -> list[int]:
    """Return the largest row of every chunk, without reading values."""
    return [max(place.record.rows) for place in chunk_places(directory) if place.record.rows]


def checksum(path: Path) -> str:
    """Return the xxh3-64 of a file as 16 hex digits."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return str(digest.hexdigest())


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"queue snapshot: {path} cannot be read: {error}")


def _chunk_payload(headers: Sequence[ColumnHeader], tensors: dict[str, Tensor], number: int) -> Tensor:
    """Return a chunk's columns as the payload that its headers describe."""
    pieces = []
    for header in headers:
        values = tensors[f"{number}/values/{header.name}"]
        pieces.append(PayloadPiece((values,), values.dtype))
        shapes = tensors.get(f"{number}/shapes/{header.name}")
        if shapes is not None:
            pieces.append(PayloadPiece((shapes,), torch.int32))
    payload = Payload(pieces)
    out = torch.empty(payload.num_bytes, dtype=torch.uint8)
    payload.write(out)
    return out


def _verify(path: Path, entry: SnapshotFile) -> None:
    try:
        num_bytes = path.stat().st_size
        found = checksum(path) if num_bytes == entry.num_bytes else ""
    except OSError as error:
        raise CheckpointError(f"queue snapshot: {path} is missing or cannot be read: {error}") from error
    if num_bytes != entry.num_bytes:
        raise CheckpointError(f"queue snapshot: {path} has {num_bytes} bytes, not {entry.num_bytes}; use another one")
    if found != entry.xxh3:
        raise CheckpointError(
            f"queue snapshot: {path} was changed (checksum {found}, not {entry.xxh3}); use another one"
        )


def _checksum_in(name: str) -> str:
    return name.removesuffix(".safetensors").rpartition("-")[2]
