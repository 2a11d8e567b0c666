"""Finding rewards, a user's among them."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncflow.errors import ConfigError, UserCodeFailed
from workers.config import RewardConfig
from workers.rewards.base import Score
from workers.rewards.load import check_reward, load_reward
from workers.rewards.user import UserReward

SOURCE = """
from workers.rewards.base import Score
RAN = True
def length(prompt, response, answer):
    return len(response) / 4
def scored(prompt, response, answer):
    return Score(0.3, True)
class Judge:
    @staticmethod
    def judge(prompt, response, answer):
        return 1
if RAN:
    alias = length
number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "my_rewards.py"
    path.write_text(SOURCE)
    yield path
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["exact", "digits", "math"])
def test_built_in_rewards_are_found(name: str) -> None:
    check_reward(RewardConfig(function=name))
    assert load_reward(RewardConfig(function=name))("1+1=", "2", "2") == Score(1.0, True)


def test_users_function_is_found_in_the_working_directory(module: Path) -> None:
    reward = load_reward(RewardConfig(function="my_rewards:length"))
    assert reward("", "abc", "") == Score(0.75, False)
    assert reward("", "abcd", "") == Score(1.0, True)
    assert load_reward(RewardConfig(function="my_rewards:scored"))("", "", "") == Score(0.3, True)
    assert load_reward(RewardConfig(function="my_rewards:Judge.judge"))("", "", "") == Score(1.0, True)
    assert load_reward(RewardConfig(function="my_rewards:alias"))("", "ab", "") == Score(0.5, False)


def test_checking_does_not_run_the_module(module: Path) -> None:
    module.write_text("raise RuntimeError('ran')\ndef f(p, r, a): ...\n")
    check_reward(RewardConfig(function="my_rewards:f"))
    with pytest.raises(ConfigError, match="importing 'my_rewards' raised RuntimeError: ran"):
        load_reward(RewardConfig(function="my_rewards:f"))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("exat", "unknown reward 'exat'; did you mean 'exact'"),
        ("nothing", "use one of exact, digits, math, or module:function"),
        ("my_rewards:", "is not of the form module:function"),
        ("my rewards:f", "is not of the form module:function"),
        ("my_missing:f", "no module 'my_missing'; install it, or put my_missing.py into"),
        ("my_missing.sub:f", "no module 'my_missing.sub'; install it, or put my_missing.py into"),
        ("my_rewards:lenght", "my_rewards.py defines no 'lenght'"),
    ],
)
def test_wrong_names_are_refused(module: Path, function: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^reward.function: .*{message}"):
        check_reward(RewardConfig(function=function))


def test_syntax_errors_are_refused_by_line(module: Path) -> None:
    module.write_text("x = 1\ndef f(:\n")
    with pytest.raises(ConfigError, match=r"my_rewards.py:2: "):
        check_reward(RewardConfig(function="my_rewards:f"))


@pytest.mark.parametrize("signature", ["(response)", "(p, r, a, extra)", "(p, r, a, *, weight)"])
def test_functions_that_cannot_take_three_texts_are_refused(module: Path, signature: str) -> None:
    module.write_text(f"def f{signature}: ...\n")
    with pytest.raises(ConfigError, match=r"my_rewards.py:1: f must take prompt, response, answer"):
        check_reward(RewardConfig(function="my_rewards:f"))


@pytest.mark.parametrize("signature", ["(p, r, a)", "(p, r, a, weight=1)", "(*texts)", "(p, *rest, weight=1)"])
def test_functions_that_can_take_three_texts_are_accepted(module: Path, signature: str) -> None:
    module.write_text(f"def f{signature}: ...\n")
    check_reward(RewardConfig(function="my_rewards:f"))


def test_what_is_no_function_is_refused(module: Path) -> None:
    with pytest.raises(ConfigError, match="is not a function but 3"):
        load_reward(RewardConfig(function="my_rewards:number"))


def test_errors_and_wrong_results_name_the_function() -> None:
    def broken(prompt: str, response: str, answer: str) -> float:
        return {"raise": 1 / len(answer) if response == "raise" else 0, "nan": float("nan"), "text": "x"}[response]  # type: ignore[return-value]

    reward = UserReward(broken, name="m:broken", timeout_s=10)
    with pytest.raises(UserCodeFailed, match=r"m:broken raised ZeroDivisionError: .* on response 'raise'"):
        reward("", "raise", "")
    with pytest.raises(UserCodeFailed, match="m:broken returned nan"):
        reward("", "nan", "")
    with pytest.raises(UserCodeFailed, match="m:broken returned 'x' instead of a number or a Score"):
        reward("", "text", "")


@pytest.mark.parametrize("value", [1e39, Score(-1e39, False), Score(float("inf"), True)])
def test_reward_that_float32_does_not_hold_is_refused(value: object) -> None:
    with pytest.raises(UserCodeFailed, match="a reward must be a number that float32 holds"):
        UserReward(lambda *_: value, name="m:huge", timeout_s=10)("", "", "")  # type: ignore[arg-type, return-value]


def test_scores_numbers_are_taken_as_float() -> None:
    assert UserReward(lambda *_: Score(2, False), name="m:two", timeout_s=10)("", "", "") == Score(2.0, False)  # type: ignore[arg-type]
    with pytest.raises(UserCodeFailed, match="instead of a number or a Score"):
        UserReward(lambda *_: Score("two", False), name="m:two", timeout_s=10)("", "", "")  # type: ignore[arg-type]


def test_function_that_ends_the_program_is_named_at_once() -> None:
    def leave(prompt: str, response: str, answer: str) -> float:
        sys.exit(3)

    with pytest.raises(UserCodeFailed, match="m:leave raised SystemExit: 3"):
        UserReward(leave, name="m:leave", timeout_s=10)("", "", "")


def test_a_hanging_function_passes_its_deadline() -> None:
    release = threading.Event()

    def hang(prompt: str, response: str, answer: str) -> float:
        release.wait(60)
        return 1.0

    with pytest.raises(UserCodeFailed, match=r"m:hang took longer than reward.timeout_s = 0.05 s"):
        UserReward(hang, name="m:hang", timeout_s=0.05)("", "", "")
    release.set()
