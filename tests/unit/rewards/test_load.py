"""Finding rewards, a user's among them."""

import asyncio
import inspect
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from asyncflow.errors import ConfigError, UserCodeFailed
from workers.rewards.base import Response, Score, as_score
from workers.rewards.load_reward import check_reward, load_reward
from workers.rewards.pooled import PooledReward, group_reward, user_reward
from workers.settings.rewards import RewardConfig

SOURCE = """
from workers.rewards.base import Score
RAN = True
def length(prompt, response, ground_truth):
    return len(response) / 4
def scored(prompt, response, ground_truth):
    return Score(0.3, True)
class Judge:
    @staticmethod
    def judge(prompt, response, ground_truth):
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


Load = Callable[..., Callable[..., Score]]


@pytest.fixture(name="load")
def _load() -> Iterator[Load]:
    """Loads users' rewards; their children end with the test."""
    loaded: list[PooledReward] = []

    def load(name: str, **settings: object) -> Callable[..., Score]:
        reward = load_reward(RewardConfig.model_validate({"function": name} | settings))
        assert isinstance(reward, PooledReward)
        loaded.append(reward)
        return lambda *fields: reward(Response(*fields))

    yield load
    for reward in loaded:
        reward.close()


@pytest.mark.parametrize("name", ["exact", "digits", "math"])
def test_built_in_rewards_are_found(name: str) -> None:
    check_reward(RewardConfig(function=name))
    assert load_reward(RewardConfig(function=name))(Response("1+1=", "2", "2")) == Score(1.0, True)


def test_users_function_is_found_in_the_working_directory(module: Path, load: Load) -> None:
    reward = load("my_rewards:length")
    assert reward("", "abc", "") == Score(0.75, False)
    assert reward("", "abcd", "") == Score(1.0, True)
    assert load("my_rewards:scored")("", "", "") == Score(0.3, True)
    assert load("my_rewards:Judge.judge")("", "", "") == Score(1.0, True)
    assert load("my_rewards:alias")("", "ab", "") == Score(0.5, False)


def test_checking_does_not_run_the_module(module: Path) -> None:
    module.write_text("raise RuntimeError('ran')\ndef f(p, r, a): ...\n")
    check_reward(RewardConfig(function="my_rewards:f"))
    with pytest.raises(ConfigError, match="importing 'my_rewards' raised RuntimeError: ran"):
        load_reward(RewardConfig(function="my_rewards:f"))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("my_rewards:", "is not of the form module:function"),
        ("my rewards:f", "is not of the form module:function"),
        ("my_missing:f", "no module 'my_missing'; install it, or put my_missing.py into"),
        ("my_missing.sub:f", "no module 'my_missing.sub'; install it, or put my_missing.py into"),
    ],
)
def test_wrong_names_are_refused(module: Path, function: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^reward.function: .*{message}"):
        check_reward(RewardConfig(function=function))


@pytest.mark.parametrize("name", ["lenght", "Judge.jugde"])
def test_a_function_that_its_module_does_not_have_is_refused(module: Path, load: Load, name: str) -> None:
    with pytest.raises(ConfigError, match=f"^reward.function: .*my_rewards.py defines no '{name}'"):
        load(f"my_rewards:{name}")


def test_syntax_errors_are_refused_by_line(module: Path, load: Load) -> None:
    module.write_text("x = 1\ndef f(:\n")
    with pytest.raises(ConfigError, match=r"my_rewards.py:2: "):
        load("my_rewards:f")


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        ("(p, r, a)", "has a parameter 'p'"),
        ("(prompt, response, ground_truth, extra)", "has a parameter 'extra'"),
        ("(prompt, response, ground_truth, *, weight)", "has a parameter 'weight'"),
        ("(*texts)", ".*have no names"),
        ("(*texts, **more)", ".*have no names"),
        ("()", ".*have no names"),
        ("(prompt, ground_truth)", "does not take the response"),
        ("(data_source, ground_truth, extra_info=None)", "does not take the response"),
    ],
)
def test_parameters_that_are_not_known_are_refused_with_those_that_are(
    module: Path, signature: str, message: str
) -> None:
    module.write_text(f"def f{signature}: ...\n")
    with pytest.raises(ConfigError, match=f"my_rewards:f {message}; parameters are found by .* prompt, response,"):
        user_reward("my_rewards:f")


@pytest.mark.parametrize("head", ["def", "async def"])
@pytest.mark.parametrize(
    ("signature", "said"),
    [
        ("(ground_truth, response, prompt)", {"prompt": "p", "response": "r", "ground_truth": "g"}),
        ("(response, weight=1, *, task)", {"response": "r", "weight": 1, "task": {"level": 3}}),
        ("(response, ground_truth, /)", {"response": "r", "ground_truth": "g"}),
        ("(truncated, num_tokens, response)", {"truncated": True, "num_tokens": 2, "response": "r"}),
        (
            "(response, **more)",
            {
                "response": "r",
                "more": {
                    "prompt": "p", "ground_truth": "g", "task": {"level": 3}, "num_tokens": 2, "truncated": True,
                    "turns": [[{"role": "user", "content": "p"}, {"role": "assistant", "content": "r"}]],
                },
            },
        ),
        (
            "(data_source, solution_str, ground_truth, extra_info=None)",
            {"data_source": "", "solution_str": "r", "ground_truth": "g", "extra_info": {}},
        ),
        ("(solution_str, ground_truth, **settings)", {"solution_str": "r", "ground_truth": "g", "settings": {}}),
    ],
)  # fmt: skip
def test_values_are_bound_by_name(module: Path, head: str, signature: str, said: object) -> None:
    module.write_text(f"{head} f{signature}: return locals()\n")
    callee = user_reward("my_rewards:f")
    value = callee.function(*callee.takes(("p", "r", "g", '{"level": 3}', 2, True, b"", [])))
    assert (asyncio.run(value) if inspect.iscoroutine(value) else value) == said


VERLS_ROW = '{"data_source": "gsm8k", "extra_info": {"split": "train"}}'


def test_verls_signature_gets_what_the_row_says(module: Path, load: Load) -> None:
    module.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(solution_str == ground_truth), 'length': len(data_source + extra_info['split'])}\n"
    )
    assert load("my_rewards:compute_score")("", "4", "4", VERLS_ROW) == Score(1.0, True, {"length": 10.0})


TRLS = """
def texts(completions, answer, **kwargs):
    assert kwargs.keys() == {"prompts", "completion_ids", "ground_truth", "level"}, kwargs.keys()
    assert kwargs["prompts"] == ["2+2="] and kwargs["completion_ids"] == [[7, 8]] and kwargs["level"] == [3]
    return [float(text == right) for text, right in zip(completions, answer)]
async def talks(prompts, completions):
    return [float(prompts[0][-1]["content"] == "2+2=" and completions[0][0]["content"] == "4")]
def lacks(completions, solution): ...
def short(completions): return []
def none(completions): return [None]
"""


def test_trls_signatures_are_called_with_lists(module: Path, load: Load) -> None:
    module.write_text(TRLS)
    row, token_ids = '{"prompt": "2+2=", "answer": "4", "level": 3}', array("i", [7, 8]).tobytes()
    assert load("my_rewards:texts")("2+2=", "4", "4", row, 2, False, token_ids).correct
    row = '{"prompt": [{"role": "user", "content": "2+2="}], "answer": "4"}'
    assert load("my_rewards:talks")("<user>2+2=", "4", "4", row).reward == 1.0
    for name, message in (
        ("lacks", "has a parameter 'solution', and the data row has no such column, only ground_truth, answer"),
        ("short", r"returned \[\] for 1 completions; return a list of as many numbers"),
        ("none", r"returned \[None\] for 1 completions; return a list of as many numbers"),
    ):
        with pytest.raises(UserCodeFailed, match=f"my_rewards:{name} .*{message}"):
            load(f"my_rewards:{name}")("2+2=", "4", "4", '{"answer": "4"}')


GROUPS = """
def ours(members, task): return [len(one["response"]) + one["num_tokens"] + task["level"] for one in members]
async def trls(completions, level, **kwargs): return [len(text) + more for text, more in zip(completions, level)]
def verls(solution_strs, ground_truths): return [float(a == b) for a, b in zip(solution_strs, ground_truths)]
def other(members, group): ...
"""


@pytest.mark.parametrize(("name", "rewards"), [("ours", [6, 9]), ("trls", [4, 5]), ("verls", [0, 1])])
def test_functions_of_groups_are_bound_by_name(module: Path, name: str, rewards: list[float]) -> None:
    module.write_text(GROUPS)
    callee = group_reward(f"my_rewards:{name}")
    members = [{"response": "a", "num_tokens": 2}, {"response": "bc", "num_tokens": 4}]
    sent = ("p", "bc", '{"level": 3}', members, [b"", b""])
    value = callee.function(*callee.takes(sent))
    assert callee.gives(asyncio.run(value) if inspect.iscoroutine(value) else value, sent) == rewards
    with pytest.raises(ConfigError, match="my_rewards:other has a parameter 'group'; .* task, members, data_sources"):
        group_reward("my_rewards:other")


@pytest.mark.parametrize(
    "source",
    [
        "def injected(f): return lambda prompt, response: f(0, prompt, response)\n"
        "@injected\ndef f(model, p, r): return 1\n",
        "def f(old): ...\ndef f(response): return 1\n",
    ],
)
def test_what_the_name_stands_for_in_the_end_counts(module: Path, load: Load, source: str) -> None:
    module.write_text(source)
    assert load("my_rewards:f")("", "", "") == Score(1.0, True)


def test_a_callable_that_names_no_response_is_refused_when_it_is_loaded(module: Path) -> None:
    module.write_text("f = lambda answer: 1.0\nfrom os import getcwd as g\n")
    for name in ("f", "g"):
        with pytest.raises(ConfigError, match=f"my_rewards:{name} .*names, which may be prompt, response, ground_tru"):
            load_reward(RewardConfig(function=f"my_rewards:{name}"))


def test_a_module_that_ends_the_program_is_named(module: Path) -> None:
    module.write_text("import sys\ndef f(p, r, a): ...\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match="importing 'my_rewards' raised SystemExit: 0"):
        load_reward(RewardConfig(function="my_rewards:f"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise RuntimeError('no GPU')", "importing the package of 'my_package.judge' raised RuntimeError: no GPU"),
        ("raise SystemExit(3)", "importing the package of 'my_package.judge' raised SystemExit: 3"),
        ("import my_absent", "importing the package of 'my_package.judge' raised ModuleNotFoundError: .*'my_absent'"),
        ("", "no module 'my_package.judge'; install it"),
    ],
)
def test_a_package_that_cannot_be_imported_says_why(module: Path, source: str, message: str) -> None:
    package = module.parent / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    with pytest.raises(ConfigError, match=message):
        check_reward(RewardConfig(function="my_package.judge:f"))


def test_a_file_that_is_no_module_is_refused(module: Path, load: Load) -> None:
    module.write_bytes(b"x = 1\0")
    with pytest.raises(ConfigError, match=r"my_rewards.* null bytes"):
        load("my_rewards:f")


def test_what_is_no_function_is_refused(module: Path) -> None:
    with pytest.raises(ConfigError, match="is not a function but 3"):
        load_reward(RewardConfig(function="my_rewards:number"))


BROKEN = """
import sys
def broken(prompt, response, ground_truth):
    return {"raise": 1 / len(ground_truth) if response == "raise" else 0, "nan": float("nan"), "text": "x"}[response]
def leave(prompt, response, ground_truth):
    sys.exit(3)
class Odd(Exception):
    def __str__(self):
        raise RuntimeError
def odd(prompt, response, ground_truth):
    raise Odd if response == "odd" else ValueError("a\\nb" * 10000)
async def waits(prompt, response, ground_truth):
    return len(response)
def hangs(prompt, response, ground_truth):
    sys.stdin.read()
    while True:
        pass
def parts(prompt, response, ground_truth):
    return {"score": 0.5, "format": 1, "said": response}
"""


def test_errors_and_wrong_results_name_the_function(module: Path, load: Load) -> None:
    module.write_text(BROKEN)
    reward = load("my_rewards:broken")
    with pytest.raises(UserCodeFailed, match=r"my_rewards:broken raised ZeroDivisionError: .* on response 'raise'"):
        reward("", "raise", "")
    with pytest.raises(UserCodeFailed, match="^reward.function: my_rewards:broken returned nan on response 'nan'"):
        reward("", "nan", "")
    with pytest.raises(UserCodeFailed, match="my_rewards:broken returned 'x' instead of a number, a Score or a dict"):
        reward("", "text", "")
    with pytest.raises(UserCodeFailed, match="my_rewards:leave raised SystemExit: 3"):
        load("my_rewards:leave")("", "", "")


def test_a_function_that_hangs_and_holds_the_lock_passes_its_deadline(module: Path, load: Load) -> None:
    module.write_text(BROKEN)
    with pytest.raises(UserCodeFailed, match=r"my_rewards:hangs took longer than reward.timeout_s = 1 s"):
        load("my_rewards:hangs", timeout_s=1)("", "", "")


def test_scores_of_coroutines_and_dicts_come_back(module: Path, load: Load) -> None:
    module.write_text(BROKEN)
    assert load("my_rewards:waits")("", "ab", "") == Score(2.0, True)
    assert load("my_rewards:parts")("", "ab", "") == Score(0.5, False, {"format": 1.0})


def test_what_a_function_raises_is_told_in_one_line_of_bounded_length(module: Path, load: Load) -> None:
    module.write_text(BROKEN)
    reward = load("my_rewards:odd")
    with pytest.raises(UserCodeFailed, match="my_rewards:odd raised Odd on "):
        reward("", "odd", "")
    with pytest.raises(UserCodeFailed) as caught:
        reward("", "", "")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def score_of(value: object) -> Score:
    return as_score(value, what="m:f", response="x")


@pytest.mark.parametrize("value", [1e39, Score(-1e39, False), Score(float("inf"), True), {"score": float("nan")}])
def test_reward_that_float32_does_not_hold_is_refused(value: object) -> None:
    with pytest.raises(UserCodeFailed, match="a reward must be a number that float32 holds"):
        score_of(value)


class Hostile:
    def __float__(self) -> float:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value",
    ["1.0", b"1", torch.ones(2), [1.0], {}, Hostile(), Score(1.0, torch.ones(2)), Score("1", True), {"reward": 1.0}],  # type: ignore[arg-type]
)
def test_what_is_no_number_costs_its_response_whatever_its_class_raises(value: object) -> None:
    with pytest.raises(UserCodeFailed, match="instead of a number, a Score or a dict with `score`"):
        score_of(value)


@pytest.mark.parametrize("value", [True, 1, torch.tensor(1.0), Score(1, 1), Score(torch.tensor(1), None)])  # type: ignore[arg-type]
def test_numbers_and_truth_of_any_library_become_ours(value: object) -> None:
    score = score_of(value)
    assert type(score.reward) is float and score.reward == 1 and type(score.correct) is bool


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"score": 1}, Score(1.0, True)),
        ({"score": 0.2, "correct": True, "format": 0.5}, Score(0.2, True, {"format": 0.5})),
        ({"score": 1.0, "acc": False, "pred": "7", "nan": float("nan"), 3: 1.0}, Score(1.0, True, {"acc": 0.0})),
        (Score(0.5, False, {"length": torch.tensor(2)}), Score(0.5, False, {"length": 2.0})),  # type: ignore[dict-item]
    ],
)
def test_a_dict_is_a_reward_with_named_parts_and_what_is_no_number_is_none(value: object, expected: Score) -> None:
    assert score_of(value) == expected


def test_a_function_may_reward_each_turn_by_what_the_policy_read_and_said(module: Path, load: Load) -> None:
    module.write_text(
        "def each(turns):\n    return [len(turn) / 4 - (turn[-1]['content'] == 'no') for turn in turns]\n"
        "def scored(turns):\n    return {'score': [1.0] * len(turns), 'correct': False, 'calls': len(turns)}\n"
        "def few(response):\n    return [0.5]\n"
    )
    turns = [[{"role": "user", "content": "6*7?"}, {"role": "assistant", "content": "no"}], [{"content": "42"}]]
    more = ("4", "{}", 1, False, b"", turns)
    each = load("my_rewards:each")("6*7?", "42", *more)
    assert each == Score(-0.25, False, {}, (-0.5, 0.25))
    assert load("my_rewards:scored")("6*7?", "42", *more) == Score(2.0, False, {"calls": 2.0}, (1.0, 1.0))
    assert load("my_rewards:each")("1+1=", "no", "2") == Score(-0.5, False, {}, (-0.5,))  # one response is one turn
    with pytest.raises(UserCodeFailed, match="returned 1 rewards on response '42', which has 2 turns; return one for"):
        load("my_rewards:few")("6*7?", "42", *more)


def test_a_scorer_of_texts_alone_gives_one_number() -> None:
    with pytest.raises(UserCodeFailed, match="instead of a number"):
        score_of([1.0])
    with pytest.raises(UserCodeFailed, match="a reward must be a number that float32 holds"):
        as_score([1.0, float("nan")], what="m:f", response="x", num_turns=2)


def test_rewards_of_turns_have_an_order_and_one_place() -> None:
    with pytest.raises(UserCodeFailed, match="instead of a number"):
        as_score({0.5, 1.0}, what="m:f", response="x", num_turns=2)
    with pytest.raises(UserCodeFailed, match="returned a Score with turn_rewards; give the rewards of turns as its re"):
        as_score(Score(0.5, False, {}, [0.25, 0.25]), what="m:f", response="x", num_turns=2)
