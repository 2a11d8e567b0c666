"""What is written down of kept groups: leases, and both sides' log-probabilities."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncflow.json_lines import LineReader
from tq.columns import Column, PackedBatch
from tq.messages import AckLost, LeaseGrant, OutputsWritten, Release
from workers.records.samples import MOST_TOKENS, KeptGroups, LeaseLog, SampleLog, TrainedLog, rounded
from workers.rewards.scorer import ScoredResponse
from workers.rows.finished import FinishedRollout
from workers.rows.packed_rows import ROW_DRAWN, SAMPLE_DRAWN

KEPT = KeptGroups(2, 8)  # groups 0, 1, 8, 9, ...


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "trace").mkdir()
    return tmp_path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_leases_of_kept_rows_are_written_and_no_others(run_dir: Path) -> None:
    log = LeaseLog(run_dir, "controller-0", kept=KEPT, now=lambda: 1.5, lineage=2)
    rows, groups = [10, 11, 12, 13], [9, 9, 2, 8]
    log.note_lease(LeaseGrant("actor", 7, 2, rows, groups, ["storage-0"] * 4), "actor/0")
    log.note_lease(LeaseGrant("actor", 8, 2, [14], [2], ["storage-0"]), "actor/0")
    log.note_end(Release("actor", 7, [11, 12]))
    log.note_end(Release("actor", 7, [10], filtered=True))
    log.note_end(Release("actor", 8, [14]))
    log.note_end(OutputsWritten("storage-0", "ref", [13], ["log_probs"], [0], 4))  # another controller's task
    log.note_end(OutputsWritten("storage-0", "actor", [12, 13], [], [0, 0], 0))
    log.note_lease(LeaseGrant("ref", 9, 2, [13, 14], [8, 8], ["storage-0"] * 2), "ref-0/0")
    log.note_end(OutputsWritten("storage-0", "ref", [13], ["log_probs"], [0], 4))
    log.note_end(AckLost("ref", 9, [14]))
    log.close()
    common = {"task": "actor", "token": 7, "lineage": 2, "time_s": 1.5}
    assert lines(run_dir / "trace" / "leases-controller-0.jsonl") == [
        {**common, "step": 2, "rows": [10, 11, 13], "to": "actor/0"},
        {**common, "rows": [11], "ended": "released"},
        {**common, "rows": [10], "ended": "filtered"},
        {**common, "rows": [13], "ended": "acked"},
        {**common, "task": "ref", "token": 9, "step": 2, "rows": [13, 14], "to": "ref-0/0"},
        {**common, "task": "ref", "token": 9, "rows": [13], "ended": "put"},
        {**common, "task": "ref", "token": 9, "rows": [14], "ended": "acked"},
    ]


def test_a_full_disk_holds_up_no_lease(run_dir: Path) -> None:
    path = run_dir / "trace" / "leases-controller-0.jsonl"
    path.symlink_to("/dev/full")
    log = LeaseLog(run_dir, "controller-0", kept=KEPT, now=lambda: 0.0)
    for token in range(10_000):
        log.note_lease(LeaseGrant("actor", token, 1, [token], [0], ["storage-0"]), "actor/0")
    log.close()


def rollout(index: int, versions: list[int], **more: Any) -> FinishedRollout:
    size = len(versions)
    return FinishedRollout(
        index=index,
        ticket=index,
        tokens_T=torch.arange(1 + size),
        sample_lengths=[1 + size],
        response_mask_T=torch.tensor([0] + [1] * size, dtype=torch.uint8),
        log_probs_A=torch.full((size,), -0.5),
        versions_A=torch.tensor(versions, dtype=torch.int32),
        truncated=False,
        **more,
    )


def scored(text: str) -> ScoredResponse:
    return ScoredResponse("1+1=", text, "2", 1.0, correct=True)


def test_of_the_rollouts_of_a_put_the_kept_ones_are_written(run_dir: Path) -> None:
    log = SampleLog(run_dir, "rollout-0", kept=KEPT, now=lambda: (2, 1.23456))
    rollouts = [rollout(10, [3, 3, 4]), rollout(11, [3]), rollout(12, []), rollout(13, [5] * (MOST_TOKENS + 1))]
    log.write(rollouts, [scored(text) for text in "abcd"], [8, 2, 9, 1], step=2)
    log.write([rollout(14, [3])], [scored("e")], [7], step=2)
    log.close()
    found = lines(run_dir / "samples" / "rollout-0.jsonl")
    assert [(line["index"], line["group"], line["response"]) for line in found] == [
        (10, 8, "a"),
        (12, 9, "c"),
        (13, 1, "d"),
    ]
    assert [line["version"] for line in found] == [3, None, 5]
    assert [line["versions"] for line in found] == [[[3, 2], [4, 1]], [], [[5, MOST_TOKENS + 1]]]
    assert [len(line["log_probs"]) for line in found] == [3, 0, MOST_TOKENS]
    assert found[0]["log_probs"] == [-0.5] * 3 and found[0]["prompt"] == "1+1=" and found[0]["step"] == 2
    assert [(line["lineage"], line["time_s"]) for line in found] == [(2, 1.235)] * 3


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize("content", [Text("hi"), "half of a pair: \ud83d", {None: math.nan}])
def test_what_users_functions_return_costs_no_line(run_dir: Path, content: object) -> None:
    log = SampleLog(run_dir, "rollout-0", kept=KEPT, now=lambda: (2, 1.23456))
    talk = [{"role": "user", "content": content}]
    log.write([rollout(10, [3], conversations=[talk]), rollout(11, [3])], [scored("a"), scored("b")], [0, 0], step=1)
    log.close()
    first, second = LineReader(run_dir / "samples" / "rollout-0.jsonl").read()
    assert first["conversations"][0][0]["role"] == "user" and second["response"] == "b"


def batch(drawn: list[int], of_row: list[int], groups: list[int]) -> PackedBatch:
    columns = {SAMPLE_DRAWN: Column.of_scalars(torch.tensor(drawn)), ROW_DRAWN: Column.of_scalars(torch.tensor(of_row))}
    return PackedBatch(tuple(range(100, 100 + len(drawn))), columns, tuple(groups))


def test_the_trainers_log_probabilities_go_to_their_rows(run_dir: Path) -> None:
    log = TrainedLog(run_dir, 3, kept=KEPT)
    log_probs_A = -torch.arange(7.0)
    # Rows 100 and 103 are kept; 101 is of another group, 102 one of several samples of its row, 104 drew nothing.
    found = log.find_rows(batch([2, 1, 2, 2, 0], [2, 1, 4, 2, 0], [0, 2, 1, 9, 1]), log_probs_A)
    log.write(found, step=4, lineage=1, time_s=2.0)
    long = torch.full((MOST_TOKENS + 9,), -0.12345678)
    log.write(log.find_rows(batch([len(long)], [len(long)], [8]), long), step=5, lineage=1, time_s=3.0)
    log.write([], step=6, lineage=1, time_s=4.0)
    log.close()
    first, second, third = lines(run_dir / "trace" / "trained-3.jsonl")
    assert first == {"index": 100, "step": 4, "lineage": 1, "time_s": 2.0, "log_probs": [-0.0, -1.0]}
    assert (second["index"], second["log_probs"]) == (103, [-5.0, -6.0])
    assert third["log_probs"] == [-0.1235] * MOST_TOKENS


def test_rounding_keeps_json_valid() -> None:
    assert rounded([-0.00004, -math.inf, math.nan, -12.34567]) == [0.0, None, None, -12.3457]
