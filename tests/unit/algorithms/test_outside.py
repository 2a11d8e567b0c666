"""An algorithm outside the package: its class, its own settings, checked before anything starts."""

import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asyncflow.errors import ConfigError
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.config.rules import check_batch_sizes
from launcher.plan.scenario import Training
from tq.columns import Column, PackedBatch
from workers.algorithms.load_algorithm import load_algorithm, outside_algorithm
from workers.rows.packed_rows import sample_columns, samples_of
from workers.settings.algorithms import GRPOConfig, OutsideConfig
from workers.settings.dataflow import place_tasks
from workers.settings.run import RunConfig
from workers.tasks.graph import graph_of

EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_algorithm.py"
NAME = "custom_algorithm:SoftGated"
NAMED = f"algorithm.name={NAME}"
REFUSED = """
from dataclasses import replace

from tq.columns import Column
from workers.algorithms.algorithm import Algorithm
from workers.settings.algorithms import DAPOConfig, GRPOConfig, KlLossConfig, PPOConfig, RLOOConfig
from workers.algorithms.algorithm import GRPO

class Bare(GRPO):
    pass

class Fours(GRPO):
    class Config(GRPOConfig):
        name: str = "grpo"
        min_group_size = property(lambda self: 4)

    def __init__(self, config, **how):
        super().__init__(config, **how)
        self.whole_step = True

    def advantages(self, batch, *, group_size):
        assert group_size >= 4
        return super().advantages(batch, group_size=group_size)

class Nothing(GRPO):
    class Config(Fours.Config):
        min_group_size = property(lambda self: "two")

class WithCritic(GRPO):
    Config = PPOConfig

class InReward(GRPO):
    Config = RLOOConfig

class Spread(GRPO):
    # Has a column of its own, from its advantages to its loss.

    class Config(GRPOConfig):
        per_token: bool = False
        loses: str = ""
        adds: bool = True

        def tasks(self, *, old_log_probs=False):
            *others, advantages, train = super().tasks(old_log_probs=old_log_probs)
            if self.loses == "everything":
                return "no tasks"
            if self.loses == "rewards":
                return (others[0], advantages, train)
            if self.loses == "a column":
                others[0] = replace(others[0], outputs=others[0].outputs[1:])
            advantages = replace(advantages, outputs=(*advantages.outputs, "spread"))
            return (*others, advantages, replace(train, inputs=(*train.inputs, "spread")))

    def advantages(self, batch, *, group_size):
        made = super().advantages(batch, group_size=group_size)
        if not self._config.adds:
            return made
        values = made["advantages"].values
        own = values.repeat_interleave(2).chunk(len(values)) if self._config.per_token else values[:, None]
        return {**made, "spread": Column.of_rows(list(own))}

class Priced(GRPO):
    Config = DAPOConfig

def function():
    pass
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the example, beside which no module of ours is hidden."""
    shutil.copy(EXAMPLE, tmp_path)
    (tmp_path / "refused_algorithms.py").write_text(REFUSED)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("ASYNCFLOW_CODE_DIRECTORY", str(tmp_path))
    yield tmp_path
    for name in ("custom_algorithm", "refused_algorithms"):
        sys.modules.pop(name, None)


def configured(code: Path, *settings: str) -> RunConfig:
    own = (f"algorithm.name={NAME}", f"code_directory={code}", *settings)
    return load_config(find_recipe("quickstart"), overrides=own)


def test_a_class_of_ones_own_is_loaded_with_its_settings_also_in_a_worker(code: Path) -> None:
    config = configured(code, "algorithm.tau_negative=1.5")
    assert isinstance(config.algorithm, OutsideConfig) and config.algorithm.kl_coef == 0.001
    found = config.algorithm.model_dump()
    assert (found["tau_positive"], found["tau_negative"]) == (1.0, 1.5)
    config.save(code)
    again = RunConfig.load(code)
    assert again == config
    assert [task.inputs for task in graph_of(again) if task.name.startswith("compute_adv")] == [("rewards",)]
    algorithm = load_algorithm(again.algorithm, again.rollout)
    columns = {
        **sample_columns([torch.tensor([0])] * 2, [torch.tensor([0])] * 2),
        "rollout_log_probs": Column.of_scalars(torch.tensor([-1.0, -2.0])),
        "ref_log_probs": Column.of_scalars(torch.tensor([-1.0, -2.0])),
        "truncated": Column.of_scalars(torch.zeros(2, dtype=torch.bool)),
        "rewards": Column.of_scalars(torch.tensor([0.0, 1.0])),
    }
    batch = PackedBatch((0, 1), columns)
    batch = batch.with_columns(algorithm.advantages(batch, group_size=2))
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    algorithm.loss(samples_of(batch), device=torch.device("cpu"))(new, torch.zeros(2)).backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx((-batch["advantages"].values).tolist()), "at ratio 1 the gate is open"


def test_groups_too_small_for_it_are_refused_and_a_plan_knows_that_it_trains_whole_steps(code: Path) -> None:
    config = configured(code, "algorithm.name=refused_algorithms:Fours", "schedule.n_samples_per_prompt=2")
    config.save(code)
    for each in (config, RunConfig.load(code)):
        with pytest.raises(ConfigError, match=r"2 is too few for refused_.*:Fours to compare; give 4"):
            check_batch_sizes(each)
        training = Training.by_role(each)["actor"]
        assert training.whole_step and not training.streams
    plain = configured(code)
    check_batch_sizes(plain)
    assert (plain.algorithm.min_group_size, Training.by_role(plain)["actor"].whole_step) == (2, False)


def test_the_launcher_imports_no_torch_for_it(code: Path) -> None:
    program = (
        "import sys; from launcher.config.load_config import load_config\n"
        "from launcher.config.paths import find_recipe\n"
        f"config = load_config(find_recipe('quickstart'), overrides=[{NAMED!r}, 'code_directory={code}'])\n"
        "assert config.algorithm.model_dump()['tau_negative'] == 1.05\n"
        "assert 'torch' not in sys.modules and 'custom_algorithm' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "section", "message"),
    [
        (NAME, {"tau_negtive": 1.0}, "algorithm.tau_negtive: unknown key; did you mean 'tau_negative'?"),
        (NAME, {"zzz": 1.0}, f"algorithm.zzz: unknown key; {NAME} has name kl_coef"),
        (NAME, {"tau_negative": -1}, "algorithm.tau_negative: -1 cannot be used; it must be greater than 0"),
        (NAME, {"off_policy": {"cap": 0.1}}, "algorithm.off_policy.cap: 0.1 cannot be used"),
        ("custom_algorithm:SoftGate", {}, "algorithm.name: custom_algorithm:SoftGate is not an algorithm; derive it"),
        ("custom_algorithm:Nothing", {}, "defines no 'Nothing'"),
        ("no_such_module:Class", {}, "algorithm.name: no module 'no_such_module'"),
        ("refused_algorithms:function", {}, "is not a class"),
        ("refused_algorithms:Bare", {}, "has no Config derived from workers.settings.algorithms.KlLossConfig"),
        ("refused_algorithms:Nothing", {}, "min_group_size of its Config is 'two'; give 1 or more responses"),
        ("refused_algorithms:WithCritic", {}, "has a critic, or its KL penalty in the reward"),
        ("refused_algorithms:InReward", {}, "has no Config derived from workers.settings.algorithms.KlLossConfig"),
    ],
)
def test_what_cannot_be_used_is_one_line(code: Path, name: str, section: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        outside_algorithm(name, {"name": name, **section})
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_what_the_child_refuses_reaches_the_user(code: Path) -> None:
    with pytest.raises(ConfigError, match=r"^algorithm\.tau_negtive: unknown key; did you mean 'tau_negative'\?$"):
        configured(code, "algorithm.tau_negtive=1.5")


def test_a_setting_that_yaml_made_something_else_is_refused(code: Path) -> None:
    for value in ("true", ".inf"):
        with pytest.raises(ConfigError, match=r"^algorithm\.tau_negative: "):
            configured(code, f"algorithm.tau_negative={value}")
    assert math.isfinite(configured(code).algorithm.model_dump()["tau_negative"])


def test_a_config_adds_columns_to_the_tasks_that_its_class_computes(code: Path) -> None:
    config = configured(code, "algorithm.name=refused_algorithms:Spread", "actor.num_mini_batches=2")
    config.save(code)
    for each in (config, RunConfig.load(code)):
        graph = {task.name: task for task in graph_of(each)}
        assert graph["compute_advantages_and_returns"].outputs == ("advantages", "spread")
        assert graph["actor_train"].inputs[-1] == "spread" and "actor_log_probs" in graph
        (train,) = (task for task in place_tasks(graph.values(), ("rollout", "actor", "ref")) if task.role == "actor")
        assert "spread" not in train.inputs, "the actor computes it itself"
        apart = {task.role: task for task in place_tasks(graph.values(), ("rollout", "actor", "advantages"))}
        assert "spread" in apart["advantages"].outputs and "spread" in apart["actor"].inputs
    columns = {
        **sample_columns([torch.tensor([0])] * 2, [torch.tensor([0, 0])] * 2),
        "rewards": Column.of_scalars(torch.tensor([0.0, 1.0])),
    }
    made = load_algorithm(config.algorithm, config.rollout).advantages(PackedBatch((0, 1), columns), group_size=2)
    samples = samples_of(PackedBatch((0, 1), {**columns, **made}))
    assert samples["spread"].values.tolist() == samples["advantages"].values.tolist(), "so the loss has it"
    assert graph_of(configured(code)) == GRPOConfig(kl_coef=0.001).tasks()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["loses=everything"], "tasks() of its Config returned 'no tasks'; return a tuple of Task"),
        (["loses=rewards"], "tasks() of its Config are actor_rollout compute_advantages_and_returns actor_train"),
        (["loses=a column"], "tasks() of its Config changes actor_rollout; it may add inputs and outputs to compute_"),
        (["adds=false"], "{'spread': Column} with a number per row"),
        (["per_token=true"], "{'spread': Column} with a number per row"),
    ],
)
def test_tasks_that_a_run_cannot_have_are_one_line(code: Path, settings: list[str], message: str) -> None:
    own = [f"algorithm.{setting}" for setting in settings]
    with pytest.raises(ConfigError) as refused:
        configured(code, "algorithm.name=refused_algorithms:Spread", *own)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_config_derived_from_a_built_in_one_has_its_checks(code: Path) -> None:
    with pytest.raises(ConfigError, match=r"^algorithm.overlong_buffer_tokens: 500 are more than the longest response"):
        configured(code, "algorithm.name=refused_algorithms:Priced", "algorithm.overlong_buffer_tokens=500")
