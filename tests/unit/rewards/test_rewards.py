"""Built-in rewards."""

import pytest

from workers.rewards.base import FailedShare, Score
from workers.rewards.load_reward import digits_reward, exact_reward
from workers.rewards.math import math_reward


def test_exact_ignores_space_around() -> None:
    assert exact_reward("3+5=", " 8\n", "8") == Score(1.0, True)
    assert exact_reward("3+5=", "08", "8") == Score(0.0, False)


@pytest.mark.parametrize(
    ("response", "reward"), [("12", 1.0), ("13", 0.25), ("1", 0.25), ("21", 0.0), ("", 0.0), ("123", 1 / 3)]
)
def test_digits_gives_partial_credit_by_place(response: str, reward: float) -> None:
    score = digits_reward("5+7=", response, "12")
    assert score.reward == pytest.approx(reward)
    assert score.correct == (response == "12")


@pytest.mark.parametrize(
    ("response", "ground_truth"),
    [
        ("The answer is 42.", "42"),
        ("6*7 = 42", "We get 6*7=<<6*7=42>>42\n#### 42"),
        ("#### 1,234,567", "#### 1234567"),
        ("It costs $1,000.50", "1000.5"),
        (r"So 3, thus \boxed{-5} (not 7)", "-5"),
        ("x = −5", "-5"),
        ("12-5=7", "7"),
        ("12-5", "5"),
        ("5.00", "5"),
        (".5", "1/2"),
        (r"\boxed{\frac{3}{4}}", "0.75"),
        (r"\boxed{x = -\dfrac{1}{2}}", r"-\frac{1}{2}"),
        ("No.5", "5"),
        ("1,2,3", "3"),
        (r"\boxed{50\%}", "50"),
        ("7 apples", "7 apples"),
        (r"so \boxed{2 \sqrt{3}}", r"2\sqrt{3}"),
        (r"\boxed{\text{Monday}}", "Monday"),
        (r"first \boxed{1}, then \boxed{2", "2"),
        ("9" * 5000 + " or 3", "3"),
    ],
)
def test_math_accepts_equal_answers(response: str, ground_truth: str) -> None:
    assert math_reward("", response, ground_truth) == Score(1.0, True)


@pytest.mark.parametrize(
    ("response", "ground_truth"),
    [
        ("The answer is 41.", "42"),
        ("", "42"),
        ("none", "42"),
        ("42 or 43", "42"),
        ("5", "-5"),
        ("1/0", "1"),
        ("9" * 5000, "9"),
        (r"\boxed{2\sqrt{3}}", "3"),
        ("3", r"2\sqrt{3}"),
        (r"\boxed{Tuesday}", "Monday"),
        (r"42 \boxed{43}", "#### 42"),
    ],
)
def test_math_refuses_other_answers(response: str, ground_truth: str) -> None:
    assert math_reward("", response, ground_truth) == Score(0.0, False)


@pytest.mark.parametrize("text", [" " * 10**6, "\n" * 10**6, "\\boxed{" + " " * 10**6 + "}", "- \\frac{" + " " * 10**6])
def test_an_answer_of_nothing_but_spaces_is_read_in_one_pass(text: str) -> None:
    """A million spaces a million times over would be days, in a thread that lets no other run."""
    assert math_reward("", text, "42") == Score(0.0, False)


def test_one_bad_prompt_of_a_small_step_is_borne_and_a_tenth_of_many_is_not() -> None:
    share = FailedShare(0.1)
    assert [share.add_step(4, 16) for _ in range(2)] == ["", ""], "8 of 32"
    assert share.add_step(4, 16) == "12 of the last 48", "more than a tenth of a hundred"
    large = FailedShare(0.1)
    assert (large.add_step(51, 512), large.add_step(52, 512)) == ("", "103 of the last 1,024")
    assert FailedShare(0.1).add_step(356, 512) == "356 of the last 512"


def test_the_share_is_of_the_last_thousand_and_old_failures_are_forgotten() -> None:
    share = FailedShare(0.1)
    assert share.add_step(20, 500) == ""
    assert all(share.add_step(0, 500) == "" for _ in range(2))
    assert share.add_step(100, 500) == "", "100 of 1,000"
    assert share.add_step(1, 500) == "101 of the last 1,000"


@pytest.mark.parametrize(("most", "failed", "ends"), [(1.0, 512, False), (0.0, 1, True), (0.0, 0, False)])
def test_the_ends_of_the_setting(most: float, failed: int, ends: bool) -> None:
    assert bool(FailedShare(most).add_step(failed, 512)) == ends
