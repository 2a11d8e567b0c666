"""Packaged recipes: each passes `--dry-run`, with a tiny model of its architecture in place of the real one."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy
import pytest
import yaml
from click.testing import CliRunner
from conftest import MODEL_CONFIG, write_model
from safetensors.numpy import save_file

from launcher.cli.launch import launch
from launcher.config.paths import packaged_recipes

RECIPES = sorted(packaged_recipes())
QWEN = {
    **MODEL_CONFIG,
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "vocab_size": 128,
}
"""Qwen2, small, with heads and layers that divide as those of the 7 B and 32 B models do."""


@pytest.fixture
def tiny_qwen(tmp_path: Path) -> Path:
    path = write_model(tmp_path / "qwen", fill=0.0)
    (path / "config.json").write_text(json.dumps(QWEN))
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {chr(code): code for code in range(128)}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    weights = {"model.embed_tokens.weight": numpy.zeros((128, 32), numpy.float32)}
    for layer in range(QWEN["num_hidden_layers"]):  # something that an adapter may belong to
        weights[f"model.layers.{layer}.self_attn.q_proj.weight"] = numpy.zeros((32, 32), numpy.float32)
    save_file(weights, path / "model.safetensors")
    return path


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_passes_the_dry_run(name: str, tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # on the machine that it is for
    monkeypatch.setattr("launcher.checks.models.is_installed", lambda module: True)
    monkeypatch.setattr("launcher.checks.models.ACCELERATED", ())
    recipe = yaml.safe_load(packaged_recipes()[name].read_text())
    if recipe.get("reward", {}).get("function") == "math_verify" and importlib.util.find_spec("math_verify") is None:
        pytest.skip("needs math-verify: pip install -e '.[math]'")
    fields = recipe["data"]
    if "reasoning_gym" in fields.get("source", "") and importlib.util.find_spec("reasoning_gym") is None:
        pytest.skip("needs reasoning-gym: pip install -e '.[reasoning-gym]'")
    row = {fields.get("prompt_field", "prompt"): "1+2=", fields.get("ground_truth_field", "answer"): "3"}
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(row) + "\n")
    settings = {"model.path": tiny_qwen, "launcher.device": "cpu"}
    if "source" not in fields:
        settings["data.path"] = data
    if "model" in recipe.get("reward", {}):
        settings["reward.model.path"] = _reward_model(tiny_qwen, tmp_path / "reward")
    if "evaluate" in recipe["roles"]:
        settings["evaluate.path"] = data
    if "weights_dir" in recipe.get("openai", {}):
        settings["openai.weights_dir"] = tmp_path / "served"
    if "renderer" in recipe.get("model", {}):  # which knows the words of the recipe's own model alone
        settings["rollout.trial"] = False
    own = [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]
    result = CliRunner().invoke(launch, [name, *own, "--run-dir", str(tmp_path / "run"), "--dry-run"])
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_evaluations_with_data_that_recipes_do_not_ship_are_accepted(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.checks.models.is_installed", lambda module: True)
    monkeypatch.setattr("launcher.checks.models.ACCELERATED", ())
    if importlib.util.find_spec("math_verify") is None:
        pytest.skip("needs math-verify: pip install -e '.[math]'")
    found = 0
    for name, path in packaged_recipes().items():
        recipe = yaml.safe_load(path.read_text())
        section = recipe.get("evaluate", {})
        asked = [one for one in (section, *section.get("sets", {}).values()) if "path" in one]
        if not asked or "evaluate" in recipe["roles"] or all((path.parent / one["path"]).exists() for one in asked):
            continue
        found += 1
        data = tmp_path / f"{name}.jsonl"
        data.write_text(json.dumps({recipe["data"]["prompt_field"]: "1+2=", "answer": "3"}) + "\n")
        for one in asked:
            one.pop("split", None)
            one["path"] = str(data)
        settings = {"model.path": tiny_qwen, "launcher.device": "cpu", "data.path": data}
        settings["roles.evaluate"] = recipe.get("vllm", {}).get("tensor_parallel_size", 1)
        settings["evaluate"] = json.dumps(section)
        own = [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]
        result = CliRunner().invoke(launch, [name, *own, "--run-dir", str(tmp_path / "run"), "--dry-run"])
        assert result.exit_code == 0, result.output
    assert found == 7


def _reward_model(policy: Path, path: Path) -> Path:
    """Write a reward model with the policy's tokens."""
    shutil.copytree(policy, path)
    (path / "config.json").write_text(json.dumps({**QWEN, "architectures": ["Qwen2ForSequenceClassification"]}))
    weights = {"model.embed_tokens.weight": (128, 32), "score.weight": (1, 32)}
    save_file({name: numpy.zeros(shape, numpy.float32) for name, shape in weights.items()}, path / "model.safetensors")
    return path
