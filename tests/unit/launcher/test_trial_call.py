"""The call of a user's reward before a run starts."""

from pathlib import Path

import pytest

from asyncflow.errors import ConfigError
from launcher.checks.preflight import check_run
from launcher.cli.request import try_functions, try_rewards
from launcher.config.load import load_config
from launcher.config.paths import find_recipe

SOURCE = """
import time, pathlib

def remembers(prompt, response, ground_truth):
    pathlib.Path("called.txt").write_text(repr((prompt, response, ground_truth)))
    return 1

def raises(prompt, response, ground_truth):
    raise ValueError("no idea")

def hangs(prompt, response, ground_truth):
    time.sleep(3600)

def text(prompt, response, ground_truth):
    return "right"

async def nothing(prompt, response, ground_truth):
    return None

def ranks(members, task):
    pathlib.Path("called.txt").write_text(repr((members[0]["response"], len(members), sorted(task))))
    return [0.0] * len(members)

def ranks_one(members):
    return [0.0]

def keep(row):
    return 1.0
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tried_rewards.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)


def check(*settings: str) -> None:
    config = load_config(find_recipe("quickstart"), overrides=("launcher.device=cpu", *settings))
    checked = check_run(config)
    try_rewards(config, checked.first_row, checked.first_prompt)


def test_it_is_called_with_the_first_prompt_and_its_own_ground_truth() -> None:
    check("reward.function=tried_rewards:remembers")
    assert Path("called.txt").read_text() == repr(("0+1=", "1", "1"))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", "raised ValueError: no idea on response '1'"),
        ("hangs", "took longer than reward.timeout_s = 1 s on response '1'"),
        ("text", "returned 'right' instead of a number"),
        ("nothing", "returned None instead of a number"),
    ],
)
def test_a_function_that_cannot_score_it_is_refused(function: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^reward.function: tried_rewards:{function} {message}.*train.jsonl:1: its"):
        check(f"reward.function=tried_rewards:{function}", "reward.timeout_s=1")


def test_a_function_of_groups_is_called_with_a_group_of_it() -> None:
    check("reward.group_function=tried_rewards:ranks")
    assert Path("called.txt").read_text() == repr(("1", 16, ["answer", "prompt"]))
    with pytest.raises(ConfigError, match=r"^reward.group_function: tried_rewards:ranks_one returned \[0.0\] for 16"):
        check("reward.group_function=tried_rewards:ranks_one")


def test_a_scorer_behind_a_url_is_not_called() -> None:
    check("reward.function=http://127.0.0.1:9/score")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("absent", "tried_rewards.py defines no 'absent'; name a function of that module"),
        ("raises", "tried_rewards:raises must take row"),
    ],
)
def test_functions_of_tasks_are_imported(function: str, message: str) -> None:
    def try_task(name: str) -> None:
        task = f"{{name: safety, function: 'tried_rewards:{name}', output: loss_weights}}"
        try_functions(load_config(find_recipe("quickstart"), overrides=("launcher.device=cpu", f"tasks=[{task}]")))

    try_task("keep")
    with pytest.raises(ConfigError, match=rf"^tasks.0.function: .*{message}"):
        try_task(function)
