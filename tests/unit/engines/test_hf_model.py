"""Models of transformers, built without memory for their parameters."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from asyncflow.errors import ConfigError
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from workers.engines.fsdp.sharding import FsdpEngine, FsdpFrozenModel, FsdpValueEngine
from workers.engines.hf.frozen import FrozenModel
from workers.engines.hf.model import check_stored, empty_causal_lm, parameter_aliases
from workers.engines.hf.weights import HfWeights
from workers.settings.engines import ActorConfig
from workers.settings.run import ModelConfig

CPU = torch.device("cpu")
TRAINING = ActorConfig().for_run(1)
ENGINES: dict[str, Callable[[Path], object]] = {
    "policy": lambda path: FsdpEngine(path, actor=ActorConfig(), temperature=1.0, device=CPU, seed=0),
    "reference": lambda path: FrozenModel(
        path, ModelConfig(path=str(path), dtype="float32"), temperature=1.0, device=CPU
    ),
    "shared reference": lambda path: FsdpFrozenModel(path, TRAINING, temperature=1.0, device=CPU, weights_dir=path),
    "critic": lambda path: FsdpValueEngine(path, TRAINING, device=CPU, seed=0),
}


def store(path: Path, changes: dict[str, Tensor]) -> None:
    weights = load_file(path / "model.safetensors")
    save_file({**weights, **changes}, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_refuse_what_they_would_drop(make_model_dir: Callable[..., Path], engine: str) -> None:
    path = make_model_dir("qwen3", tie_word_embeddings=True)
    old = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(2)}
    store(path, {**old, "lm_head.weight": load_file(path / "model.safetensors")["model.embed_tokens.weight"]})
    ENGINES[engine](path)
    store(path, {"model.layers.0.self_attn.q_proj.lora_A": torch.ones(2)})
    message = r"path: .* holds model.layers.0.self_attn.q_proj.lora_A, for which Qwen3ForCausalLM has no weight"
    with pytest.raises(ConfigError, match=message):
        ENGINES[engine](path)


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("engine", ENGINES)
def test_head_of_its_own_is_refused_where_the_model_ties_it(make_model_dir: Callable[..., Path], engine: str) -> None:
    path = make_model_dir("qwen3", tie_word_embeddings=True)
    store(path, {"lm_head.weight": load_file(path / "model.safetensors")["model.embed_tokens.weight"] + 1})
    if engine == "critic":  # it has a head of its own
        ENGINES[engine](path)
        return
    with pytest.raises(ConfigError, match=r"model.embed_tokens.weight and, with other values, lm_head.weight"):
        ENGINES[engine](path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    ENGINES[engine](path)


def test_buffer_in_a_file_must_be_what_the_model_has(make_model_dir: Callable[..., Path]) -> None:
    """Buffers are neither read nor sent to generators."""
    path = make_model_dir()
    model = empty_causal_lm(path, dtype=torch.float32, attention="sdpa")
    model.register_buffer("scale", torch.tensor([2.0]))
    store(path, {"scale": torch.tensor([2.0])})
    check_stored(model, HfWeights(path), parameter_aliases(model))
    store(path, {"scale": torch.tensor([3.0])})
    with pytest.raises(ConfigError, match="holds scale, for which Qwen2ForCausalLM has no weight"):
        check_stored(model, HfWeights(path), parameter_aliases(model))


def test_modules_of_other_threads_keep_their_memory_while_a_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[nn.Module] = []

    class Built:
        @staticmethod
        def from_config(*_: Any, **__: Any) -> nn.Module:
            other = threading.Thread(target=lambda: others.append(nn.Linear(2, 2)))
            other.start()
            other.join(timeout=30)
            return nn.Linear(2, 2)

    monkeypatch.setattr("workers.engines.hf.model.AutoModelForCausalLM", Built)
    model_dir = load_config(find_recipe("quickstart")).model.path
    built = empty_causal_lm(Path(model_dir), dtype=torch.float32, attention="sdpa")
    assert all(parameter.is_meta for parameter in built.parameters())
    assert len(others) == 1 and not any(parameter.is_meta for parameter in others[0].parameters())
    assert not any(parameter.is_meta for parameter in nn.Linear(2, 2).parameters())
