"""Puzzles of reasoning-gym: rows that are a function of (seed, index), and replies scored by the package."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from asyncflow.errors import ConfigError
from tests.support.policies import played

pytest.importorskip("reasoning_gym", reason="pip install -e '.[reasoning-gym]'")
from workers.agents.reasoning_gym import Puzzle, Puzzles

SUMS = {"basic_arithmetic": {"min_terms": 2, "max_terms": 2, "operators": ["+"]}}


def rewarded(row: dict[str, Any], *replies: str) -> Sequence[float | None]:
    sent = json.loads(json.dumps(row))
    each: list[Any] = [played(Puzzle, reply, task=sent).sample.reward for reply in replies]
    return [None if one is None else sum(one) for one in each]


def test_rows_are_a_function_of_seed_and_index_and_take_data_sets_by_turns() -> None:
    first, second = Puzzles(SUMS | {"leg_counting": {}}), Puzzles(SUMS | {"leg_counting": {}})
    rows = [first.task(3, index) for index in range(4)]
    assert rows == [second.task(3, index) for index in range(4)]
    assert [row["dataset"] for row in rows] == ["basic_arithmetic", "leg_counting"] * 2
    assert rows[0]["prompt"] != rows[2]["prompt"] and "<answer>" in rows[0]["prompt"]
    assert rows[0] != first.task(4, 0)


def test_the_package_scores_what_stands_in_the_answer_mark_or_all_of_a_reply() -> None:
    row = Puzzles(SUMS).task(0, 0)
    right = row["answer"]
    whole, marked, other, part = rewarded(
        row, right, f"First <answer>0</answer>, no: <answer> {right}</answer>", "none", f"{right} it is"
    )
    assert (whole, marked, other) == (1.0, 1.0, 0.0)
    assert part is not None and 0 < part < 1


def test_a_puzzle_with_many_right_answers_is_scored_by_its_data_set_though_rows_are_json() -> None:
    row = Puzzles({"countdown": {}}).task(0, 0)
    swapped = " + ".join(reversed(row["answer"].split(" + ")))
    assert rewarded(row, row["answer"], swapped) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("datasets", "words"),
    [
        ({}, "^datasets: is empty"),
        ({"no_such": {}}, "^datasets.no_such: .*not registered"),
        ({"basic_arithmetic": {"max_terms": 0}}, "^datasets.basic_arithmetic: AssertionError"),
        ({"basic_arithmetic": {"most": 1}}, "^datasets.basic_arithmetic: TypeError.*most"),
    ],
)
def test_data_sets_that_cannot_be_made_are_named(datasets: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Puzzles(datasets)
