"""Ledger lines of trained groups."""

import pytest
import torch

from asyncflow.errors import AsyncFlowError
from tq.batch import Column, PackedBatch
from workers.ledger import check_staleness, ledger_lines


def make_batch(prompts: list[list[int]], responses: list[list[int]], versions: list[list[int]]) -> PackedBatch:
    columns = {
        "prompts": Column.of_rows([torch.tensor(row) for row in prompts]),
        "responses": Column.of_rows([torch.tensor(row) for row in responses]),
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


def test_hash_depends_on_the_tokens_of_the_group_alone() -> None:
    def hashes(prompts: list[list[int]], responses: list[list[int]]) -> list[str]:
        batch = make_batch(prompts, responses, [[0] * len(row) for row in responses])
        return [line["token_hash"] for line in ledger_lines(batch, step=1, admitted_step=1, lineage=0, time_s=0.0)]

    whole = hashes(PROMPTS, RESPONSES)
    assert hashes(PROMPTS[:2], RESPONSES[:2]) == whole[:1]
    moved = hashes([[5, 1], [5], *PROMPTS[2:]], [[2, 3], [4], *RESPONSES[2:]])
    assert moved[0] != whole[0] and moved[1] == whole[1]


@pytest.mark.parametrize(("step", "bound"), [(6, 1), (3, 1)])
def test_group_outside_the_staleness_bound_is_refused(step: int, bound: int) -> None:
    lines = ledger_lines(make_batch(PROMPTS, RESPONSES, VERSIONS), step=step, admitted_step=5, lineage=0, time_s=0.0)
    with pytest.raises(AsyncFlowError, match=f"group 9 of step {step} was generated with weights of steps"):
        check_staleness(lines, bound=bound)


def test_groups_within_the_staleness_bound_are_trained() -> None:
    check_staleness(
        ledger_lines(make_batch(PROMPTS, RESPONSES, VERSIONS), step=5, admitted_step=5, lineage=0, time_s=0.0), bound=1
    )
