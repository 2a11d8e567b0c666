"""The call of a user's reward before a run starts."""

from pathlib import Path
from typing import Any

import pytest

from asyncflow.errors import ConfigError
from launcher.checks.preflight import check_run
from launcher.checks.user_code import try_functions, try_rewards, try_rollout, try_users_code
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.request.evaluation import accept_evaluation
from workers.agents.agent_checks import trial
from workers.calls.pool import CallPool, Entry
from workers.data.prompt_rows import PromptRow

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

def ranks_none(members):
    raise ValueError("fewer than two")

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
    rows = checked.rows_to_check
    try_rewards(config, rows.first_row, rows.first_prompt)


@pytest.mark.parametrize(("roles", "is_tried"), [("actor:1,evaluate:1", True), ("actor:1", False)])
def test_with_sft_it_is_called_with_the_first_held_out_prompt(roles: str, is_tried: bool) -> None:
    settings = ("launcher.device=cpu", "reward.function=tried_rewards:raises")
    config = load_config(find_recipe("quickstart-sft-cpu"), overrides=settings, roles=roles)
    rows = check_run(config).rows_to_check
    if is_tried:
        with pytest.raises(ConfigError, match=r"no idea.* \(a trial call with .*held_out\.jsonl:1: its prompt"):
            try_users_code(config, rows.first_row, rows.first_prompt)
    else:
        try_users_code(config, rows.first_row, rows.first_prompt)


def test_with_sft_a_group_function_that_nothing_calls_is_not_tried() -> None:
    settings = ("launcher.device=cpu", "reward.group_function=tried_rewards:ranks_none")
    config = load_config(find_recipe("quickstart-sft-cpu"), overrides=settings, roles="actor:1,evaluate:1")
    rows = check_run(config).rows_to_check
    try_users_code(config, rows.first_row, rows.first_prompt)


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


ROLLOUTS = """
import asyncio, os, sys, time
from workers.agents import Environment

class Counts(Environment):
    def reset(self, task):
        return task["prompt"]
    def step(self, reply):
        return "more", float(reply.text == "110"), False

class Lacks(Environment):
    def reset(self, task):
        return task["question"]

class FiveValues(Environment):
    def reset(self, task):
        return "go"
    def step(self, reply):
        return "", 0.0, True, False, {}

class NoReset(Environment):
    pass

async def raises(task, model, context):
    raise ValueError("no sandbox")

async def leaves(task, model, context):
    sys.exit(3)

async def dies(task, model, context):
    os._exit(3)

async def blocks(task, model, context):
    time.sleep(3600)

async def hangs(task, model, context):
    await asyncio.Event().wait()

async def says_nothing(task, model, context):
    return None

async def floods(task, model, context):
    print("x" * 2**22)
    return (await skipped(task, model, context))

async def skipped(task, model, context):
    context.skip("too hard")

async def agent(task, base_url, api_key):
    import json, urllib.request
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": task["prompt"]}]}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    answer = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(request)))
    return float(answer["choices"][0]["message"]["content"] == task["answer"])

async def bad_agent(task, base_url, api_key):
    raise KeyError("tools")
"""


def tried(*settings: str) -> None:
    Path("tried_rollouts.py").write_text(ROLLOUTS)
    overrides = ("launcher.device=cpu", "rollout.tools=[]", *settings)
    config = load_config(find_recipe("quickstart-tools"), overrides=overrides)
    row = PromptRow("10*11", "110", 1, {"prompt": "10*11", "answer": "110"})
    try_rollout(config, row)


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the child of a trial calls is called here, since each would import the tokenizer's library again."""

    class Here:
        def __init__(self, entry: Entry, **_: object) -> None:
            self._function = trial(**entry.settings).function

        def until_ready(self) -> None: ...

        def call_and_wait(self, *arguments: object, on: str) -> object:
            return self._function(*arguments)

        def close(self) -> None: ...

    def pool(entry: Entry, **options: Any) -> object:
        return Here(entry) if entry.function.endswith(":trial") else CallPool(entry, **options)

    monkeypatch.setattr("launcher.checks.user_code.CallPool", pool)


@pytest.mark.parametrize(
    "name", ["Counts", *(pytest.param(name, marks=pytest.mark.slow) for name in ("skipped", "floods"))]
)
def test_a_rollout_that_can_be_made_is_accepted(name: str) -> None:
    tried(f"rollout.function=tried_rollouts:{name}")


def test_a_rollout_that_fails_where_failures_are_trained_on_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    tried("rollout.function=tried_rollouts:Lacks", "rollout.on_failure=zero")
    (warning,) = [message for message in caplog.messages if "KeyError" in message]
    assert warning.startswith("rollout.function: tried_rollouts:Lacks: ") and "rollout.on_failure is zero" in warning


def test_evaluations_try_a_rollout_of_their_own_first_prompt() -> None:
    Path("tried_rollouts.py").write_text(ROLLOUTS)
    model = find_recipe("quickstart-tools").parent / "quickstart_tools" / "model"
    overrides = ["rollout.tools=[]", "rollout.function=tried_rollouts:raises"]
    with pytest.raises(ConfigError, match=r"no sandbox.* \(a trial rollout of .*held_out\.jsonl:1, whose"):
        accept_evaluation(str(model), "quickstart-tools", overrides=overrides, ranks=1, run_dir=None)


@pytest.mark.slow
def test_an_agent_and_a_program_are_tried_behind_the_gateway() -> None:
    own = ("rollout.function=null",)
    tried(*own, "rollout.agent=tried_rollouts:agent")
    with pytest.raises(
        ConfigError, match=r"^rollout.agent: tried_rollouts:bad_agent: KeyError: .tools. \(tried_rollou"
    ):
        tried(*own, "rollout.agent=tried_rollouts:bad_agent")
    with pytest.raises(ConfigError, match=r"^rollout.agent_command ended with code 1 \(a trial rollout of .*:1, whose"):
        tried(*own, 'rollout.agent_command=["false"]')


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Lacks", r"KeyError: .question \(the row has prompt, answer\). \(tried_rollouts.py:13\)"),
        ("FiveValues", r"step returned \(.., 0.0, True, False, \{\}\); return \(observation"),
        pytest.param("NoReset", "NotImplementedError", marks=pytest.mark.slow),
        pytest.param("raises", r"ValueError: no sandbox \(tried_rollouts.py:25\)", marks=pytest.mark.slow),
        pytest.param("leaves", r"SystemExit: 3 \(tried_rollouts.py:28\)", marks=pytest.mark.slow),
        pytest.param("dies", "its process ended with code 3", marks=pytest.mark.slow),
        pytest.param("says_nothing", "the rollout function returned NoneType", marks=pytest.mark.slow),
    ],
)
def test_a_rollout_that_fails_is_refused_with_its_reason(name: str, message: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^rollout.function: tried_rollouts:{name}: {message}.*or set rollout.trial"
    ):
        tried(f"rollout.function=tried_rollouts:{name}")
    tried(f"rollout.function=tried_rollouts:{name}", "rollout.trial=false")


def test_a_rollout_that_hangs_has_the_runs_deadline() -> None:
    with pytest.raises(
        ConfigError,
        match=r"tried_rollouts:hangs: its time \(rollout.timeout_s\) was spent, and rollout: the",
    ):
        tried("rollout.function=tried_rollouts:hangs", "rollout.timeout_s=0.2")


def test_a_trial_that_takes_too_long_is_no_judgement(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("launcher.checks.user_code._TRIAL_S", 0.2)
    tried("rollout.function=tried_rollouts:hangs")
    assert "a trial rollout did not end within 0.2 s; the run continues without it" in caplog.text


@pytest.mark.slow
def test_a_rollout_that_blocks_its_loop_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tried_rollouts:blocks: its process blocked its event loop for 1 s"):
        tried("rollout.function=tried_rollouts:blocks", "rollout.stall_timeout_s=1.0")
