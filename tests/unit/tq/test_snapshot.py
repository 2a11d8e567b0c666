"""Snapshot files: every bit comes back, memory is bounded, a damaged snapshot is refused before anything is read."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from asyncflow.errors import CheckpointError, TransportError
from tq import Column
from tq.backends.backend import MemoryBackend
from tq.snapshot import MANIFEST, SnapshotChunk, read_manifest, read_snapshot, write_manifest
from tq.unit import snapshots
from tq.unit.block import BlockStore
from tq.unit.snapshots import SnapshotWriter
from tq.unit.unit_state import Cut, UnitState
from tq.wire import describe

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


class Unit:
    """Rows of one unit, and its snapshots."""

    def __init__(self, name: str = "storage-0") -> None:
        self.name = name
        self.store = BlockStore(MemoryBackend(), None, prefix=name, token_columns=())
        self.state = UnitState()

    def put(self, rows: Sequence[int], columns: dict[str, Column], *, partition: int = 1, group_size: int = 0) -> None:
        headers, payload = describe(columns, narrow=True)
        data = torch.zeros(payload.num_bytes, dtype=torch.uint8)
        payload.write(data)
        block = self.store.add_block(rows, headers, data)
        self.state.create_rows(
            rows, block, partition=partition, groups=[row // 2 for row in rows], group_size=group_size
        )
        self.state.confirm(rows)

    def cut(self) -> Cut:
        return self.state.cut_rows(after_partition=-1, forget_acks_of=())

    def write(self, directory: Path, *, chunk_bytes: int = 2**26) -> list[str]:
        writer = SnapshotWriter(directory, self.name, self.store, chunk_bytes=chunk_bytes)
        return writer.write(self.cut().rows, threading.Event())[0]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def restored(directory: Path) -> dict[int, dict[str, Column]]:
    """Return row -> one-row columns."""
    rows = {}
    for chunk in read_snapshot(directory):
        for k, row in enumerate(chunk.rows):
            assert row not in rows
            rows[row] = {name: column.select([k]) for name, column in chunk.columns.items()}
    return rows


def test_every_kind_of_column_comes_back_bit_by_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 2**8, (64 * 8,), generator=generator, dtype=torch.uint8)
    columns = {str(dtype): Column(raw.view(dtype)[:9], torch.tensor([4, 0, 5])) for dtype in INTEGERS + FLOATS}
    columns |= {
        "torch.bool": Column.of_rows([torch.tensor([True, False]), torch.tensor([False]), torch.tensor([True])]),
        "narrow": Column.of_rows([torch.tensor([2**15, 2**16 - 1]), torch.tensor([0]), torch.tensor([7])]),
        "scalars": Column.of_scalars(torch.tensor([float("nan"), float("-inf"), -0.0])),
        "images": Column.of_rows([torch.randn(2, 3), torch.randn(0, 3), torch.randn(1, 2)]),
        "a/shapes": Column.of_dense(torch.randn(3, 2, 2)),
        "texts": Column.of_texts(["", "ä", "b"]),
        "bytes": Column.of_bytes([b"\0", b"", b"\xff"]),
        "json": Column.of_values([{"a": 1}, None, [1.5]]),
        "empty": Column.of_texts(["", "", ""]),
    }
    unit = Unit()
    unit.put([4, 9, 5], columns)
    write_manifest(tmp_path, unit.write(tmp_path), num_rows=3)
    rows = restored(tmp_path)
    assert sorted(rows) == [4, 5, 9]
    for k, row in enumerate([4, 9, 5]):
        for name, column in columns.items():
            expected, found = column.select([k]), rows[row][name]
            assert (found.kind, found.rank, found.values.dtype) == (expected.kind, expected.rank, expected.values.dtype)
            assert [one.shape for one in found.rows()] == [one.shape for one in expected.rows()], name
            assert bits(found.values) == bits(expected.values), name


def test_rows_of_several_units_and_puts_come_back_as_alike_chunks(tmp_path: Path) -> None:
    first, second = Unit("storage-0"), Unit("storage-1")
    first.put([0, 1], {"x": Column.of_scalars(torch.tensor([0, 1]))}, group_size=4)
    first.put([2], {"x": Column.of_scalars(torch.tensor([200]))}, group_size=4)
    first.put([6], {"x": Column.of_scalars(torch.tensor([6.0]))}, group_size=4)
    first.put([3], {}, partition=2)
    first.state.learn_commits({"ref": [1], "train": [1, 2]})
    second.put([8], {"x": Column.of_scalars(torch.tensor([8]))}, partition=2)
    write_manifest(tmp_path, first.write(tmp_path) + second.write(tmp_path), num_rows=6)
    chunks = list(read_snapshot(tmp_path))
    assert [
        (one.partition, one.group_size, one.rows, one.groups, one.commits, sorted(one.columns)) for one in chunks
    ] == [
        (1, 4, [0, 1, 2], [0, 0, 1], {"ref": [1], "train": [1, 2]}, ["x"]),
        (1, 4, [6], [3], {}, ["x"]),
        (2, 1, [3], [1], {}, []),
        (2, 1, [8], [4], {}, ["x"]),
    ]
    assert chunks[0].columns["x"].values.tolist() == [0, 1, 200]


def test_large_snapshots_are_many_chunks_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "FILE_BYTES", 20_000)
    unit = Unit()
    unit.put(list(range(50)), {"x": Column.of_dense(torch.arange(50_000.0).reshape(50, 1000))})
    files = unit.write(tmp_path, chunk_bytes=10_000)
    assert len(files) == 13
    assert max(path.stat().st_size for path in tmp_path.iterdir()) < 25_000
    write_manifest(tmp_path, files, num_rows=50)
    rows = restored(tmp_path)
    assert all(rows[row]["x"].values.tolist() == list(range(1000 * row, 1000 * row + 1000)) for row in range(50))


@pytest.fixture(name="snapshot")
def _snapshot(tmp_path: Path) -> Path:
    unit = Unit()
    unit.put([0, 1], {"x": Column.of_scalars(torch.tensor([1, 2]))})
    write_manifest(tmp_path, unit.write(tmp_path), num_rows=2)
    return tmp_path


def first_chunk(directory: Path) -> SnapshotChunk:
    return next(iter(read_snapshot(directory)))


def test_manifest_says_what_there_is(snapshot: Path) -> None:
    manifest = read_manifest(snapshot)
    [entry] = manifest.files
    assert (manifest.num_rows, entry.num_bytes) == (2, (snapshot / entry.name).stat().st_size)
    assert {path.name for path in snapshot.iterdir()} == {entry.name, MANIFEST}


def test_missing_manifest_means_no_snapshot(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="never completed"):
        first_chunk(tmp_path)


@pytest.mark.parametrize("text", [b"{", b'{"format": 9, "num_rows": 0, "files": []}'])
def test_manifest_of_another_kind_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(text)
    with pytest.raises(CheckpointError, match=MANIFEST):
        first_chunk(tmp_path)


def test_damaged_file_is_refused_before_anything_is_read(snapshot: Path) -> None:
    path = next(snapshot.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="was changed"):
        first_chunk(snapshot)
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="bytes, not"):
        first_chunk(snapshot)
    path.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        first_chunk(snapshot)


def test_manifest_of_files_that_do_not_exist_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be completed"):
        write_manifest(tmp_path, ["storage-0-0000-abc.safetensors"], num_rows=1)
    assert not list(tmp_path.iterdir())


def test_files_outside_of_the_snapshot_are_not_read(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"format":1,"num_rows":1,"files":[{"name":"../x","num_bytes":1,"xxh3":""}]}')
    with pytest.raises(CheckpointError, match="outside"):
        first_chunk(tmp_path)


def test_writing_ends_when_the_unit_closes(tmp_path: Path) -> None:
    unit = Unit()
    unit.put([0], {"x": Column.of_scalars(torch.tensor([1]))})
    closing = threading.Event()
    closing.set()
    with pytest.raises(TransportError, match="closed"):
        SnapshotWriter(tmp_path, "u", unit.store).write(unit.cut().rows, closing)
