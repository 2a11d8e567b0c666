"""A snapshot of a queue on disk: one directory, files of every unit, a manifest that makes them a snapshot.

    DIRECTORY/storage-0-0000-CHECKSUM.safetensors ...    written by the units (`snapshot_files`)
    DIRECTORY/queue.json                                 written last, by the client that took the snapshot

Rows come back as chunks that any number of units can take. Values are the very bits that were put.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open

from asyncflow.errors import CheckpointError, TransportError
from tq.batch import Column
from tq.unit.snapshot_files import METADATA_KEY, ChunkRecord, checksum, chunk_payload
from tq.wire import unpack

MANIFEST = "queue.json"
_FORMAT = 1


class FileEntry(msgspec.Struct, frozen=True):
    """A file as it must be; `xxh3` is its checksum."""

    name: str
    num_bytes: int
    xxh3: str


class Manifest(msgspec.Struct, frozen=True):
    """What a snapshot consists of."""

    format: int
    num_rows: int
    files: list[FileEntry]


@dataclass(frozen=True)
class SnapshotChunk:
    """Rows of a snapshot that can be put with one `PutRows`.

    Attributes:
        partition, group_size: of all of them; a group may have rows in other chunks.
        rows, groups: parallel.
        columns: name -> values.
        commits: task -> positions in `rows`.
    """

    partition: int
    group_size: int
    rows: list[int]
    groups: list[int]
    columns: Mapping[str, Column]
    commits: dict[str, list[int]]


def write_manifest(directory: Path, files: Sequence[str], *, num_rows: int) -> Path:
    """Make the files a snapshot, atomically; call it when all units have written theirs.

    Args:
        directory: of the snapshot.
        files: `SnapshotWritten.files` of all units.
        num_rows: over all units.

    Raises:
        CheckpointError: a file is missing, or the manifest cannot be written.
    """
    try:
        entries = [FileEntry(name, (directory / name).stat().st_size, _checksum_in(name)) for name in sorted(files)]
        data = msgspec.json.encode(Manifest(_FORMAT, num_rows, entries))
        part = directory / f"{MANIFEST}.part"
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(directory / MANIFEST)
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"queue snapshot in {directory}: cannot be completed: {error}") from error
    return directory / MANIFEST


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest once every file has been found to be what it says.

    Raises:
        CheckpointError: a file is missing or was changed, or there is no manifest that can be read.
    """
    path = directory / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError as error:
        raise CheckpointError(f"queue snapshot: {path} does not exist; the snapshot was never completed") from error
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"queue snapshot: {path} cannot be read: {error}") from error
    if manifest.format != _FORMAT:
        raise CheckpointError(f"queue snapshot: {path} has format {manifest.format}, not {_FORMAT}")
    for entry in manifest.files:
        if Path(entry.name).name != entry.name:
            raise CheckpointError(f"queue snapshot: {path} names {entry.name!r}, which is outside of the snapshot")
        _verify(directory / entry.name, entry)
    return manifest


def read_snapshot(directory: Path) -> Iterator[SnapshotChunk]:
    """Return the rows, chunk by chunk; everything is verified before the first one comes.

    Raises:
        CheckpointError: see `read_manifest`, or a file does not hold what a unit writes.
    """
    manifest = read_manifest(directory)
    for entry in manifest.files:
        yield from _read_file(directory / entry.name)


def _read_file(path: Path) -> Iterator[SnapshotChunk]:
    try:
        with safe_open(path, framework="pt") as file:
            records = msgspec.json.decode(file.metadata()[METADATA_KEY], type=list[ChunkRecord])
            keys = set(file.keys())
            for number, record in enumerate(records):
                names = [f"{number}/{part}/{header.name}" for header in record.columns for part in ("values", "shapes")]
                tensors = {name: file.get_tensor(name) for name in names if name in keys}
                columns = unpack(record.columns, chunk_payload(record, tensors, number))
                yield SnapshotChunk(
                    record.partition, record.group_size, record.rows, record.groups, columns, record.commits
                )
    except (OSError, KeyError, SafetensorError, msgspec.DecodeError, TransportError) as error:
        raise CheckpointError(f"queue snapshot: {path} cannot be read: {error}") from error


def _verify(path: Path, entry: FileEntry) -> None:
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
