"""What each library really wrote about a run that was stopped, went back two steps and was resumed; nothing online."""

import importlib.util
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncflow.errors import ConfigError
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.loggers.backends import TABLE, LoggedRun, check_loggers, make_logger
from launcher.loggers.feed import feeding
from tests.support.logged_runs import add_steps, append, go_back, make_run
from workers.settings.run import LOGGERS, LoggerConfig, RunConfig

STEPS = [1, 2, 3, 4, 5, 6]
OPTIONS = {"wandb": {"mode": "offline"}, "swanlab": {"mode": "offline"}}
INSTALLED = [name for name in LOGGERS.built_in if importlib.util.find_spec(name) is not None]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of six steps: four, of which the last two were done again with a lower reward."""
    directory = tmp_path_factory.mktemp("logged") / "run"
    entries = [{"name": name, "options": OPTIONS.get(name, {})} for name in INSTALLED]
    make_run(directory, json.dumps(entries))
    loggers, said = RunConfig.load(directory).loggers, list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(directory / "trackio"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        with feeding(loggers, directory, said.append):
            add_steps(directory, 1, 4)
            append(directory / "evaluation.jsonl", {"step": 2, "lineage": 0, "accuracy": 0.25})
        go_back(directory, 2)
        add_steps(directory, 3, 6, lineage=1, reward=0.25)
        with feeding(loggers, directory, said.append):
            pass
    assert said == []
    yield directory


def needs(name: str) -> None:
    if name not in INSTALLED:
        pytest.skip(f"needs {name}: pip install -e '.[{name}]'")


def own_id(run_dir: Path, name: str) -> str:
    return str(json.loads((run_dir / "loggers" / f"{name}.json").read_text())["id"])


def leveldb_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a LevelDB log, as wandb and swanlab write them, behind a header of 7 bytes."""
    data, at, whole = path.read_bytes(), 7, b""
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""


def test_tensorboard_shows_each_step_once_and_of_steps_done_again_the_newest(run_dir: Path) -> None:
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(run_dir / "loggers" / "tensorboard"))
    events.Reload()
    rewards = [(event.step, event.value) for event in events.Scalars("reward_mean")]
    assert rewards == [(step, 0.5 if step < 3 else 0.25) for step in STEPS]
    assert [event.step for event in events.Scalars("evaluation/accuracy")] == [2]
    buckets = make_ndarray(events.Tensors("histograms/reward")[-1].tensor_proto)
    assert [tuple(bucket) for bucket in (buckets[0][[0, 2]], buckets[-1][[1, 2]])] == [(0.5, 3.0), (1.0, 1.0)]
    shown = events.Tensors(TABLE)[0].tensor_proto.string_val[0].decode()
    assert "step|group|prompt" in shown and "1 &#124; &lt;b&gt;" in shown


def test_wandb_has_one_run_with_each_step_once(run_dir: Path) -> None:
    needs("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted((run_dir / "loggers" / "wandb").glob("offline-run-*/*.wandb"))
    assert {file.stem for file in files} == {f"run-{own_id(run_dir, 'wandb')}"} and len(files) == 2
    steps, rewards, keys = [], [], set()
    for raw in (raw for file in files for raw in leveldb_records(file)):
        record = Record()
        record.ParseFromString(raw)
        if record.WhichOneof("record_type") == "history":
            steps.append(record.history.step.num)
            items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            rewards.append(float(items["reward_mean"]))
            keys |= items.keys()
    assert (steps, rewards) == (STEPS, [0.5] * 4 + [0.25] * 2)
    assert keys >= {"histograms/reward", "histograms/response_tokens", "evaluation/accuracy", "evaluation/step", TABLE}


def test_swanlab_has_one_run_with_each_step_once(run_dir: Path) -> None:
    needs("swanlab")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    files = sorted((run_dir / "loggers" / "swanlab").glob("run-*/*.swanlab"))
    assert {file.stem for file in files} == {f"run-{own_id(run_dir, 'swanlab')}"} and len(files) == 2
    scalars, media = [], set()
    for raw in (raw for file in files for raw in leveldb_records(file)):
        record = Record()
        record.ParseFromString(raw)
        if record.scalar.key == "reward_mean":
            scalars.append((record.scalar.step, record.scalar.value.number))
        media.add(record.media.key)
    assert scalars == [(step, 0.5 if step < 5 else 0.25) for step in STEPS]
    assert media >= {TABLE, "histograms/reward", "histograms/response_tokens"}


def test_mlflow_has_one_run_with_each_step_once(run_dir: Path) -> None:
    needs("mlflow")
    (run,) = (run_dir / "loggers" / "mlflow").glob(f"*/{own_id(run_dir, 'mlflow')}")
    lines = [line.split() for line in (run / "metrics" / "reward_mean").read_text().splitlines()]
    assert [(int(step), float(value)) for _, value, step in lines] == [
        (step, 0.5 if step < 5 else 0.25) for step in STEPS
    ]
    newest = json.loads((run / "artifacts" / "samples" / "step_000006.json").read_text())
    assert newest["columns"][:2] == ["step", "group"] and newest["data"][-1][:2] == [6, 6]
    assert newest["histograms"]["histograms/reward"] == {"0.5": 3, "1.0": 1}
    assert "rollout_batch_size" in (run / "artifacts" / "config.yaml").read_text()


def test_trackio_has_one_run_with_each_step_once(run_dir: Path) -> None:
    needs("trackio")
    rows: list[tuple[str, int, Any]] = []
    for file in (run_dir / "trackio").glob("*.db"):
        connection = sqlite3.connect(file)
        rows += connection.execute("select run_name, step, metrics from metrics").fetchall()
        connection.close()
    steps = [step for _, step, metrics in rows if "reward_mean" in json.loads(metrics)]
    assert (sorted(steps), {name for name, *_ in rows}) == (STEPS, {"run"})


def test_loggers_that_cannot_be_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for names, message in (
        (["no_such_module:Logger"], "loggers.0.name: no module 'no_such_module'"),
        (["json:load", "json:load"], "loggers.1.name: json:load is given twice"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_loggers([LoggerConfig(name=name) for name in names])
    monkeypatch.setattr("launcher.loggers.backends.is_installed", lambda name: False)
    with pytest.raises(ConfigError, match="trackio is not installed here; pip install"):
        check_loggers([LoggerConfig(name="trackio")])


@pytest.mark.parametrize(
    ("logger", "message"),
    [
        ("{name: wandb, options: {projct: sums}}", "loggers.0.options.projct: unknown key; did you mean 'project'?"),
        ("{name: wandb, options: {mode: off}}", "loggers.0.options.mode: False cannot be used; it must be 'online', "),
        ("{name: swanlab, options: {entity: us}}", "loggers.0.options.entity: unknown key; swanlab has project name"),
        ("{name: tensorboard, options: {log_dir: 3}}", "loggers.0.options.log_dir: 3 cannot be used; it must be a "),
        ("{name: mlflow, options: {project: sums}}", "loggers.0.options.project: unknown key; mlflow has tracking_uri"),
        ("{name: trackio, options: {private: maybe}}", "loggers.0.options.private: 'maybe' cannot be used; it must be"),
    ],
)
def test_an_option_that_a_logger_has_not_is_refused_when_the_configuration_is_read(logger: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(find_recipe(None), overrides=[f"loggers=[{logger}]"])
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)


def test_options_reach_the_library_in_place_of_what_a_run_says(tmp_path: Path) -> None:
    needs("tensorboard")
    run = LoggedRun(tmp_path, "sums", {})
    make_logger(LoggerConfig(name="tensorboard", options={"log_dir": str(tmp_path / "mine")}), run).close()
    assert [*(tmp_path / "mine").iterdir()]


def test_a_logger_is_named_alone_or_with_options() -> None:
    config = load_config(find_recipe(None), overrides=["loggers=[mlflow, {name: wandb, options: {mode: offline}}]"])
    assert [(each.name, each.options) for each in config.loggers] == [("mlflow", {}), ("wandb", {"mode": "offline"})]
