"""Rewards in processes of their own: what they judge, and that one that hangs costs one response."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from asyncflow.errors import ConfigError, UserCodeFailed
from workers.rewards.base import Response, Score
from workers.rewards.load_reward import check_reward, load_reward
from workers.rewards.pooled import LastMatch, PooledReward
from workers.settings.rewards import RewardConfig

Load = Callable[..., Callable[..., Score]]


@pytest.fixture(name="load")
def _load() -> Iterator[Load]:
    """Loads rewards; their processes end with the test."""
    loaded: list[PooledReward] = []

    def load(**settings: object) -> Callable[..., Score]:
        reward = load_reward(RewardConfig.model_validate(settings))
        assert isinstance(reward, PooledReward)
        loaded.append(reward)
        return lambda *fields: reward(Response(*fields))

    yield load
    for reward in loaded:
        reward.close()


CATASTROPHE = r"<a>((?:x+x+)+)y"
"""Backtracks exponentially on `<a>xxx...`, inside one call that holds Python's lock."""


@pytest.mark.parametrize(
    ("response", "correct"),
    [
        ("<answer>41</answer> no: <answer> 42\n</answer>", True),
        ("<answer>42</answer> or <answer>41</answer>", False),
        ("42", False),
        ("", False),
    ],
)
def test_regex_compares_the_last_match(response: str, correct: bool) -> None:
    assert LastMatch("<answer>(.*?)</answer>")(response, "42") is correct


def test_pattern_without_a_group_compares_all_that_matches() -> None:
    assert LastMatch(r"\d+")("6 x 7 is 42.", "42") is True
    assert LastMatch(r"(a)|b")("b", "b") is False, "the group took no part"


def test_a_comparison_that_hangs_costs_its_response_and_the_next_ones_go_on(load: Load) -> None:
    reward = load(function="regex", pattern=CATASTROPHE, timeout_s=5)
    assert reward("", "<a>xxy", "xx") == Score(1.0, True)
    with pytest.raises(UserCodeFailed, match=r"regex took longer than reward.timeout_s = 5 s on response '<a>xxx"):
        reward("", "<a>" + "x" * 60, "x")
    assert reward("", "<a>xxxy", "xxx") == Score(1.0, True)


def test_responses_of_any_size_and_content_arrive(load: Load) -> None:
    reward = load(function="regex", pattern=r"\A(.*)\Z", timeout_s=60)
    text = 'a "quoted"\n\u2028line \\ and \U0001f600 ' + "x" * 10**6
    assert reward("", text, text) == Score(1.0, True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"function": "regex"}, "reward.pattern: missing"),
        ({"function": "regex", "pattern": "(a"}, r"reward.pattern: '\(a' is not a regular expression: missing \)"),
        ({"function": "math", "pattern": "a"}, "only reward.function regex reads it, not math"),
        ({"function": "http://"}, "reward.function: 'http://' is not a scorer's URL"),
        ({"function": "https://host:port/x"}, "is not a scorer's URL; write http://HOST:PORT/PATH"),
        ({"function": "http://a..b/score"}, "is not a scorer's URL"),
        ({"function": "http://host/two words"}, "is not a scorer's URL"),
        ({"function": "http://me:secret@host/score"}, "has what a request cannot carry: a user"),
        ({"function": "http://host/scöre"}, "has what a request cannot carry: a user, a fragment, or characters"),
        ({"function": "math_verfy"}, "did you mean 'math_verify'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises((ConfigError, ValidationError), match=message):
        check_reward(RewardConfig.model_validate(settings))


VERIFIED = [
    (r"so \boxed{\frac{1}{2}}", "0.5", True),
    (r"$x = \frac{\sqrt{2}}{2}$", r"\frac{1}{\sqrt{2}}", True),
    (r"\boxed{(x+1)^2}", "x^2+2x+1", True),
    (r"\boxed{\{2, 1\}}", r"\{1,2\}", True),
    ("It is 42.", "6*7=42\n#### 42", True),
    (r"\boxed{43}", "42", False),
    (r"\boxed{\frac{1}{3}}", r"$\frac{1}{2}$", False),
    ("I do not know", "42", False),
    ("", r"\frac{1}{2}", False),
]


def test_math_verify_judges_formulas(load: Load) -> None:
    pytest.importorskip("math_verify")
    reward = load(function="math_verify", timeout_s=60)
    judged = {
        (response, ground_truth): reward("", response, ground_truth).correct for response, ground_truth, _ in VERIFIED
    }
    assert judged == {(response, ground_truth): correct for response, ground_truth, correct in VERIFIED}


@pytest.mark.slow
def test_a_formula_that_takes_for_ever_has_the_configured_deadline(load: Load) -> None:
    """And not that of the library, 5 s, after which it calls the response wrong."""
    pytest.importorskip("math_verify")
    with pytest.raises(UserCodeFailed, match=r"math_verify took longer than reward.timeout_s = 8 s"):
        load(function="math_verify", timeout_s=8)("", r"\boxed{9^{9^{9^{9}}}}", "42")


def test_math_verify_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package math-verify; pip install 'math-verify\[antlr4-13-2\]"):
        check_reward(RewardConfig(function="math_verify"))


@pytest.mark.parametrize("head", ["def", "async def"])
def test_a_function_with_an_argument_task_gets_the_data_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Load, head: str
) -> None:
    (tmp_path / "my_levels.py").write_text(
        f"{head} level(prompt, response, ground_truth, task): return task.get('level', 0)\n"
        f"{head} other(prompt, response, ground_truth, more='x'): return float(more == 'x')\n"
        f"{head} wrong(prompt, response, ground_truth, row): return 0\n"
    )
    monkeypatch.chdir(tmp_path)
    reward = load(function="my_levels:level")
    assert reward("", "", "", '{"level": 3}').reward == 3.0
    assert reward("", "", "").reward == 0.0
    assert load(function="my_levels:other")("", "", "", '{"level": 3}').reward == 1.0
    with pytest.raises(ConfigError, match=r"my_levels:wrong has a parameter 'row'"):
        load(function="my_levels:wrong")
