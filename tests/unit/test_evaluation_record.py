"""The line of one evaluation."""

import itertools
import math
from fractions import Fraction
from pathlib import Path

import pytest

from asyncflow.json_lines import JsonLines
from asyncflow.run_files import EVALUATION_FILE
from weightsync.version import Version
from workers.rollout.evaluate import Answer, evaluated_steps, evaluation_line, pass_at_k, pass_rates, wilson_interval


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0000, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_is_the_published_one(successes: int, trials: int, low: float, high: float) -> None:
    """Newcombe 1998, Two-sided confidence intervals for the single proportion, Statistics in Medicine 17, table I."""
    assert wilson_interval(successes / trials, trials) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_stays_inside_0_to_1() -> None:
    assert wilson_interval(0.0, 1)[0] == 0.0
    assert wilson_interval(1.0, 1)[1] == 1.0


def answers(*rewards: float | None, size: int = 1, truncated: int = -1) -> list[Answer]:
    """Return answers of 3 or 4 tokens, `size` per prompt; None: it could not be scored."""
    return [
        Answer(
            "", *divmod(k, size), reward, correct=reward == 1, tokens=3 + k % 2, truncated=k == truncated, seconds=0.5
        )
        for k, reward in enumerate(rewards)
    ]


def test_line_counts_responses_and_its_interval_counts_prompts() -> None:
    two_each = answers(1.0, 0.5, 1.0, 1.0, size=2, truncated=3)
    line = evaluation_line(two_each, version=Version(1, 20), time_s=12.3456)
    low, high = wilson_interval(0.75, 2)
    assert line == {
        "step": 20, "lineage": 1, "accuracy": 0.75, "accuracy_low": round(low, 6), "accuracy_high": round(high, 6),
        "reward_mean": 0.875, "reward_failures": 0, "response_tokens_mean": 3.5, "truncated_fraction": 0.25,
        "pass_at_2": 1.0, "pass_at_2_low": round(wilson_interval(1.0, 2)[0], 6), "pass_at_2_high": 1.0,
        "num_prompts": 2, "num_samples": 4, "time_s": 12.346, "seconds": 0.5,
    }  # fmt: skip


def test_responses_that_could_not_be_scored_are_left_out() -> None:
    line = evaluation_line(answers(1.0, None, 0.5, None), version=Version(0, 1), time_s=1)
    assert (line["accuracy"], line["reward_mean"], line["reward_failures"]) == (0.5, 0.75, 2)
    assert (line["accuracy_low"], line["accuracy_high"]) == tuple(round(bound, 6) for bound in wilson_interval(0.5, 2))


def test_steps_of_an_earlier_start_are_known(tmp_path: Path) -> None:
    assert evaluated_steps(tmp_path) == frozenset()
    for step in (0, 10):  # as two instances do
        lines = JsonLines(tmp_path / EVALUATION_FILE)
        lines.write([{"step": step}])
        lines.close()
    assert evaluated_steps(tmp_path) == {0, 10}


def test_pass_at_k_is_the_closed_form() -> None:
    worst = 0.0
    for n in (1, 2, 7, 64, 256):
        for c in sorted({0, 1, n // 3, n // 2, n - 1, n} & set(range(n + 1))):
            for k in range(1, n + 1):
                exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
                worst = max(worst, abs(pass_at_k(n, c, k) - float(exact)))
    assert worst <= 1e-9


def test_pass_at_k_is_what_drawing_k_of_the_responses_gives() -> None:
    right = [True, False, False, True, False]
    drawn = [any(some) for some in itertools.combinations(right, 3)]
    assert pass_at_k(5, 2, 3) == pytest.approx(sum(drawn) / len(drawn))


def test_pass_rates_leave_out_prompts_with_too_few_responses_and_have_an_interval() -> None:
    rates = pass_rates([(4, 1), (4, 0), (3, 3)])
    assert set(rates) == {f"pass_at_{k}{end}" for k in (2, 4) for end in ("", "_low", "_high")}
    assert rates["pass_at_2"] == pytest.approx((0.5 + 0.0 + 1.0) / 3, abs=1e-6)
    assert rates["pass_at_4"] == 0.5  # the third prompt has only three
    assert rates["pass_at_2_low"] < rates["pass_at_2"] < rates["pass_at_2_high"] <= 1
    assert pass_rates([(1, 1), (1, 0)]) == {}
