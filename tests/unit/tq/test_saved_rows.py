"""Which finished samples of a checkpoint are put back, with which columns; and how they are read from its snapshot."""

import threading
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
import torch

from tq import Column, TaskSpec
from tq.backends.backend import MemoryBackend
from tq.policies import StalenessRule
from tq.snapshot import SnapshotChunk, write_manifest
from tq.unit.block import BlockStore
from tq.unit.snapshots import SnapshotWriter
from tq.unit.unit_state import UnitState
from tq.wire import describe
from workers.admission.admission_state import AdmittedGroup
from workers.admission.admitter import KeepRule, Kept, SavedRow, SavedRows

PROMPT = frozenset({"prompts"})
RESPONSE = frozenset({"responses", "versions"})
TASKS = (
    TaskSpec("rollout", PROMPT, RESPONSE),
    TaskSpec("ref", PROMPT | RESPONSE, frozenset({"ref_log_probs"})),
    TaskSpec("train", PROMPT | RESPONSE),
)
EVERYTHING = PROMPT | RESPONSE | {"ref_log_probs"}


def rule(
    *,
    saved_step: int = 20,
    max_staleness: int = 1,
    tasks: tuple[TaskSpec, ...] = TASKS,
    usable: Callable[[int, int], Collection[str]] = lambda partition, step: EVERYTHING,
) -> KeepRule:
    return KeepRule(saved_step, StalenessRule(max_staleness), tasks, "rollout", PROMPT, usable)


def saved(oldest: int, newest: int = -1, *, columns: Collection[str] = EVERYTHING, partition: int = 21) -> SavedRow:
    return SavedRow(partition, frozenset(columns), oldest, max(oldest, newest))


BOTH = Kept(EVERYTHING, frozenset({"rollout", "ref"}))
ANSWER_ONLY = Kept(PROMPT | RESPONSE, frozenset({"rollout"}))


@pytest.mark.parametrize(
    ("row", "step", "kept"),
    [
        (saved(20), 21, BOTH),
        (saved(19, 20), 21, BOTH),
        (saved(20), 22, BOTH),
        (saved(19), 22, None),  # (22 - 1) - 19 > 1
        (saved(18, 20), 21, None),  # its oldest token counts
        (saved(20, 21), 22, None),  # weights of step 21 were abandoned
        (saved(20, columns=PROMPT), 21, None),  # only a prompt
        (saved(20, columns=PROMPT | RESPONSE), 21, ANSWER_ONLY),
        (saved(20, columns=RESPONSE), 21, None),
    ],
)
def test_rows_within_the_staleness_bound_of_their_new_step_are_kept(
    row: SavedRow, step: int, kept: Kept | None
) -> None:
    assert rule().decide_kept(row, step=step) == kept


def test_bound_of_0_keeps_what_the_checkpoint_s_weights_generated() -> None:
    assert rule(max_staleness=0).decide_kept(saved(20), step=21) == BOTH
    assert rule(max_staleness=0).decide_kept(saved(19), step=21) is None
    assert rule(max_staleness=0).decide_kept(saved(20), step=22) is None


def test_columns_of_a_task_that_is_gone_are_dropped() -> None:
    assert rule(tasks=(TASKS[0], TASKS[2])).decide_kept(saved(20), step=21) == ANSWER_ONLY


def test_columns_that_hold_no_more_are_computed_again() -> None:
    def usable(partition: int, step: int) -> Collection[str]:
        return PROMPT | RESPONSE | ({"ref_log_probs"} if partition == step else set())

    assert rule(usable=usable).decide_kept(saved(20, partition=21), step=21) == BOTH
    assert rule(usable=usable).decide_kept(saved(20, partition=22), step=21) == ANSWER_ONLY


def test_task_with_one_of_two_columns_is_done_again() -> None:
    tasks = (TASKS[0], TaskSpec("ref", PROMPT, frozenset({"ref_log_probs", "entropy"})), TASKS[2])
    assert rule(tasks=tasks).decide_kept(saved(20), step=21) == ANSWER_ONLY


def test_responses_without_what_generation_now_writes_are_generated_again() -> None:
    tasks = (TaskSpec("rollout", PROMPT, RESPONSE | {"rewards"}), *TASKS[1:])
    assert rule(tasks=tasks).decide_kept(saved(20), step=21) is None


# Reading


def put(state: UnitState, store: BlockStore, rows: list[int], columns: dict[str, Column], partition: int) -> None:
    headers, payload = describe(columns, narrow=True)
    data = torch.zeros(payload.num_bytes, dtype=torch.uint8)
    payload.write(data)
    state.create_rows(
        rows, store.add_block(rows, headers, data), partition=partition, groups=[row // 2 for row in rows], group_size=2
    )
    state.confirm(rows)


def columns_of(rows: list[int], version: int, *, ref: bool = True) -> dict[str, Column]:
    columns = {
        "prompts": Column.of_rows([torch.tensor([row, row]) for row in rows]),
        "responses": Column.of_rows([torch.tensor([row] * 3) for row in rows]),
        "versions": Column.of_rows([torch.tensor([version, version + row % 2], dtype=torch.int32) for row in rows]),
    }
    if ref:
        columns["ref_log_probs"] = Column.of_rows([torch.tensor([-row / 8.0]) for row in rows])
    return columns


@pytest.fixture(name="snapshot")
def _snapshot(tmp_path: Path) -> Path:
    """Groups 0 and 1 of step 21, 2 of step 22; row 4 has no reference, row 5 is only a prompt."""
    files = []
    parts = [
        ("storage-0", [([0, 1, 2], 21, columns_of([0, 1, 2], 19)), ([4], 22, columns_of([4], 20, ref=False))]),
        ("storage-1", [([3], 21, columns_of([3], 19)), ([5], 22, {"prompts": columns_of([5], 0)["prompts"]})]),
    ]
    for unit, puts in parts:
        state = UnitState()
        store = BlockStore(MemoryBackend(), None, prefix=unit, token_columns=())
        for rows, partition, columns in puts:
            put(state, store, rows, columns, partition)
        writer = SnapshotWriter(tmp_path, unit, store)
        cut = state.cut_rows(after_partition=-1, forget_acks_of=())
        files += writer.write(cut.rows, threading.Event())[0]
    write_manifest(tmp_path, files, num_rows=6)
    return tmp_path


def groups(step: int, *ids: int) -> list[AdmittedGroup]:
    return [AdmittedGroup(group, step, (2 * group, 2 * group + 1)) for group in ids]


def taken(rows: SavedRows, admitted: list[AdmittedGroup], *, most: int = 100) -> dict[int, SnapshotChunk]:
    pieces = {}
    for piece in rows.take_groups(admitted, most=most):
        assert len(piece.rows) <= most
        for k, row in enumerate(piece.rows):
            assert row not in pieces
            assert all(k in done for done in piece.commits.values())
            assert piece.columns["responses"].select([k]).values.tolist() == [row] * 3
            pieces[row] = piece
    return pieces


@pytest.mark.parametrize("most", [1, 2, 100])
def test_rows_of_admitted_groups_come_once_under_their_new_step(snapshot: Path, most: int) -> None:
    warnings: list[str] = []
    rows = SavedRows(snapshot, rule(), warn=warnings.append)
    first = taken(rows, groups(21, 0, 2), most=most)
    assert sorted(first) == [0, 1, 4], "also those of a step that they were not admitted for before"
    assert {(piece.partition, piece.group_size) for piece in first.values()} == {(21, 2)}
    assert [sorted(first[row].commits) for row in (0, 4)] == [["ref", "rollout"], ["rollout"]]
    assert "ref_log_probs" not in first[4].columns
    assert first[1].columns["ref_log_probs"].values.tolist()[first[1].rows.index(1)] == -1 / 8
    assert [first[row].groups[first[row].rows.index(row)] for row in (0, 4)] == [0, 2]
    assert taken(rows, groups(21, 0, 2)) == {}, "none twice"
    assert taken(rows, groups(22, 1)) == {}, "too old for that step"
    assert warnings == []


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_missing_or_damaged_snapshot_is_a_warning(snapshot: Path, damage: str) -> None:
    path = next(snapshot.glob("storage-1*"))
    if damage == "missing":
        (snapshot / "queue.json").unlink()
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    warnings: list[str] = []
    rows = SavedRows(snapshot, rule(), warn=warnings.append)
    assert taken(rows, groups(21, 0)) == {}
    assert taken(rows, groups(21, 1)) == {}
    assert len(warnings) == 1 and warnings[0].endswith("; its samples are generated again")
