"""Ledger lines of trained groups."""

import json
import re
from pathlib import Path

import pytest
import torch

from asyncflow.errors import AsyncFlowError, ConfigError
from asyncflow.json_lines import JsonLines
from tq.columns import Column, PackedBatch
from tq.policies import StalenessRule
from tq.refill import Refill, RemovalCause
from workers.records.ledger import check_staleness, ledger_lines, prompt_hash, refill_lines, token_hashes
from workers.records.ledger_file import DeadLetterLine, FilteredLine, filtered_groups, read_ledger, trained_groups
from workers.rows.packed_rows import sample_columns
from workers.settings.schedule import ScheduleConfig


def make_batch(prompts: list[list[int]], responses: list[list[int]], versions: list[list[int]]) -> PackedBatch:
    columns = {
        "prompts": Column.of_rows([torch.tensor(row) for row in prompts]),
        **sample_columns(
            [torch.tensor(row) for row in prompts], [torch.tensor(row, dtype=torch.int64) for row in responses]
        ),
        "versions": Column.of_rows([torch.tensor(row, dtype=torch.int32) for row in versions]),
        "epochs": Column.of_scalars(torch.tensor([2] * len(prompts), dtype=torch.int32)),
    }
    return PackedBatch(tuple(range(40, 40 + len(prompts))), columns, (9, 9, 11, 11)[: len(prompts)])


PROMPTS, RESPONSES = [[5], [5], [6, 7], [6, 7]], [[1, 2, 3], [4], [1, 2], [3]]
VERSIONS = [[3, 4, 4], [4], [4, 4], [4]]


def test_one_line_per_group_with_its_oldest_and_newest_token() -> None:
    first, second = ledger_lines(
        make_batch(PROMPTS, RESPONSES, VERSIONS), step=5, admitted_step=6, lineage=1, time_s=0.12345
    )
    assert (first["group"], first["indices"], first["versions"], first["staleness"]) == (9, [40, 41], [3, 4], 1)
    assert (second["group"], second["indices"], second["versions"], second["staleness"]) == (11, [42, 43], [4, 4], 0)
    assert (
        (first["step"], first["admitted_step"]) == (5, 6)
        and first["epoch"] == 2
        and first["lineage"] == 1
        and first["time_s"] == 0.123
    )


def test_rewards_are_there_for_a_sampler_alone() -> None:
    batch = make_batch(PROMPTS, RESPONSES, VERSIONS)
    columns = {**batch.columns, "rewards": Column.of_scalars(torch.tensor([1.0, float("nan"), 0.25, 0.0]))}
    batch = PackedBatch(batch.indices, columns, batch.groups)
    first, second = ledger_lines(batch, step=5, admitted_step=5, lineage=0, time_s=0.0, with_rewards=True)
    assert (first["rewards"], second["rewards"]) == ([1.0, None], [0.25, 0.0])
    assert "rewards" not in ledger_lines(batch, step=5, admitted_step=5, lineage=0, time_s=0.0)[0]


def test_hash_depends_on_the_tokens_of_the_group_alone() -> None:
    def hashes(prompts: list[list[int]], responses: list[list[int]]) -> list[str]:
        batch = make_batch(prompts, responses, [[0] * len(row) for row in responses])
        return [line["token_hash"] for line in ledger_lines(batch, step=1, admitted_step=1, lineage=0, time_s=0.0)]

    whole = hashes(PROMPTS, RESPONSES)
    assert hashes(PROMPTS[:2], RESPONSES[:2]) == whole[:1]
    moved = hashes([[5, 1], [5], *PROMPTS[2:]], [[2, 3], [4], *RESPONSES[2:]])
    assert moved[0] != whole[0] and moved[1] == whole[1]


def test_hash_says_where_samples_and_turns_end() -> None:
    def digest(lengths: list[int], mask: list[int]) -> str:
        columns = {
            "tokens": Column.of_rows([torch.tensor([1, 2, 3, 4])]),
            "sample_lengths": Column.of_rows([torch.tensor(lengths, dtype=torch.int32)]),
            "response_mask": Column.of_rows([torch.tensor(mask, dtype=torch.uint8)]),
        }
        return token_hashes(PackedBatch((0,), columns, (5,)))[5]

    several = ([4], [0, 1, 0, 1]), ([4], [0, 0, 1, 1]), ([2, 2], [0, 1, 0, 1])
    assert len({digest(*one) for one in several}) == 3


def test_a_row_that_nothing_was_drawn_for_is_not_stale() -> None:
    empty = make_batch([[5], [5]], [[], []], [[], []])
    (line,) = ledger_lines(empty, step=5, admitted_step=5, lineage=0, time_s=0.0)
    assert (line["versions"], line["staleness"]) == ([4, 4], 0)


@pytest.mark.parametrize(
    ("step", "versions", "found"),
    [
        (6, VERSIONS, "token 0 of row 40 of group 9 is of weights of step 3, outside 4..5 (staleness 0..1; 1 of 7"),
        (3, VERSIONS, "token 0 of row 40 of group 9 is of weights of step 3, outside 1..2 (staleness 0..1; 7 of 7"),
        # One token newer than the weights, in a group whose oldest one is within the bound.
        (5, [[3, 4, 5], [4], [4, 4], [4]], "token 2 of row 40 of group 9 is of weights of step 5, outside 3..4"),
        (5, [[3, 4, 4], [4], [4, 9], [4]], "token 1 of row 42 of group 11 is of weights of step 9, outside 3..4"),
        (5, [[3, 4, 4], [], [4, 4], [2]], "token 0 of row 43 of group 11 is of weights of step 2, outside 3..4"),
    ],
)
def test_token_outside_the_staleness_bound_is_refused(step: int, versions: list[list[int]], found: str) -> None:
    responses = [[1] * len(row) for row in versions]
    with pytest.raises(AsyncFlowError, match=re.escape(f"step {step}: drawn {found}")):
        check_staleness(make_batch(PROMPTS, responses, versions), step=step, allowed=StalenessRule(1))


def test_tokens_within_the_staleness_bound_are_trained() -> None:
    check_staleness(make_batch(PROMPTS, RESPONSES, VERSIONS), step=5, allowed=StalenessRule(1))
    check_staleness(make_batch([[5], [5]], [[], []], [[], []]), step=5, allowed=StalenessRule(0))


def test_rows_are_named_and_hashed_in_the_order_of_their_indices_whatever_came_first() -> None:
    batch = make_batch(PROMPTS, RESPONSES, VERSIONS)
    lines, moved = (
        ledger_lines(one, step=5, admitted_step=5, lineage=0, time_s=0.0) for one in (batch, batch.select([3, 1, 0, 2]))
    )
    assert moved == lines


def test_prompt_hash_is_that_of_the_group_s_prompt_whatever_was_answered() -> None:
    lines = ledger_lines(make_batch(PROMPTS, RESPONSES, VERSIONS), step=5, admitted_step=5, lineage=0, time_s=0.0)
    assert [line["prompt_hash"] for line in lines] == [prompt_hash(torch.tensor(row)) for row in ([5], [6, 7])]


def test_reader_tells_trained_groups_from_those_among_dead_letters(tmp_path: Path) -> None:
    trained = ledger_lines(make_batch(PROMPTS, RESPONSES, VERSIONS), step=5, admitted_step=5, lineage=1, time_s=1.0)
    refill = Refill(12, 6, 10, RemovalCause("judge", 3))
    dead_letters = refill_lines([refill], step=5, lineage=1, time_s=2.0)
    ledger = JsonLines(tmp_path / "ledger.jsonl")
    ledger.write([*dead_letters, *trained, {"step": 5, "group": "x"}])
    ledger.close()
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write("{}\n[1]\n" + '{"step": 6, "gro')
    read = read_ledger(tmp_path)
    assert [(number, line.group, line.indices) for number, line in read.trained] == [
        (2, 9, [40, 41]),
        (3, 11, [42, 43]),
    ]
    assert read.dead_letters == [(1, DeadLetterLine(1, 5, 6, 10, 12, "judge", 3, 2.0))]
    assert [number for number, _ in read.file.wrong] == [4, 5, 6]
    assert read.file.torn


def test_groups_among_dead_letters_were_not_trained(tmp_path: Path) -> None:
    schedule = ScheduleConfig(rollout_batch_size=2, n_samples_per_prompt=2)
    lines = [{"step": 1, "group": 1, "dead_letter": True}, {"step": 1, "group": 0}, {"step": 1, "group": 4}]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert trained_groups(tmp_path, schedule, completed=1) == {0, 4}


def test_filtered_groups_have_lines_of_their_own(tmp_path: Path) -> None:
    schedule = ScheduleConfig(rollout_batch_size=1, n_samples_per_prompt=2)
    refills = [Refill(12, 6, 10, RemovalCause("rewards", filtered=True)), Refill(13, 6, 11, RemovalCause("a", 2))]
    lines = refill_lines(refills, step=1, lineage=0, time_s=2.0)
    late = refill_lines([Refill(14, 7, 8, RemovalCause("rewards", filtered=True))], step=2, lineage=0, time_s=3.0)
    text = "".join(json.dumps(line) + "\n" for line in [*lines, {"step": 1, "group": 0}, *late])
    (tmp_path / "ledger.jsonl").write_text(text)
    read = read_ledger(tmp_path)
    assert [line for _, line in read.filtered] == [
        FilteredLine(0, 1, 6, 10, 12, "rewards", 2.0), FilteredLine(0, 2, 7, 8, 14, "rewards", 3.0),
    ]  # fmt: skip
    assert [line.group for _, line in read.dead_letters] == [11]
    assert trained_groups(tmp_path, schedule, completed=1) == {0}
    assert filtered_groups(tmp_path, completed=1) == {10}, "a resume at step 1 forgets what step 2 found out"


def test_ledger_that_nobody_understands_is_refused(tmp_path: Path) -> None:
    schedule = ScheduleConfig(rollout_batch_size=1, n_samples_per_prompt=2)
    path = tmp_path / "ledger.jsonl"
    for content in ('{"step": 1}\n{"step": 1, "group": 0}\n', '{"step"\n{"step": 1, "group": 0}\n'):
        path.write_text(content)
        with pytest.raises(ConfigError, match=r"ledger.jsonl:1: (.*`group`|not JSON)"):
            trained_groups(tmp_path, schedule, completed=1)
