"""Tasks that a class of the user's makes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import configs
from asyncflow.errors import ConfigError, UserCodeFailed
from launcher.checks.preflight import check_run
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.request.dry_run import describe
from workers.data.prompt_dataset import PromptTokens, SourcePrompts, open_prompts
from workers.data.task_source import HELD_OUT_SEEDS, TaskSource, data_identity, held_out_rows
from workers.settings.data import DataConfig
from workers.settings.run import RunConfig

MODEL_DIR = Path(configs.__path__[0]) / "quickstart" / "model"
OWN = """
import random, time
from pydantic import Field, model_validator
from asyncflow.settings import Settings

class Sums:
    def __init__(self, most=9):
        self.most = most

    def task(self, seed, index):
        draw = random.Random(f"{seed} {index}")
        a, b = draw.randint(0, self.most), draw.randint(0, self.most)
        return {"prompt": f"{a}+{b}=", "answer": a + b, "seed": seed, "tools": ["add"]}

class Typed(Sums):
    class Config(Settings):
        most: int = Field(3, ge=1)

    def __init__(self, most):
        super().__init__(most)

class Raising(Sums):
    class Config(Settings):
        @model_validator(mode="after")
        def checked(self):
            raise KeyError("zz")

class Five(Sums):
    def __len__(self):
        return 5

class Empty(Sums):
    def __len__(self):
        return 0

class Long(Sums):
    def task(self, seed, index):
        return {"prompt": "1+" * 40 + "1=", "answer": 41}

class Unsteady(Sums):
    def task(self, seed, index):
        return {"prompt": f"{random.random()}", "answer": 0}

class Text(Sums):
    def task(self, seed, index):
        return "1+1="

class Broken(Sums):
    def task(self, seed, index):
        raise LookupError("nothing here")

class Hanging(Sums):
    def task(self, seed, index):
        time.sleep(600)

class Lacking:
    pass
"""


@pytest.fixture(autouse=True)
def own_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_tasks.py").write_text(OWN)
    monkeypatch.setenv("ASYNCFLOW_CODE_DIRECTORY", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))


def data(name: str, **settings: Any) -> DataConfig:
    return DataConfig.model_validate({"source": f"own_tasks:{name}", **settings})


def recipe(tmp_path: Path, *settings: str, roles: str = "rollout:1,actor:1") -> RunConfig:
    own = ("launcher.device=cpu", f"code_directory={tmp_path}", "data.path=null", *settings)
    return load_config(find_recipe("quickstart"), overrides=own, roles=roles)


@pytest.fixture
def sums() -> Iterator[TaskSource]:
    with TaskSource(data("Sums", options={"most": 4}), seed=3, own_rollout=False) as source:
        yield source


def test_tasks_are_rows_and_a_function_of_seed_and_index(sums: TaskSource) -> None:
    assert sums.size is None
    rows = [sums.read_row(index) for index in (7, 8, 7)]
    assert rows[0].fields == rows[2].fields != rows[1].fields
    assert (rows[0].prompt, rows[0].ground_truth, rows[0].line) == (
        rows[0].fields["prompt"], str(rows[0].fields["answer"]), 7
    )  # fmt: skip
    assert json.loads(rows[0].task) == rows[0].fields and rows[0].fields["seed"] == 3


def test_a_config_of_a_source_has_its_options() -> None:
    with TaskSource(data("Typed"), seed=3, own_rollout=False) as source:
        assert all(
            len(source.read_row(index).prompt) == 4 and "9" not in source.read_row(index).prompt for index in range(9)
        )


def test_groups_of_a_source_without_an_end_have_its_tasks_in_order(sums: TaskSource) -> None:
    tokens = PromptTokens(data("Sums"), model_dir=MODEL_DIR, own_rollout=False)
    prompts = SourcePrompts(sums, tokens, seed=3, shuffle=True)
    first = prompts.prompt_of_group(11)
    assert (first.epoch, first.position, first.text, first.task) == (
        0,
        11,
        sums.read_row(11).prompt,
        sums.read_row(11).task,
    )
    assert first.tokens.numel() == len(first.text), "the quickstart's tokens are characters"


def test_source_with_an_end_is_shuffled_anew_in_every_epoch(tmp_path: Path) -> None:
    prompts = open_prompts(recipe(tmp_path, "data.source=own_tasks:Five", "rollout.function=own:rollout"), tmp_path)
    try:
        made = [prompts.prompt_of_group(group) for group in range(10)]
    finally:
        prompts.close()
    assert [one.epoch for one in made] == [0] * 5 + [1] * 5
    assert sorted(one.position for one in made[:5]) == sorted(one.position for one in made[5:]) == [0, 1, 2, 3, 4]
    assert all(json.loads(one.task)["tools"] == ["add"] for one in made)


def test_start_checks_a_source_and_says_that_it_has_no_end(tmp_path: Path) -> None:
    checked = check_run(recipe(tmp_path, "data.source=own_tasks:Sums"))
    assert checked.num_prompts is None
    assert "own_tasks:Sums  tasks without an end" in describe(checked, source=Path("c.yaml"), run_dir=Path("run"))


def test_start_without_prompts_of_its_own_says_who_puts_them(tmp_path: Path) -> None:
    checked = check_run(recipe(tmp_path, "data.source=feed"))
    text = describe(checked, source=Path("c.yaml"), run_dir=Path("run"))
    assert "feed  processes outside put the prompts" in text
    assert "FIRST PROMPT (fed during the run)" in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("data.source=own_tasks:Gone",), "data.source: .*own_tasks.py defines no 'Gone'"),
        (
            ("data.source=own_tasks:Lacking",),
            r"^data.source: own_tasks:Lacking has no method task\(seed, index\); add it",
        ),
        (("data.source=own_tasks:Sums", "data.options={least: 1}"), "cannot be made with least: got an unexpected"),
        (
            ("data.source=own_tasks:Typed", "data.options={mots: 1}"),
            "data.options.mots: unknown key; did you mean 'most'",
        ),
        (("data.source=own_tasks:Typed", "data.options={most: 0}"), "data.options.most: 0 cannot be used; it must be"),
        (("data.source=own_tasks:Raising",), "data.options: own_tasks:Raising raised KeyError: 'zz' when its options"),
        (("data.source=own_tasks:Empty",), r"^data.source: own_tasks:Empty is empty: its len\(\) is 0"),
        (("data.source=own_tasks:Text",), "^data.source: own_tasks:Text returned text for task 0 of seed 0; return a"),
        (("data.source=own_tasks:Broken",), "Broken raised LookupError: nothing here on task 0 of seed 0"),
        (("data.source=own_tasks:Hanging", "data.timeout_s=0.5"), "took longer than data.timeout_s = 0.5 s on task 0"),
        (("data.source=own_tasks:Unsteady",), r"task\(seed=0, index=0\) returned .*, then .*; draw from a generator"),
        (("data.source=own_tasks:Long",), "^task 0 of own_tasks:Long: the prompt has 82 tokens, more than data.max_p"),
        (
            ("data.source=own_tasks:Sums", "data.prompt_field=question"),
            "^data.source: own_tasks:Sums: task 0: no field 'question'; found: answer, prompt, seed, tools",
        ),
    ],
)
def test_source_that_cannot_be_used_is_refused(tmp_path: Path, settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(recipe(tmp_path, *settings))


@pytest.mark.parametrize("settings", [(), ("data.source=own_tasks:Sums", "data.path=x.jsonl")])
def test_exactly_one_of_file_and_source_is_given(tmp_path: Path, settings: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="give one of path .*, mixture and source"):
        recipe(tmp_path, *settings)


def test_rows_of_a_rollout_of_ones_own_need_no_prompt(tmp_path: Path) -> None:
    file = tmp_path / "games.jsonl"
    file.write_text('{"board": [[1, 2], [3, null]], "level": 2}\n{"prompt": "1+1=", "answer": {"x": 2}}\n')
    own = (
        "launcher.device=cpu",
        f"data.path={file}",
        "rollout.agent_command=[python3]",
        "actor.max_tokens_per_micro_batch=99",
        "model.renderer=configs.quickstart_tools.renderer:CalculatorRenderer",
    )
    config = load_config(find_recipe("quickstart"), overrides=own, roles="rollout:1,actor:1")
    checked = check_run(config)
    assert (checked.num_prompts, checked.first_prompt.text) == (2, '{"board":[[1,2],[3,null]],"level":2}')
    (rollout,) = (task for task in checked.tasks if task.role == "rollout")
    assert rollout.inputs == ("prompts", "tasks", "ground_truth")
    made = {one.position: one for one in map(open_prompts(config, tmp_path).prompt_of_group, range(2))}
    assert json.loads(made[0].task) == {"board": [[1, 2], [3, None]], "level": 2}
    assert (made[0].tokens.numel(), made[0].ground_truth) == (1, "")
    assert (made[1].text, made[1].tokens.numel(), made[1].ground_truth) == ("1+1=", 4, '{"x":2}')


def test_held_out_tasks_have_seeds_that_training_has_not(tmp_path: Path) -> None:
    settings = ("data.source=own_tasks:Sums", "evaluate.path=null", "evaluate.source=own_tasks:Sums")
    rows = held_out_rows(recipe(tmp_path, *settings, "evaluate.max_prompts=3"))
    assert [row.fields["seed"] for row in rows] == [HELD_OUT_SEEDS] * 3
    with pytest.raises(ConfigError, match="^evaluate.max_prompts: 0 takes all tasks, but evaluate.source own_tasks:S"):
        check_run(recipe(tmp_path, *settings, roles="rollout:1,actor:1,evaluate:1"))


def test_failure_in_a_run_is_one_that_ends_it() -> None:
    with TaskSource(data("Broken"), seed=0, own_rollout=True) as source, pytest.raises(UserCodeFailed) as failed:
        source.read_row(4)
    assert failed.value.final


def test_data_are_others_when_the_source_has_other_options() -> None:
    assert data_identity(data("Sums")) == data_identity(data("Sums", shuffle=False))
    assert data_identity(data("Sums")) != data_identity(data("Sums", options={"most": 3}))
