"""`asyncflow.Trainer` as far as it starts no run: plans, settings in several forms, how a launcher's end is told."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from queue import Queue
from typing import Any

import pandas
import pytest
import yaml

import asyncflow
from asyncflow.errors import AsyncFlowError, ConfigError, RoleFailed
from launcher.config.paths import find_recipe
from launcher.trainer import Results

QUICKSTART = find_recipe("quickstart")
ROLES = {"rollout": 2, "actor": 1}
END = "import sys; print('step 1/2', flush=True); print({line!r}, file=sys.stderr); sys.exit({code})"


def as_dict() -> dict[str, Any]:
    """Return the quickstart as sections, with paths that hold anywhere."""
    sections: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text())
    for section in ("model", "data", "evaluate"):
        sections[section]["path"] = QUICKSTART.parent / sections[section]["path"]
    return sections


def test_a_plan_is_data_and_text_and_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import asyncflow, json, sys\n"
        "plan = asyncflow.Trainer('quickstart', roles={'rollout': 2, 'actor': 1, 'ref': 1}).plan()\n"
        "assert str(plan) == plan.describe()\n"
        "gangs = [(gang.name, gang.num_ranks) for gang in plan.checked.gangs if gang.role == 'rollout']\n"
        "print(json.dumps([gangs, plan.checked.first_prompt.text, 'torch' in sys.modules]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[["rollout-0", 1], ["rollout-1", 1]], "0+1=", False]
    assert not list(tmp_path.iterdir())


def test_a_recipe_a_dict_and_a_loaded_configuration_are_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named, given = {"actor.lr": 0.5, "rollout.on_swap": "finish"}, {"code_directory": str(QUICKSTART.parent)}
    of_recipe = asyncflow.Trainer("quickstart", roles=ROLES, overrides=named, steps=7).config
    of_dict = asyncflow.Trainer(as_dict() | given, roles="rollout:2,actor:1", overrides=named, steps=7).config
    assert of_recipe == of_dict == asyncflow.Trainer(of_recipe).config
    assert (of_recipe.steps, of_recipe.actor.lr, of_recipe.roles) == (7, 0.5, ROLES)
    assert asyncflow.Trainer(as_dict()).config.code_directory == str(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"config": {"name": object()}}, "config: a object has no form in YAML"),
        ({"config": {"name": "mine"}}, "steps, roles, model, data, schedule, rollout: missing in config; set "),
        ({"config": {"stepz": 1}}, "stepz: unknown key; did you mean 'steps'?"),
        ({"reward": "mine:score"}, "reward: 'mine:score' is not a function"),
        ({"data": "file.jsonl"}, "data: a str is not a list of rows"),
        ({"data": []}, "data: has no rows"),
        ({"data": [{"prompt": "1+1="}, {"prompt": {1}}]}, "data: row 2, field 'prompt': Object of type set is not"),
        (
            {"data": [{"prompt": "1"}], "overrides": {"data.path": "x"}},
            "overrides: data.path is given as data=..., too",
        ),
        ({"overrides": {"actor.lr": {1, 2}}}, "actor.lr: a set has no form in YAML"),
        ({"overrides": {"actor.lrr": 1}}, "did you mean 'lr'?"),
        ({"roles": {"rolout": 1}}, "did you mean 'rollout'?"),
        ({"roles": ["rollout:1"]}, "roles: ['rollout:1'] is not a dict; give "),
        ({"overrides": ["actor.lr=1"]}, "overrides: ['actor.lr=1'] is not a dict; give "),
        ({"config": "quickstrat"}, "did you mean quickstart.yaml?"),
    ],
)
def test_what_cannot_be_used_is_one_line(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _ = asyncflow.Trainer(**wrong).config
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def score(prompt: str, response: str, ground_truth: str) -> float:
    return float(response == ground_truth)


def test_rows_and_a_reward_are_settings_that_a_dict_need_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sections = as_dict()
    del sections["data"]["path"]
    trainer = asyncflow.Trainer(sections, data=[{"prompt": "1+1=", "answer": "2"}], reward=score)
    config = trainer.config
    assert Path(config.data.path or "").name == "data.jsonl"
    assert config.reward.function == "asyncflow_inputs:score"
    places = (config.code_directory or "").split(os.pathsep)
    assert (Path(places[0]) / "asyncflow_inputs.py").is_file()
    assert places[1:] == [str(tmp_path)], "and the caller's own stays"


def test_only_a_run_that_there_was_goes_on(tmp_path: Path) -> None:
    trainer = asyncflow.Trainer()
    for call in (lambda: trainer.fit(resume=True), lambda: trainer.results, trainer.wait):
        with pytest.raises(ConfigError, match="run"):
            call()
    trainer.stop()


@pytest.mark.parametrize(
    ("code", "line", "kind", "says"),
    [
        (1, "failed (step 1/2, 0:01): actor rank 0: boom", RoleFailed, "failed (step 1/2, 0:01): actor rank 0: boom"),
        (2, "Error: actor.lr: wrong", ConfigError, "actor.lr: wrong"),
        (9, "", RoleFailed, "step 1/2"),
    ],
)
@pytest.mark.timeout(60)
def test_a_failure_is_raised_with_the_launchers_line(
    code: int, line: str, kind: type[AsyncFlowError], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.trainer._CHILD", END.format(line=line, code=code))
    shown: list[str] = []
    with pytest.raises(kind) as caught:
        asyncflow.Trainer(run_dir=tmp_path).fit(show=shown.append)
    assert str(caught.value) == says
    assert shown[0] == "step 1/2"


@pytest.mark.timeout(60)
def test_a_stop_before_the_launcher_listens_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.trainer._CHILD", "import signal; print('starting', flush=True); signal.pause()")
    trainer = asyncflow.Trainer(run_dir=tmp_path)
    assert trainer.fit(show=lambda line: trainer.stop()).run_dir == tmp_path
    assert trainer.fit(show=lambda line: trainer.stop()).steps == []


@pytest.mark.timeout(60)
def test_a_show_that_fails_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.trainer._CHILD", "import signal; print('starting', flush=True); signal.pause()")

    def show(line: str) -> None:
        raise ZeroDivisionError(line)

    with pytest.raises(ZeroDivisionError, match="starting"):
        asyncflow.Trainer(run_dir=tmp_path).fit(show=show)


@pytest.mark.timeout(60)
def test_settings_of_a_trainer_that_nobody_keeps_are_there_until_its_child_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child is told to look once the trainer is forgotten, and says whether its settings are there."""
    child = "import os, sys; open({go!r}).read(); print(os.path.exists(sys.argv[-1]))"
    monkeypatch.setattr("launcher.trainer._CHILD", child.format(go=str(tmp_path / "go")))
    os.mkfifo(tmp_path / "go")
    shown: Queue[str] = Queue()
    asyncflow.Trainer(as_dict(), run_dir=tmp_path / "run").start(show=shown.put)
    gc.collect()
    (tmp_path / "go").write_text("look")
    assert shown.get(timeout=30) == "True"


def test_engines_are_of_a_subclass() -> None:
    with pytest.raises(ConfigError, match="kind: <class 'dict'> is not a subclass of asyncflow.LocalEngines"):
        asyncflow.Trainer("quickstart").init_engines(dict)


def test_where_no_run_wrote_nothing_is_finished(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/none: no run has written there"):
        _ = Results(tmp_path / "none").finished


def test_a_refusal_is_raised_and_not_shown_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.trainer._CHILD", END.format(line="Error: data.path: wrong", code=2))
    shown: list[str] = []
    trainer = asyncflow.Trainer(run_dir=tmp_path / "run", data=[{"prompt": "1+1=", "answer": "2"}])
    with pytest.raises(ConfigError, match="data.path: wrong"):
        trainer.fit(show=shown.append)
    assert shown == ["step 1/2"]
    assert not (tmp_path / "run").exists(), "nothing was started, and nothing is left"


def test_rows_of_a_resumed_run_are_those_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.trainer._CHILD", "")
    rows = [{"prompt": "1+1=", "answer": "2"}]
    asyncflow.Trainer(run_dir=tmp_path / "run", data=rows).fit()
    before = (tmp_path / "run" / "inputs" / "data.jsonl").read_text()
    assert json.loads(before) == rows[0]
    asyncflow.Trainer(run_dir=tmp_path / "run", data=iter(rows)).fit(resume=True)
    with pytest.raises(ConfigError, match="data: these are not the rows that the run began with"):
        asyncflow.Trainer(run_dir=tmp_path / "run", data=[*rows, *rows]).fit(resume=True)
    assert (tmp_path / "run" / "inputs" / "data.jsonl").read_text() == before


def test_the_model_is_that_of_the_newest_checkpoint_that_has_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model was saved yet"):
        _ = Results(tmp_path).model_path
    for step, has_model in ((4, True), (8, True), (12, False)):
        path = tmp_path / "checkpoints" / f"step_{step:06d}" / "hf"
        path.parent.mkdir(parents=True)
        if has_model:
            path.mkdir()
            (path / "config.json").touch()
    (tmp_path / "job.json").touch()  # the run is still going, and writes the newest one
    assert Results(tmp_path).model_path == tmp_path / "checkpoints/step_000008/hf"
    (tmp_path / "job.json").unlink()
    with pytest.raises(ConfigError, match=r"step_000012 has no hf/, because its run was stopped .*`asyncflow export /"):
        _ = Results(tmp_path).model_path


def test_results_are_a_dict_per_step_and_a_frame(tmp_path: Path) -> None:
    assert Results(tmp_path).steps == []
    lines = [{"step": 1, "loss": 0.5, "idle_fraction": {"actor": 0.25}}, {"step": 2, "loss": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3')
    assert Results(tmp_path).steps == lines
    assert Results(tmp_path / "none").frame().empty  # before the first step
    frame = Results(tmp_path).frame()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.loc[1, "idle_fraction/actor"] == 0.25
    assert list(frame.index) == [1, 2]
    assert frame["loss"].isna().tolist() == [False, True]
