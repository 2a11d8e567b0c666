"""A tiny valid model directory, data file and configuration, made without torch."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import yaml
from safetensors.numpy import save_file

from workers.settings.run import RunConfig

sys.path.insert(0, str(Path(__file__).parent))  # tests import `made_run` and `planned` by name

MODEL_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 12,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def own_code_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where users' modules are looked for ends with the test."""
    monkeypatch.setenv("ASYNCFLOW_CODE_DIRECTORY", "")


@pytest.fixture(autouse=True)
def models_are_proven(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of the models here are a few, so that none could be proven; `test_model_proof` looks at the check."""
    if request.path.stem != "test_model_proof":
        monkeypatch.setattr("launcher.checks.preflight.check_proven", lambda *_: None)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A Hugging Face directory with 48 + 4 parameters."""
    return write_model(tmp_path / "model", fill=0.0)


@pytest.fixture
def data_file(tmp_path: Path) -> Path:
    """Three prompts."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(3)))
    return path


@pytest.fixture
def settings(model_dir: Path, data_file: Path) -> dict[str, Any]:
    """The content of a valid configuration."""
    return {
        "name": "tiny",
        "steps": 2,
        "roles": {"rollout": 2, "actor": 2},
        "model": {"path": model_dir.name},
        "data": {"path": data_file.name, "max_prompt_tokens": 32},
        "schedule": {"rollout_batch_size": 4, "n_samples_per_prompt": 4},
        "rollout": {"max_response_tokens": 4},
        "actor": {"micro_batch_size": 4},
        "launcher": {"device": "cpu"},
    }


@pytest.fixture
def write_config(tmp_path: Path, settings: dict[str, Any]) -> Callable[..., Path]:
    """Write the valid configuration with some sections updated; returns the file."""

    def write(**sections: Any) -> Path:
        for name, value in sections.items():
            if isinstance(value, dict) and isinstance(settings.get(name), dict):
                settings[name].update(value)
            else:
                settings[name] = value
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(settings, sort_keys=False))
        return path

    return write


def write_model(path: Path, *, fill: float) -> Path:
    """Write a model directory whose weights all are `fill`."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(MODEL_CONFIG))
    vocab = {char: index for index, char in enumerate("#012345678+=")}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "#"},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    weights = {
        "model.embed_tokens.weight": numpy.full((12, 4), fill, numpy.float32),
        "model.norm.weight": numpy.full((4,), fill, numpy.float32),
    }
    save_file(weights, path / "model.safetensors")
    return path


@pytest.fixture
def qwen(tmp_path: Path) -> RunConfig:
    """The 7B recipe with a config.json and no weights."""
    from planned import qwen_run

    return qwen_run(tmp_path)
