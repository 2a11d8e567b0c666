"""What a version is with `lora`: frozen models on adapters, exports, and what is refused or said before a start."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncflow.errors import ConfigError
from asyncflow.testing.adapter import ADAPTER
from asyncflow.testing.training import base_of, save_adapted_model, save_tiny_model
from launcher.checks.placement import Devices
from launcher.checks.preflight import _check_adapters, check_run
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.config.rules import AT_START, check_rules
from launcher.request.dry_run import describe
from weightsync.config import ExportConfig
from workers.engines.base import EngineSetup
from workers.engines.hf.frozen import FrozenModel
from workers.roles import services
from workers.rows.packed_rows import Sequences
from workers.settings.lora import LoraConfig
from workers.settings.run import ModelConfig, RunConfig

CPU = torch.device("cpu")
LORA = LoraConfig(rank=4, alpha=6)
LORA_ON = 'lora={"rank": 4}'


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an adapter merged into it, and beside it the adapter; see `base_of`."""
    root = tmp_path_factory.mktemp("adapted")
    return save_adapted_model(root / "new", save_tiny_model(root / "base", "qwen2", seed=0, changes={}), LORA, seed=1)


@pytest.fixture
def batch() -> Sequences:
    return Sequences.from_turns([torch.arange(2, 7), torch.arange(3, 9)], [torch.arange(4, 9), torch.arange(2, 11)])


def configured(*settings: str) -> RunConfig:
    return load_config(find_recipe("quickstart"), overrides=[LORA_ON, *settings], roles="rollout:1,actor:1")


def frozen(path: Path, lora: LoraConfig | None = None, **given: Any) -> FrozenModel:
    return FrozenModel(path, ModelConfig(path=str(path)), temperature=0.7, device=CPU, lora=lora, **given)


@pytest.mark.parametrize("adopt", [True, False])
def test_frozen_model_with_an_adapter_computes_what_the_merged_model_does(
    adapted: Path, batch: Sequences, adopt: bool
) -> None:
    base = base_of(adapted)
    model, adapter = frozen(base, LORA), load_file(adapted / ADAPTER / "adapter_model.safetensors")
    assert {name: need.shape for name, need in model.weight_needs().items()} == {
        name: tuple(tensor.shape) for name, tensor in adapter.items()
    }
    torch.testing.assert_close(model.log_probs(batch), frozen(base).log_probs(batch), rtol=0, atol=0)
    model.load_weights(adapter, adopt=adopt)
    expected = frozen(adapted).log_probs(batch)
    torch.testing.assert_close(model.log_probs(batch), expected, rtol=0, atol=1e-5)
    assert (expected - frozen(base).log_probs(batch)).abs().max() > 0.1, "the adapter changes nothing"


def test_reference_that_is_an_adapter_is_written_and_read_as_one(
    adapted: Path, batch: Sequences, tmp_path: Path
) -> None:
    base = base_of(adapted)
    model = frozen(base, LORA)
    model.load_weights(load_file(adapted / ADAPTER / "adapter_model.safetensors"))
    model.save_weights(tmp_path / "reference")
    assert set(load_file(tmp_path / "reference" / "model.safetensors")) == set(model.weight_needs())
    again = frozen(base, LORA, weights_dir=tmp_path / "reference")
    assert again.log_probs(batch).equal(model.log_probs(batch))
    with pytest.raises(ConfigError, match="for which the adapter has no weight"):
        again.read_weights(base)


def test_engines_get_adapters_where_versions_are_adapters() -> None:
    run = configured()
    setup = EngineSetup(run, CPU, {}, run.rollout)
    assert setup.adapter == run.lora
    assert EngineSetup(run, CPU, {}, run.rollout, follows_policy=False).adapter is None
    merged = configured("weightsync.lora=merged")
    assert EngineSetup(merged, CPU, {}, merged.rollout).adapter is None


def test_dry_run_says_what_a_version_is_and_how_large() -> None:
    sizes, lines = [], []
    for settings in ((), ("weightsync.lora=merged",)):
        checked = check_run(configured(*settings))
        sizes.append(checked.version_bytes)
        text = describe(checked, source=Path("x"), run_dir=Path("y"))
        lines += [line for line in text.splitlines() if line.startswith("a version")]
    model = Path(configured().model.path)
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(model / "model.safetensors").items()}
    layers = [shape for name, shape in stored.items() if "_proj.weight" in name]
    assert sizes[0] == 4 * sum(4 * sum(shape) for shape in layers)
    assert sizes[1] == 4 * checked.num_parameters
    assert "an adapter of rank 4" in lines[0] and "merged" in lines[1]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("rollout.engine=vllm", "lora.rank=513"), "lora.rank: vLLM takes adapters of rank 512 at most"),
        (
            (
                "rollout.engine=openai", "openai.urls=[http://a:1]", "openai.weights_dir=/served",
                "openai.update=my:function",
            ),
            "openai.model: is missing; it names the adapter",
        ),
        (
            ("ref.engine=megatron", "ref.megatron.tensor_parallel=2", "algorithm.ref_update_interval=2"),
            "algorithm.ref_update_interval of ref.engine megatron, which takes whole weights",
        ),
    ],
    ids=["rank", "own update", "shared reference"],
)  # fmt: skip
def test_adapters_that_cannot_be_delivered_are_refused_and_merged_weights_are_not(
    settings: tuple[str, ...], reason: str
) -> None:
    rules = {message: broken for message, broken in AT_START.items() if "weightsync.lora" in message}
    with pytest.raises(ConfigError, match=reason):
        check_rules(configured(*settings), rules)
    check_rules(configured(*settings, "weightsync.lora=merged"), rules)


def test_adapters_for_vllm_over_ranks_are_refused_on_ascend_only() -> None:
    run = configured("rollout.engine=vllm", "vllm.tensor_parallel_size=2", "vllm.dtype=bfloat16")
    _check_adapters(run, Devices("cuda", 8))
    with pytest.raises(ConfigError, match="vllm.tensor_parallel_size 2 on npu.* crash .*weightsync.lora to merged"):
        _check_adapters(run, Devices("npu", 8))
    _check_adapters(configured("rollout.engine=vllm", "weightsync.lora=merged"), Devices("npu", 8))


def test_adapters_for_vllm_in_float32_are_refused_on_accelerators_only() -> None:
    run = configured("rollout.engine=vllm")
    _check_adapters(run, Devices("cpu", 1))
    for kind in ("cuda", "npu"):
        with pytest.raises(ConfigError, match=f"float32 on {kind}.*bfloat16.*weightsync.lora to merged"):
            _check_adapters(run, Devices(kind, 8))
        _check_adapters(configured("rollout.engine=vllm", "model.dtype=bfloat16"), Devices(kind, 8))
        _check_adapters(configured("rollout.engine=vllm", "weightsync.lora=merged"), Devices(kind, 8))
        _check_adapters(configured("rollout.engine=hf"), Devices(kind, 8))


def test_exports_of_adapters_are_directories_in_pefts_form(
    adapted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(services, "WeightFeed", lambda *_: None)
    monkeypatch.setattr(services, "WeightExporter", lambda *_, **named: given.update(named))
    context: Any = SimpleNamespace(
        config=configured(), run_dir=tmp_path, job_credentials=lambda: None, gang=SimpleNamespace(name="weights-0")
    )
    services._open_exporter(context, ExportConfig())
    tensors = load_file(adapted / ADAPTER / "adapter_model.safetensors")
    target = tmp_path / "step_000001"
    given["copy_rest"](target)
    given["write_weights"](target, {name: tuple(each.shape) for name, each in tensors.items()}, tensors.__getitem__)
    written = load_file(target / "adapter_model.safetensors")
    assert written.keys() == tensors.keys() and all(written[name].equal(tensors[name]) for name in tensors)
    assert json.loads((target / "adapter_config.json").read_text())["peft_type"] == "LORA"
