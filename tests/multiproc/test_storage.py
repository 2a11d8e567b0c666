"""A storage unit behind real channels, beside controllers that do what the test says."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_controller import CONFIG, Bench, done, numbers, refused, same, stats, until

from asyncflow.errors import LeaseFenced, PeerRefused, PutPending, QueueFull, RowsExist, TransportError
from asyncflow.transport.meeting import Credentials
from tq import Column
from tq.directory import TaskOutputs
from tq.messages import (
    ClearPartition,
    CutSnapshot,
    Done,
    HoldPuts,
    OutputsWritten,
    RegisterUnit,
    ReleaseCheckpointed,
    RemovalReason,
    RemoveRows,
    RowsAccepted,
    RowsConfirmed,
    RowsCreated,
    RowsRemoved,
    Stored,
    WriteSnapshot,
)
from tq.snapshot import read_snapshot, write_manifest
from tq.wire import disclose


@pytest.fixture(name="bench")
def _bench(credentials: Credentials) -> Iterator[Bench]:
    bench = Bench(credentials)
    yield bench
    bench.close()


@pytest.mark.gate
def test_row_lives_from_its_first_put_to_its_last_commit(bench: Bench) -> None:
    controller, client = bench.started()
    prompts = Column.of_rows([torch.arange(3), torch.arange(5)])
    assert isinstance(done(client.create([0, 1], {"tokens": prompts, "x": numbers(0, 1)}, groups=[4, 4])), Stored)
    created = controller.hears(RowsCreated)
    assert disclose(created.values)["tokens"].values.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert created == RowsCreated(
        "storage-0", 1, [0, 1], [4, 4], ["tokens", "x"], [3, 5], 8 * 8 + 2 * 4, values=created.values
    )
    done(client.put("ref", 3, [1], {"ref": numbers(2)}))
    assert controller.hears(OutputsWritten) == OutputsWritten("storage-0", "ref", [1], ["ref"], [0], 4)
    read = client.get([1, 0], "tokens")["tokens"]
    assert [row.tolist() for row in read.rows()] == [[0, 1, 2, 3, 4], [0, 1, 2]]
    assert read.values.dtype is torch.int64
    done(client.put("train", 5, [0, 1]))
    done(client.put("ref", 4, [0]))
    with pytest.raises(LeaseFenced, match="row 0"):
        client.get([0], "tokens")
    assert (stats(client).num_rows, stats(client).num_bytes) == (0, 0)


def test_repeated_put_is_told_again_and_a_different_one_is_refused(bench: Bench) -> None:
    controller, client = bench.started()
    done(client.create([0], {"x": numbers(0)}))
    controller.hears(RowsCreated)
    for _ in range(2):
        done(client.put("ref", 3, [0], {"ref": numbers(float("nan"))}))
        controller.hears(OutputsWritten)
    refused(client.put("ref", 3, [0], {"ref": numbers(2)}), PeerRefused, "something else")
    done(client.put("train", 4, [0]))
    done(client.put("ref", 3, [0], {"ref": numbers(float("nan"))}))  # the row is freed by now
    done(client.put("train", 4, [0]))
    refused(client.put("train", 3, [0]), LeaseFenced, "not here any more")


@pytest.mark.parametrize(("task", "column"), [("train", "h"), ("nobody", "g"), ("train", "x")])
def test_a_put_that_is_refused_teaches_nobody_that_the_task_writes_such_columns(
    bench: Bench, task: str, column: str
) -> None:
    _, client = bench.started()
    outputs, tasks = TaskOutputs(bench.credentials), ["ref", "train", "nobody"]
    done(client.create([0], {"x": numbers(0)}))
    refused(client.put("ref", 1, [0], {"x": numbers(1)}), PeerRefused, "already")
    assert outputs.read(tasks) == {}
    done(client.put("ref", 1, [0], {"h": numbers(1)}))
    refused(client.put(task, 2, [0], {column: numbers(1)}), PeerRefused, "already|no task is named")
    assert outputs.read(tasks) == {"ref": ["h"]}


def test_same_new_rows_again_are_stored_once_and_others_are_refused(bench: Bench) -> None:
    controller, client = bench.started()
    controller.parking.add(RowsCreated)
    first = client.create([0], {"x": numbers(1)})
    parked = controller.parks()
    for value in (1, 2):
        refused(client.create([0], {"x": numbers(value)}), PutPending, "row 0 is just being put here")
    assert not first.done()
    parked.send_reply(RowsAccepted())
    assert isinstance(done(first), Stored)
    assert isinstance(done(client.create([0], {"x": numbers(1)})), Stored)
    refused(client.create([0], {"x": numbers(2)}), RowsExist, "row 0 exists")
    assert controller.parked.empty()


@pytest.mark.gate
def test_nobody_hears_of_a_row_that_it_is_in_before_all_controllers_confirmed_it(bench: Bench) -> None:
    """Its put may fail, and if the unit dies first nobody knows that the row was lost."""
    controller = bench.controller()
    bench.unit(controllers=2)
    controller.hears(RegisterUnit)
    controller.parking |= {RowsCreated, RowsConfirmed}
    client = bench.client()
    first = client.create([0, 1], {"x": numbers(0, 1)})
    parked = controller.parks()
    refused(client.create([1], {"x": numbers(1)}), PutPending, "row 1 is just being put")
    parked.send_reply(RowsAccepted())
    parked = controller.parks()
    refused(client.create([1], {"x": numbers(1)}), PutPending, "row 1 is just being put")
    parked.send_reply(RowsAccepted())
    assert isinstance(done(first), Stored)
    assert isinstance(done(client.create([1], {"x": numbers(1)})), Stored)


def test_rows_of_a_put_that_failed_may_be_put_at_once(bench: Bench) -> None:
    """A producer that died is followed by another one, which puts its rows one by one."""
    controller, client = bench.started()
    controller.refusals[RowsCreated] = QueueFull("no room")
    refused(client.create([0, 1], {"x": numbers(0, 1)}), QueueFull, "no room")
    controller.refusals.clear()
    for row in (1, 0):
        assert isinstance(done(client.create([row], {"x": numbers(row)})), Stored)
    assert client.get([0, 1], "x")["x"].values.tolist() == [0, 1]


@pytest.mark.parametrize("error", [QueueFull("no room"), RowsExist("elsewhere"), PeerRefused("not today")])
def test_refused_rows_are_gone_and_the_refusal_arrives_as_it_was(bench: Bench, error: PeerRefused) -> None:
    controller, client = bench.started()
    controller.refusals[RowsCreated] = error
    refused(client.create([7], {"x": numbers(1)}), type(error), str(error))
    assert (stats(client).num_rows, stats(client).num_bytes) == (0, 0)
    controller.refusals.clear()
    done(client.create([7], {"x": numbers(1)}))


def test_commit_is_kept_when_a_controller_fails_and_told_again_with_the_next_put(bench: Bench) -> None:
    controller, client = bench.started()
    done(client.create([0], {"x": numbers(0)}))
    controller.refusals[OutputsWritten] = PeerRefused("not today")
    refused(client.put("ref", 3, [0], {"ref": numbers(1)}), PeerRefused, "not today")
    controller.refusals.clear()
    refused(client.put("ref", 4, [0], {"ref": numbers(1)}), LeaseFenced, "row 0")
    done(client.put("ref", 3, [0], {"ref": numbers(1)}))


def test_cleared_partition_is_told_and_its_bytes_return(bench: Bench) -> None:
    controller, client = bench.started()
    done(client.create([0, 1], {"x": numbers(0, 1)}))
    done(client.create([2], {"x": numbers(2)}, partition=2))
    controller.hears(RowsCreated), controller.hears(RowsCreated)
    assert isinstance(client.ask(ClearPartition(1)), Done)
    assert controller.hears(RowsRemoved) == RowsRemoved("storage-0", 1, [0, 1], RemovalReason.CLEARED)
    assert client.ask(RemoveRows([2, 99])) == Done()
    assert controller.hears(RowsRemoved) == RowsRemoved("storage-0", 2, [2], RemovalReason.GROUP_LEFT)
    assert stats(client).num_bytes == 0
    done(client.create([2], {"x": numbers(2)}))
    assert client.ask(RemoveRows([2])) == Done()
    assert stats(client).num_rows == 0


def test_controllers_hear_that_a_partition_without_rows_here_is_cleared(bench: Bench) -> None:
    controller, client = bench.started()
    assert isinstance(client.ask(ClearPartition(4)), Done)
    assert controller.hears(RowsRemoved) == RowsRemoved("storage-0", 4, [], RemovalReason.CLEARED)


def test_every_kind_of_column_comes_back_as_it_was(bench: Bench) -> None:
    _, client = bench.started()
    columns = {
        "texts": Column.of_texts(["a", "", "äß"]),
        "bytes": Column.of_bytes([b"\0\xff", b"", b"x"]),
        "json": Column.of_values([{"a": [1, None]}, "s", 2.5]),
        "images": Column.of_rows([torch.randn(2, 3), torch.randn(0, 3), torch.randn(1, 1)]),
        "dense": Column.of_dense(torch.randn(3, 2, 2).to(torch.bfloat16)),
        "wide": Column.of_rows([torch.tensor([2**40]), torch.tensor([-1, 2]), torch.tensor([], dtype=torch.int64)]),
    }
    done(client.create([0, 1, 2], columns))
    read = client.get([2, 0, 1], *columns)
    for name, column in columns.items():
        expected = column.select([2, 0, 1])
        assert same(read[name].values, expected.values), name
        assert read[name].kind is column.kind
        assert read[name].rank == column.rank
        assert [row.shape for row in read[name].rows()] == [row.shape for row in expected.rows()]


def test_survivors_of_a_large_put_do_not_hold_all_of_it(bench: Bench) -> None:
    _, client = bench.started()
    rows = Column.of_dense(torch.arange(20 * 10_000.0).reshape(20, 10_000))
    done(client.create(list(range(20)), {"x": rows}))
    held = stats(client).num_bytes
    client.ask(RemoveRows(list(range(18))))
    until(lambda: stats(client).num_bytes < held / 5)
    assert torch.equal(client.get([19, 18], "x")["x"].values, rows.select([19, 18]).values)
    client.ask(RemoveRows([18, 19]))
    assert stats(client).num_bytes == 0


@pytest.mark.gate
def test_retained_rows_spill_and_go_with_the_checkpoint(bench: Bench, tmp_path: Path) -> None:
    config = CONFIG.model_copy(
        update={"retain_until_checkpoint": True, "spill_directory": str(tmp_path), "spill_after_bytes": 0}
    )
    _, client = bench.started(config)
    prompts = Column.of_rows([torch.arange(1000)])
    done(client.create([0], {"prompts": prompts}))
    done(client.put("ref", 1, [0]))
    done(client.put("train", 1, [0]))
    assert stats(client).retained_rows == 1
    until(lambda: stats(client).spilled_bytes > 0)
    assert stats(client).num_bytes == 0
    assert list(tmp_path.rglob("*.block"))
    assert torch.equal(client.get([0], "prompts")["prompts"].values, prompts.values)
    client.ask(ReleaseCheckpointed(1))
    until(lambda: not list(tmp_path.rglob("*.block")))
    assert stats(client).num_rows == 0


@pytest.mark.gate
def test_puts_wait_for_the_cut_and_snapshot_holds_what_was_before_it(bench: Bench, tmp_path: Path) -> None:
    _, client = bench.started()
    done(client.create([0, 1], {"x": numbers(0, 1)}, partition=3))
    done(client.put("ref", 1, [1], {"ref": numbers(9)}))
    other = bench.client("other")
    client.ask(HoldPuts("h", 20))
    late = other.create([2], {"x": numbers(2)}, partition=3)
    wrong = other.create([0], {"x": numbers(7)}, partition=3)
    assert stats(client).num_rows == 2
    client.ask(CutSnapshot("h", 2, []))
    assert isinstance(done(late), Stored)
    refused(wrong, RowsExist, "row 0")
    client.ask(ClearPartition(3))
    written = client.ask(WriteSnapshot("h", str(tmp_path)))
    assert (written.num_rows, len(written.files)) == (2, 1)
    write_manifest(tmp_path, written.files, num_rows=2)
    chunks = {tuple(chunk.rows): chunk for chunk in read_snapshot(tmp_path)}
    assert {rows: sorted(chunk.columns) for rows, chunk in chunks.items()} == {(0,): ["x"], (1,): ["ref", "x"]}
    assert chunks[(1,)].commits == {"ref": [0]}
    assert chunks[(1,)].columns["ref"].values.tolist() == [9]
    with pytest.raises(PeerRefused, match="hold h"):
        client.ask(WriteSnapshot("h", str(tmp_path)))
    until(lambda: stats(client).num_bytes == 0)  # the writer lets go after its answer


def test_snapshot_that_cannot_be_written_is_answered(bench: Bench, tmp_path: Path) -> None:
    """Its library reports a full disk as an error of its own, and nobody must wait for a thread that died of it."""
    _, client = bench.started()
    done(client.create([0], {"x": numbers(0)}))
    client.ask(HoldPuts("h", 20))
    client.ask(CutSnapshot("h", 0, []))
    with pytest.raises(TransportError, match="storage-0: .*missing cannot be written"):
        client.ask(WriteSnapshot("h", str(tmp_path / "missing")))


def test_hold_ends_by_itself(bench: Bench) -> None:
    _, client = bench.started()
    client.ask(HoldPuts("h", 0.05))
    done(client.create([0], {"x": numbers(0)}))
    with pytest.raises(PeerRefused, match="ended"):
        client.ask(CutSnapshot("h", 0, []))
