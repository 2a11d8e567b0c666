"""What every training engine must do: `from asyncflow.testing.training import *` in a test module that has `ADAPTERS`.

An engine may need several processes, or may clash with other engines. So the suite has two halves: `rank` is a separate
process that opens the engine, does everything and records the results; the tests compare these with plain PyTorch, for
each adapter, layout and family of models.
"""

import importlib.util
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from asyncflow.testing.adapter import ADAPTER
from asyncflow.testing.plain import Plain
from asyncflow.testing.train_adapter import TrainAdapter
from workers.engines.lora import CONFIG_FILE, PREFIX, A, B, adapter_shapes, adapter_targets, write_adapter
from workers.settings.lora import LoraConfig

# Random models of two layers, and their results in float64.
#
# Legend of shapes: P prompt tokens, R response tokens.

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
}
EOS = 1
VOCABULARY = 13
# Longest prompt plus response of the models (tokens).
MAX_POSITIONS = 64


def save_tiny_model(path: Path, family: str, *, seed: int, changes: Mapping[str, Any]) -> Path:
    """Write a model whose responses vary widely in length; returns its directory."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.3,
        "tie_word_embeddings": family == "llama",
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(seed)
    model_class(config_class(**{**settings, **changes})).save_pretrained(path)
    return path


def save_adapted_model(path: Path, base: Path, lora: LoraConfig, *, seed: int) -> Path:
    """Write a model with a random adapter merged into it, in float64, and beside it the adapter in peft's form; returns
    its directory."""
    weights = {name: weight.double() for name, weight in load_file(base / "model.safetensors").items()}
    targets = adapter_targets({name: tuple(weight.shape) for name, weight in weights.items()}, lora)
    random = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=random) * 0.2 for name, shape in adapter_shapes(targets, lora.rank).items()
    }
    for module in targets:
        a, b = (tensors[PREFIX + module + end] for end in (A, B))
        weights[f"{module}.weight"] += lora.scaling * (b.double() @ a.double())
    shutil.copytree(base, path)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    write_adapter(path / ADAPTER, tensors, lora, targets, base=str(base))
    return path


def base_of(adapted: Path) -> Path:
    """Return the base of a model that `save_adapted_model` wrote."""
    return Path(json.loads((adapted / ADAPTER / CONFIG_FILE).read_text())["base_model_name_or_path"])


class Reference:
    """A model in float64, without cache, batch or padding."""

    def __init__(self, path: Path, *, temperature: float) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
        self._temperature = temperature

    @torch.no_grad()
    def log_probs(self, prompt_P: Tensor, response_R: Tensor) -> Tensor:
        """Return float64 [R]: a response's log-probabilities under the tempered distribution."""
        tokens = torch.cat([prompt_P, response_R])
        logits = self._model(tokens.unsqueeze(0)).logits[0, prompt_P.numel() - 1 : -1] / self._temperature
        picked: Tensor = logits.log_softmax(-1).gather(-1, response_R.unsqueeze(-1)).squeeze(-1)
        return picked

    @torch.no_grad()
    def likeliest(self, prompt_P: Tensor, response_R: Tensor) -> Tensor:
        """Return int64 [R]: the most likely token in the place of each of a response's."""
        tokens = torch.cat([prompt_P, response_R])
        found: Tensor = self._model(tokens.unsqueeze(0)).logits[0, prompt_P.numel() - 1 : -1].argmax(-1)
        return found


# For all families of a layout, on a busy machine.
DEADLINE_S = 800
pytestmark = pytest.mark.timeout(DEADLINE_S + 60)


@dataclass
class Trained:
    adapter: TrainAdapter
    model_dir: Path  # the initial model
    out: Path  # holds `export`
    ranks: list[dict[str, Any]]  # results of each rank, see rank.py
    plain: Plain  # plain PyTorch, with the same model


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "trained" in metafunc.fixturenames:
        adapters: list[TrainAdapter] = metafunc.module.ADAPTERS
        cases = [
            pytest.param((each, layout, family), id=f"{each.name}-{layout}-{family}", marks=each.marks(layout))
            for each in adapters
            for layout in each.layouts
            for family in each.families
        ]
        metafunc.parametrize("trained", cases, indirect=True)


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TrainAdapter, str], Path]:
    """Return a function that runs a layout once and gives its directory."""
    roots: dict[str, Path] = {}
    done: set[tuple[str, str]] = set()

    def run(adapter: TrainAdapter, layout: str) -> Path:
        if adapter.name not in roots:
            roots[adapter.name] = root = tmp_path_factory.mktemp(adapter.name)
            for family in adapter.families:
                save_tiny_model(root / "models" / family, family, seed=0, changes=adapter.model)
        root = roots[adapter.name]
        if (adapter.name, layout) not in done:
            done.add((adapter.name, layout))
            for family in adapter.families:
                (root / layout / family).mkdir(parents=True)
            _run(adapter, layout, root)
        return root

    return run


@pytest.fixture
def trained(request: pytest.FixtureRequest, run_ranks: Callable[[TrainAdapter, str], Path]) -> Trained:
    adapter, layout, family = request.param
    for package in adapter.packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    root = run_ranks(adapter, layout)
    out, model_dir = root / layout / family, root / "models" / family
    files = [out / f"rank-{rank}.pt" for rank in range(adapter.num_ranks(layout))]
    ranks = [torch.load(file, weights_only=False) for file in files if file.exists()]
    assert len(ranks) == len(files), f"ranks of {adapter.name} failed: see the first test of this layout"
    return Trained(adapter, model_dir, out, ranks, Plain.of(model_dir, adapter.lora))


def _run(adapter: TrainAdapter, layout: str, root: Path) -> None:
    kind = type(adapter)
    found = Path(inspect.getfile(kind)).parents[kind.__module__.count(".")]
    paths = [str(found), *filter(None, sys.path)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(paths)}
    module = [sys.executable, "-m", "asyncflow.testing.rank", f"{kind.__module__}:{kind.__name__}", layout]
    processes = [
        subprocess.Popen([*module, str(rank), str(root)], env=environment) for rank in range(adapter.num_ranks(layout))
    ]
    try:
        assert [process.wait(DEADLINE_S) for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def whole(trained: Trained, key: str) -> dict[str, Tensor]:
    """Assemble the ranks' shards; every element must come from some rank, and be equal on all ranks that hold it."""
    tensors: dict[str, Tensor] = {}
    for rank in trained.ranks:
        for name, shape, slices, values in rank[key]:
            tensor = tensors.setdefault(name, torch.full(shape, float("nan")))
            known = tensor[slices]
            assert bool((known.isnan() | (known == values)).all()), f"{name}: ranks hold different values"
            tensor[slices] = values
    return tensors


def test_log_probs_are_those_of_a_float64_model(trained: Trained) -> None:
    for rank in trained.ranks:
        for rows, actual in rank["log_probs"]:
            expected = torch.cat([trained.plain.log_probs[row] for row in rows] or [torch.zeros(0)])
            assert actual.dtype == torch.float32 and not actual.requires_grad
            torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=trained.adapter.tolerance)


def test_updates_are_those_of_one_plain_process(trained: Trained) -> None:
    for rank in trained.ranks:
        assert rank["counted"] == len(rank["updates"])
        for (norm, lr), (expected_norm, expected_lr) in zip(rank["updates"], trained.plain.updates, strict=True):
            assert abs(norm / expected_norm - 1) < 1e-4
            assert lr == expected_lr
    actual = whole(trained, "trained")
    assert actual.keys() == trained.plain.weights.keys()
    for name, expected in trained.plain.weights.items():
        torch.testing.assert_close(actual[name], expected, rtol=1e-4, atol=2e-6, msg=name)


def test_log_probs_follow_the_weights(trained: Trained) -> None:
    """A forward pass without a backward pass must not leave anything behind that an update does not change."""
    for rank in trained.ranks:
        for rows, actual in rank["trained_log_probs"]:
            expected = torch.cat([trained.plain.trained_log_probs[row] for row in rows] or [torch.zeros(0)])
            torch.testing.assert_close(
                actual.double(), expected.double(), rtol=1e-3, atol=20 * trained.adapter.tolerance
            )


def test_shards_make_up_all_parameters(trained: Trained) -> None:
    stored = dict(AutoModelForCausalLM.from_pretrained(trained.model_dir).named_parameters())
    initial = whole(trained, "initial")
    assert initial.keys() == stored.keys()
    for name, value in initial.items():
        assert value.equal(stored[name]), name
    replicas = {rank["replica"] for rank in trained.ranks}
    if len(replicas) == len(trained.ranks) and trained.adapter.shards_over_replicas:
        elements = sum(values.numel() for rank in trained.ranks for *_, values in rank["initial"])
        assert elements == sum(value.numel() for value in stored.values()), "an element is held twice"


def test_a_rank_without_rows_takes_part(trained: Trained) -> None:
    for rank in trained.ranks:
        rows, actual = rank["log_probs"][1]
        assert (len(actual) == 0) == (rank["replica"][0] > 0) == (not rows)


def test_an_abandoned_step_leaves_nothing(trained: Trained) -> None:
    """The first update's norm (compared above) would contain the abandoned gradients."""
    assert [rank["abandoned"] for rank in trained.ranks] == [0.0] * len(trained.ranks)


def test_a_loaded_state_goes_on_exactly(trained: Trained) -> None:
    assert [rank["resumed"] for rank in trained.ranks] == [True] * len(trained.ranks)


def test_a_sleep_in_the_middle_of_a_step_changes_no_bit(trained: Trained) -> None:
    """`SleepingTrainer`, if the engine is one."""
    for rank in trained.ranks:
        if rank["slept"] is not None:
            assert rank["slept"]["same"]
            assert rank["slept"]["awake"] > 0 and rank["slept"]["asleep"] == 0


def test_ranks_together_write_the_export_of_a_single_process(trained: Trained) -> None:
    """`export_share`, if the engine has it."""
    whole, shared = trained.out / "export", trained.out / "shared"
    for path in whole.rglob("*") if shared.is_dir() else ():
        assert path.is_dir() or (shared / path.relative_to(whole)).read_bytes() == path.read_bytes(), path.name


def test_export_is_loaded_by_transformers(trained: Trained) -> None:
    models: Any = AutoModelForCausalLM
    loaded, info = models.from_pretrained(trained.out / "export", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    expected = whole(trained, "trained")
    # An export merges an adapter on the host, whatever device the engine merges on.
    atol = 0.0 if trained.adapter.lora is None else 1e-6
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter.data, expected[name], rtol=0, atol=atol, msg=name)


def test_bad_requests_are_refused_with_a_reason(trained: Trained) -> None:
    for rank in trained.ranks:
        silent = [name for name, said in rank["refused"].items() if not said]
        assert not silent, f"accepted: {silent}"
        assert "token 13" in rank["refused"]["unknown token"]
