"""Model directories: complete, broken, alike."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import configs
from asyncflow.errors import ConfigError
from workers.engines.model_files import (
    BACKBONE,
    INDEX_FILE,
    check_model_dir,
    check_other_model_dir,
    check_trainable,
    eos_token_ids,
    max_positions,
    model_fingerprint,
    tensor_shapes,
)

QUICKSTART = Path(configs.__path__[0]) / "quickstart" / "model"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return Path(shutil.copytree(QUICKSTART, tmp_path / "model"))


def edit_config(model_dir: Path, **changes: object) -> None:
    file = model_dir / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_generation(model_dir: Path, **changes: object) -> None:
    """Change generation_config.json; config.json says nothing about it."""
    edit_config(model_dir, **dict.fromkeys(changes))
    file = model_dir / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def shard(model_dir: Path) -> None:
    """Split the weights over two files with an index."""
    weights = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    names = sorted(weights)
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: weights[name] for name in names if weight_map[name] == file}, model_dir / file)
    (model_dir / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


def test_complete_directories_pass(model_dir: Path) -> None:
    check_model_dir(model_dir)
    shard(model_dir)
    check_model_dir(model_dir)


def test_shapes_are_those_of_all_tensors() -> None:
    shapes = tensor_shapes(QUICKSTART / "model.safetensors")
    assert shapes["lm_head.weight"] == (16, 64)
    assert "__metadata__" not in shapes


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: shutil.rmtree(path), "does not exist; name a Hugging Face model directory"),
        (lambda path: (path / "config.json").unlink(), "cannot read .*config.json, the model's configuration: No such"),
        (lambda path: (path / "config.json").write_text("{"), "config.json is malformed JSON"),
        (lambda path: (path / "config.json").write_text("[]"), "config.json does not hold a JSON object"),
        (lambda path: edit_config(path, architectures=None), "names no architectures"),
        (lambda path: (path / "tokenizer.json").unlink(), "holds no tokenizer"),
        (lambda path: edit_config(path, architectures=[3]), "names no architectures"),
        (
            lambda path: edit_config(path, architectures=["BertModel"]),
            "is of a BertModel, which is no causal language model",
        ),
        (lambda path: edit_config(path, model_type=None), "names no model_type"),
        (lambda path: edit_generation(path, eos_token_id=None), "names no eos_token_id"),
        (lambda path: edit_generation(path, eos_token_id=99), "eos_token_id 99 of .* is no token of its 16"),
        (lambda path: edit_generation(path, eos_token_id=[1, "x"]), "eos_token_id 'x' of .* is no token of its 16"),
        (lambda path: (path / "tokenizer.json").write_text("version"), "tokenizer.json is not a tokenizer: expected"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), "tokenizer.json is not a tokenizer: Model missing"),
        (lambda path: (path / "tokenizer_config.json").write_text("{"), "tokenizer_config.json is malformed JSON"),
        (lambda path: (path / "tokenizer_config.json").write_text("[]"), "tokenizer_config.json does not hold a JSON"),
        (lambda path: (path / "model.safetensors").unlink(), r"holds no \*.safetensors weights; copy them"),
        (
            lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"),
            "convert pytorch_model.bin to safetensors",
        ),
        (lambda path: truncate(path / "model.safetensors"), "file not fully covered"),
        (lambda path: (path / "model.safetensors").write_bytes(b""), "header too small"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\2" + b"\0" * 7 + b"no"), "invalid JSON in header"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\2" + b"\0" * 7 + b"[]"), "invalid JSON in header"),
        (
            lambda path: (path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
            "is a Git LFS pointer, not the weights; run `git lfs pull`",
        ),
    ],
)
def test_damage_is_named(model_dir: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(model_dir)
    with pytest.raises(ConfigError, match=f"^model.path: .*{message}") as caught:
        check_model_dir(model_dir)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "part-1.safetensors").unlink(), "lacks 1 of 2 weight files, the first is part-1"),
        (lambda path: truncate(path / "part-1.safetensors"), "part-1.safetensors is not a complete safetensors file"),
        (lambda path: (path / INDEX_FILE).write_text("{}"), "has no weight_map"),
        (lambda path: (path / INDEX_FILE).write_text('{"weight_map": {"x": 3}}'), "puts x into 3, which is no file"),
        (lambda path: save_file({"x": torch.ones(1)}, path / "part-1.safetensors"), "it lacks .*, which model"),
    ],
)
def test_damage_of_shards_is_named(model_dir: Path, damage: Callable[[Path], object], message: str) -> None:
    shard(model_dir)
    damage(model_dir)
    with pytest.raises(ConfigError, match=message):
        check_model_dir(model_dir)


def test_end_of_a_response_is_generation_s_else_the_model_s(model_dir: Path) -> None:
    assert eos_token_ids(model_dir) == (1,)
    edit_config(model_dir, eos_token_id=2)
    assert eos_token_ids(model_dir) == (1,)
    (model_dir / "generation_config.json").unlink()
    assert eos_token_ids(model_dir) == (2,)
    edit_config(model_dir, eos_token_id=[2, 3])
    assert eos_token_ids(model_dir) == (2, 3)


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, 16),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": None, "n_positions": 32}, 32),
        ({"max_position_embeddings": None, "text_config": {"max_position_embeddings": 64}}, 64),
        ({"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 16}, "rope_parameters": None}, 64),
        ({"rope_parameters": {"factor": 4.0, "original_max_position_embeddings": 2}}, 16),
    ],
)
def test_longest_sequence_of_a_model(model_dir: Path, changes: dict[str, object], limit: int | None) -> None:
    edit_config(model_dir, **changes)
    assert max_positions(model_dir) == limit


def test_fingerprint_follows_the_architecture_only(model_dir: Path) -> None:
    original = model_fingerprint(QUICKSTART)
    edit_config(model_dir, dtype="bfloat16", transformers_version="9", bos_token_id=1)
    assert model_fingerprint(model_dir) == original
    edit_config(model_dir, num_hidden_layers=3)
    assert model_fingerprint(model_dir) != original


@pytest.mark.parametrize(
    "settings",
    [
        {"num_experts": 128, "num_experts_per_tok": 8},
        {"num_local_experts": 8},
        {"n_routed_experts": 256, "n_shared_experts": 1},
        {"text_config": {"num_experts": 128}},
        {"ffn_config": {"moe_num_experts": 16}},
    ],
)
def test_mixture_of_experts_is_refused(model_dir: Path, settings: dict[str, object]) -> None:
    edit_config(model_dir, **settings)
    with pytest.raises(ConfigError, match=r"^model.path: .* is a mixture of experts \(\w+ \d+ in config.json\)"):
        check_trainable(model_dir)
    with pytest.raises(ConfigError, match=r"^critic.path: .* is a mixture of experts"):
        check_other_model_dir(model_dir, BACKBONE, key="critic.path")


@pytest.mark.parametrize(
    "settings",
    [
        {"vision_config": {"depth": 32}},
        {"img_processor": {"name": "clip"}},
        {"thinker_config": {"audio_config": {"d_model": 8}}},
    ],
)
def test_model_with_images_or_sound_is_refused(model_dir: Path, settings: dict[str, object]) -> None:
    edit_config(model_dir, architectures=["SomeOmniForCausalLM"], **settings)
    with pytest.raises(
        ConfigError, match=r"^model.path: .* is of a SomeOmniForCausalLM, which .* \(\w+ in config.json"
    ):
        check_trainable(model_dir)
    with pytest.raises(ConfigError, match=r"^critic.path: .* is of a SomeOmniForCausalLM, which"):
        check_other_model_dir(model_dir, BACKBONE, key="critic.path")


@pytest.mark.parametrize("architecture", ["Qwen2_5_VLForConditionalGeneration", "T5ForConditionalGeneration"])
def test_model_that_is_no_causal_language_model_is_refused_by_name(model_dir: Path, architecture: str) -> None:
    edit_config(model_dir, architectures=[architecture])
    with pytest.raises(ConfigError, match=f"is of a {architecture}, which is no causal language model of text alone"):
        check_model_dir(model_dir)
    with pytest.raises(ConfigError, match=rf"^critic.path: .* is of a {architecture}, which"):
        check_other_model_dir(model_dir, BACKBONE, key="critic.path")


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_experts": None}, {"num_experts": 0}, {"num_local_experts": 1}, {"vision_config": None}],
)
def test_dense_model_of_text_is_none(model_dir: Path, settings: dict[str, object]) -> None:
    edit_config(model_dir, **settings)
    check_trainable(model_dir)
    check_other_model_dir(model_dir, BACKBONE, key="critic.path")


def test_gguf_file_is_to_be_imported(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=rf"`asyncflow import-gguf {file} DIRECTORY` makes of it$"):
        check_model_dir(file)
