"""Engines, policies and loggers outside of the package: what a run refuses of them, before anything starts."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncflow.errors import ConfigError
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from tq.backends.backend import load_backend
from tq.config import BackendConfig
from workers.roles.own_classes import resolving

EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_engine.py"
PLAIN = {"engine": "custom_engine:PlainEngine"}
CLASSES = """
from pydantic import Field
from asyncflow.settings import Settings

class Kept:
    class Config(Settings):
        bucket: str = "rows"
    name, in_process = "kept", False
    def __init__(self, config, prefix):
        self.options = config.options
    def store(self): ...
    def load(self): ...
    def delete(self): ...
    def close(self): ...
class Half:
    def submit(self): ...

class Reference:
    class Config(Settings):
        pass
    adopts_weights = False
    def log_probs(self, batch): ...
    def load_weights(self, weights, *, adopt=False): ...
    def read_weights(self, weights_dir): ...
    def weight_needs(self): ...
    def save_weights(self, target): ...

def function():
    pass

class Printer:
    def __init__(self, run, width=80):
        self.width = width
    def log(self, step, metrics): ...
    def show(self, step, rows, histograms): ...
    def rewind(self, step): ...
    def close(self): ...

class Typed(Printer):
    class Config(Settings):
        width: int = Field(80, ge=1)

class Untyped(Printer):
    Config = {"width": 80}

class Wide:
    window = 2.0
    def pick(self, ready, want): ...
    def assign(self, items, assigned): ...

class Unmade(Wide):
    def __init__(self, spare=1):
        raise RuntimeError("no\\nspare")
"""
ALGORITHMS = """
from pydantic import model_validator
from tq.columns import Column
from workers.algorithms.algorithm import Algorithm
from workers.settings.algorithms import GRPOConfig, KlLossConfig
from workers.algorithms.algorithm import GRPO

class Own(GRPO):
    class Config(GRPOConfig):
        name: str = "grpo"

class Abstract(Algorithm):
    Config = KlLossConfig

class Checks(GRPO):
    class Config(Own.Config):
        def check(self, run):
            raise RuntimeError("boom\\nand more")

class Validates(GRPO):
    class Config(Own.Config):
        @model_validator(mode="after")
        def validated(self):
            raise KeyError("zz")

class Requires(GRPO):
    class Config(Own.Config):
        need: int

class Text(GRPO):
    class Config(Own.Config):
        advantage_inputs = property(lambda self: "rewards")

class Unmade(Own):
    def __init__(self, config, **how):
        raise SystemExit(3)

class Compares(Own):
    def advantages(self, batch, *, group_size):
        raise ZeroDivisionError

class Shapeless(Own):
    def advantages(self, batch, *, group_size):
        return {"advantages": Column.of_scalars(batch["rewards"].values[1:])}
"""

FIELDS = (
    "algorithm.name", "rollout.engine", "evaluate.engine", "actor.engine", "ref.engine", "tq.policy", "tq.backend.kind",
    "loggers.0.name",
)  # fmt: skip


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the example and other classes."""
    shutil.copy(EXAMPLE, tmp_path)
    (tmp_path / "outside_classes.py").write_text(CLASSES)
    (tmp_path / "outside_algorithms.py").write_text(ALGORITHMS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("ASYNCFLOW_CODE_DIRECTORY", str(tmp_path))
    yield tmp_path
    for name in ("custom_engine", "outside_classes", "outside_algorithms"):
        sys.modules.pop(name, None)


def test_an_engine_s_settings_are_checked_without_torch_in_the_launcher(code: Path) -> None:
    named = "'rollout.engine=custom_engine:PlainEngine'"
    program = (
        "import sys; from launcher.config.load_config import load_config\n"
        "from launcher.config.paths import find_recipe\n"
        f"config = load_config(find_recipe('quickstart'), overrides=[{named}, 'code_directory={code}'])\n"
        "assert config.rollout.engine_options == {'tokens_per_step': 4}, config.rollout\n"
        "assert 'torch' not in sys.modules and 'custom_engine' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        (
            "rollout",
            {**PLAIN, "engine_options": {"token_per_step": 2}},
            "rollout.engine_options.token_per_step: unknown key; did you mean 'tokens_per_step'?",
        ),
        (
            "rollout",
            {**PLAIN, "engine_options": {"tokens_per_step": 0}},
            "rollout.engine_options.tokens_per_step: 0 cannot be used; it must be greater than or equal to 1",
        ),
        ("rollout", {**PLAIN, "on_swap": "keep"}, "rollout.on_swap: keep needs an engine that keeps keys"),
        ("evaluate", {"engine": "custom_engine:Plain"}, "defines no 'Plain'"),
        (
            "rollout",
            {"engine": "outside_classes:Half"},
            "rollout.engine: outside_classes:Half lacks abort cancel close",
        ),
        ("actor", PLAIN, "actor.engine: custom_engine:PlainEngine lacks export_hf forward_backward"),
        (
            "ref",
            {"engine": "outside_classes:function"},
            "ref.engine: outside_classes:function lacks load_weights log_probs",
        ),
        ("tq", {"policy": "outside_classes:Half"}, "tq.policy: policy 'outside_classes:Half'"),
        ("tq", {"policy": "no_such_module:Policy"}, "tq.policy: no module 'no_such_module'"),
        (
            "tq",
            {"policy": "outside_classes:Unmade"},
            "tq.policy: policy 'outside_classes:Unmade': RuntimeError: no spare",
        ),
        (
            "tq",
            {"backend": {"kind": "outside_classes:Half"}},
            "tq.backend.kind: outside_classes:Half lacks store load delete close",
        ),
        (
            "tq",
            {"backend": {"kind": "outside_classes:Kept", "options": {"buckt": "x"}}},
            "tq.backend.options.buckt: unknown key; did you mean 'bucket'?",
        ),
        ("loggers", ({"name": "outside_classes:Half"},), "loggers.0.name: outside_classes:Half lacks log"),
        (
            "loggers",
            ({"name": "outside_classes:Typed", "options": {"width": 0}},),
            "loggers.0.options.width: 0 cannot be used; it must be greater than or equal to 1",
        ),
        (
            "loggers",
            ({"name": "outside_classes:Typed", "options": {"widht": 9}},),
            "loggers.0.options.widht: unknown key; did you mean 'width'?",
        ),
        (
            "loggers",
            ({"name": "outside_classes:Printer", "options": {"widht": 9}},),
            "loggers.0.options: outside_classes:Printer cannot be made with widht: got an unexpected keyword",
        ),
        (
            "loggers",
            ({"name": "outside_classes:Untyped"},),
            "loggers.0.options: outside_classes:Untyped has no Config derived from asyncflow.settings.Settings",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line(code: Path, section: str, changes: Any, message: str) -> None:
    run = load_config(find_recipe("quickstart")).model_dump(mode="json")
    run[section] = changes if section == "loggers" else {**run[section], **changes}
    with pytest.raises(ConfigError) as refused:
        resolving(run, {}, FIELDS)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_engine_that_does_not_say_that_it_takes_adapters_gets_merged_weights_only(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load_config(find_recipe("quickstart"), overrides=['lora={"rank": 4}']).model_dump(mode="json")
    run["rollout"] |= PLAIN
    with pytest.raises(ConfigError, match="weightsync.lora: adapter cannot be used with rollout.engine custom_engine:"):
        resolving(run, {}, FIELDS)
    merged = run | {"weightsync": run["weightsync"] | {"lora": "merged"}}
    for taken in (merged, run):
        assert resolving(taken, {}, FIELDS).function()["rollout"] == {"tokens_per_step": 4}
        monkeypatch.setattr("custom_engine.PlainEngine.takes_adapters", True, raising=False)


def test_an_engine_that_cannot_sleep_takes_no_turns(code: Path) -> None:
    run = load_config(find_recipe("quickstart")).model_dump(mode="json")
    run |= {"roles": {"rollout": 1, "actor": 1}, "colocated": ["rollout", "actor"]}
    run["rollout"] |= PLAIN
    with pytest.raises(ConfigError, match="rollout.engine: custom_engine:PlainEngine lacks sleep wake;"):
        resolving(run, {}, FIELDS)


def test_nor_does_a_reference_that_the_actor_hosts(code: Path) -> None:
    run = load_config(find_recipe("quickstart")).model_dump(mode="json")
    run["ref"] |= {"engine": "outside_classes:Reference"}
    hosted = run | {"roles": {"rollout": 1, "actor": 1}, "colocated": ["rollout", "actor"]}
    with pytest.raises(ConfigError, match="ref.engine: outside_classes:Reference lacks sleep wake;"):
        resolving(hosted, {}, FIELDS)
    for other in (hosted | {"colocated": []}, hosted | {"roles": {"rollout": 1, "actor": 1, "ref": 1}}):
        assert resolving(other, {}, FIELDS).function()["ref"] == {}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Abstract", "algorithm.name: outside_algorithms:Abstract lacks advantages; docs/outside.md"),
        ("Checks", "algorithm.name: outside_algorithms:Checks raised RuntimeError: boom and more ("),
        ("Validates", "algorithm.name: outside_algorithms:Validates raised KeyError: 'zz' ("),
        ("Requires", "algorithm.need: missing; set it, outside_algorithms:Requires has no default"),
        ("Text", "advantage_inputs of its Config are 'rewards'; give a tuple of columns"),
        ("Unmade", "algorithm.name: outside_algorithms:Unmade raised SystemExit: 3 ("),
        ("Compares", "algorithm.name: outside_algorithms:Compares raised ZeroDivisionError ("),
        ("Shapeless", "algorithm.name: outside_algorithms:Shapeless.advantages returned {'advantages': Column"),
    ],
)
def test_algorithm_that_fails_is_refused_by_what_it_raised_before_anything_starts(
    code: Path, name: str, message: str
) -> None:
    run = load_config(find_recipe("quickstart")).model_dump(mode="json")
    with pytest.raises(ConfigError) as refused:
        resolving({**run, "algorithm": {"name": f"outside_algorithms:{name}"}}, {}, FIELDS)
    assert message in str(refused.value) and "\n" not in str(refused.value)
    if " raised " in message:
        assert "(" in str(refused.value) and "outside_algorithms.py:" in str(refused.value)


def test_run_whose_class_lost_a_setting_is_told_where_that_is_from(code: Path, tmp_path: Path) -> None:
    config = load_config(
        find_recipe("quickstart"), overrides=["algorithm.name=outside_algorithms:Own", f"code_directory={code}"]
    )
    config.save(tmp_path)
    saved = tmp_path / "config.yaml"
    saved.write_text(saved.read_text().replace("algorithm:\n", "algorithm:\n  lost: 1\n"))
    with pytest.raises(
        ConfigError, match=r"^algorithm\.lost: unknown key; .*config\.yaml holds the settings that the run "
    ):
        load_config(saved)


def test_a_run_keeps_the_options_that_classes_add(code: Path) -> None:
    loggers = "loggers=[tensorboard, {name: 'outside_classes:Typed'}]"
    backend = "tq.backend={kind: 'outside_classes:Kept'}"
    config = load_config(find_recipe("quickstart"), overrides=[loggers, backend, f"code_directory={code}"])
    assert [each.options for each in config.loggers] == [{}, {"width": 80}]
    assert config.tq.backend.options == {"bucket": "rows"}


def test_a_queue_without_a_run_checks_a_backend_s_options_too(code: Path) -> None:
    sys.path.insert(0, str(code))
    own: Any = load_backend(BackendConfig(kind="outside_classes:Kept"), "storage-0", "run-1")
    assert own.options == {"bucket": "rows"}
    with pytest.raises(ConfigError, match=r"^tq.backend.options.bucket: 3 cannot be used; it must be a valid string"):
        load_backend(BackendConfig(kind="outside_classes:Kept", options={"bucket": 3}), "storage-0", "run-1")


def test_a_policy_that_chooses_rows_is_refused_where_timing_must_not_matter(code: Path) -> None:
    settings = {"tq.policy": "outside_classes:Wide", "schedule.mode": "sync", "deterministic": "true"}
    with pytest.raises(ConfigError, match=r"^tq\.policy: outside_classes:Wide cannot be used with deterministic: true"):
        load_config(
            find_recipe("quickstart"),
            overrides=[*(f"{name}={value}" for name, value in settings.items()), f"code_directory={code}"],
        )
