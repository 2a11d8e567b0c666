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
from workers.data.model_files import (
    BACKBONE,
    INDEX_FILE,
    check_model_dir,
    check_other_model_dir,
    check_trainable,
    eos_token_ids,
    ignored_weights,
    max_positions,
    model_fingerprint,
    stored_tensors,
    weight_files,
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
    tensors = stored_tensors(QUICKSTART)
    assert tensors["lm_head.weight"].shape == (16, 64) and tensors["lm_head.weight"].dtype == "F32"
    assert tensors["lm_head.weight"].stop - tensors["lm_head.weight"].start == 4 * 16 * 64
    assert "__metadata__" not in tensors


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
            "describes a BertModel, which is not a causal language model",
        ),
        (lambda path: edit_config(path, model_type=None), "names no model_type"),
        (lambda path: edit_generation(path, eos_token_id=None), "names no eos_token_id"),
        (lambda path: edit_generation(path, eos_token_id=99), "eos_token_id 99 of .* is not a token of its 16"),
        (lambda path: edit_generation(path, eos_token_id=[1, "x"]), "eos_token_id 'x' of .* is not a token of its 16"),
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
        (lambda path: (path / INDEX_FILE).write_text('{"weight_map": {"x": 3}}'), "puts x into 3, which is not a file"),
        (lambda path: save_file({"x": torch.ones(1)}, path / "part-1.safetensors"), "it lacks .*, which model"),
    ],
)
def test_damage_of_shards_is_named(model_dir: Path, damage: Callable[[Path], object], message: str) -> None:
    shard(model_dir)
    damage(model_dir)
    with pytest.raises(ConfigError, match=message):
        check_model_dir(model_dir)


def stale(model_dir: Path) -> dict[str, torch.Tensor]:
    """Other weights of the same names and shapes."""
    return {name: values + 1 for name, values in load_file(model_dir / "model.safetensors").items()}


def test_model_is_what_transformers_reads_and_the_rest_is_named(model_dir: Path) -> None:
    assert ignored_weights(model_dir) == ""
    other = stale(model_dir)
    for name in ("consolidated.safetensors", "model_old.safetensors", "adapter_model.safetensors", "z.safetensors"):
        save_file(other, model_dir / name)
    (model_dir / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(other, "z.safetensors")}))
    (model_dir / "pytorch_model.bin").write_bytes(b"")
    (model_dir / "training_args.bin").write_bytes(b"")
    check_model_dir(model_dir)
    assert weight_files(model_dir) == (model_dir / "model.safetensors",)
    assert {stored.file.name for stored in stored_tensors(model_dir).values()} == {"model.safetensors"}
    assert ignored_weights(model_dir) == (
        f"model.path: {model_dir} is read from model.safetensors; not from adapter_model.safetensors, "
        f"consolidated.safetensors, model.safetensors.index.json, model_old.safetensors, pytorch_model.bin and 1 more"
    )


def test_files_beside_shards_are_named(model_dir: Path) -> None:
    other = stale(model_dir)
    shard(model_dir)
    save_file(other, model_dir / "part-0-backup.safetensors")
    assert [file.name for file in weight_files(model_dir)] == ["part-0.safetensors", "part-1.safetensors"]
    assert ignored_weights(model_dir, key="critic.path") == (
        f"critic.path: {model_dir} is read from {INDEX_FILE}; not from part-0-backup.safetensors"
    )


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.safetensors", "b.safetensors"], "nothing says which of a.safetensors, b.safetensors is the model; rename"),
        (["a.safetensors"], "if a.safetensors is the model, rename it to model.safetensors"),
        (["adapter_model.safetensors"], "holds the adapter adapter_model.safetensors, but no model; merge it"),
    ],
)
def test_files_without_a_model_among_them_are_refused(model_dir: Path, names: list[str], message: str) -> None:
    for name in names:
        shutil.copy(model_dir / "model.safetensors", model_dir / name)
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=message):
        stored_tensors(model_dir)


def test_link_to_nothing_does_not_leave_the_choice_to_an_index(model_dir: Path) -> None:
    shard(model_dir)
    (model_dir / "model.safetensors").symlink_to(model_dir / "gone")
    with pytest.raises(ConfigError, match=r"^critic.path: .*model.safetensors is a link to a file that is not there"):
        stored_tensors(model_dir, key="critic.path")


def test_another_file_that_config_json_names_is_refused(model_dir: Path) -> None:
    edit_config(model_dir, transformers_weights="model.safetensors")
    stored_tensors(model_dir)
    edit_config(model_dir, transformers_weights="other.safetensors")
    with pytest.raises(ConfigError, match=r"makes transformers read 'other.safetensors' \(transformers_weights\)"):
        stored_tensors(model_dir)


def test_tensor_in_two_files_must_be_the_same(model_dir: Path) -> None:
    """The index assigns each tensor to one file, but transformers reads all tensors of all files."""
    weights = load_file(model_dir / "model.safetensors")
    shard(model_dir)
    weight_map = json.loads((model_dir / INDEX_FILE).read_text())["weight_map"]
    name = next(tensor for tensor, file in weight_map.items() if file == "part-0.safetensors")
    beside = load_file(model_dir / "part-1.safetensors")
    save_file({**beside, name: weights[name]}, model_dir / "part-1.safetensors")
    assert stored_tensors(model_dir)[name].file.name == "part-0.safetensors"
    changed = weights[name].clone()
    changed.view(-1)[-1] += 1
    for values, how in (
        (changed, "other values"),
        (weights[name].bfloat16(), r"another element type \(BF16, not F32\)"),
        (weights[name][:-1].clone(), "other values"),
    ):
        save_file({**beside, name: values}, model_dir / "part-1.safetensors")
        with pytest.raises(ConfigError, match=rf"holds {name} twice, in part-0.* and with {how} in part-1"):
            check_model_dir(model_dir)


def edit_weights(model_dir: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors of model.safetensors; `__` stands for a dot."""
    weights = load_file(model_dir / "model.safetensors")
    for name, values in changes.items():
        weights.pop(name.replace("__", "."), None)
        if values is not None:
            weights[name.replace("__", ".")] = values
    save_file(weights, model_dir / "model.safetensors")


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
    ],
)
def test_quantized_model_is_refused_by_its_settings(model_dir: Path, settings: dict[str, object]) -> None:
    edit_config(model_dir, **settings)
    with pytest.raises(ConfigError, match=r"^model.path: .* is quantized \(quantization_config fp8 in config.json\)"):
        check_trainable(model_dir)
    with pytest.raises(ConfigError, match=r"^critic.path: .* is quantized"):
        check_other_model_dir(model_dir, BACKBONE, key="critic.path")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"lm_head__weight": torch.ones(16, 64).to(torch.float8_e4m3fn)},
            "lm_head.weight has elements of type F8_E4M3",
        ),
        ({"lm_head__weight": torch.ones(16, 64, dtype=torch.int8)}, "lm_head.weight has elements of type I8"),
        ({"lm_head__weight_scale_inv": torch.ones(1)}, "lm_head.weight_scale_inv belongs to quantized weights"),
        ({"model__layers__0__mlp__up_proj__qweight": torch.ones(1).int()}, "qweight has elements of type I32"),
        ({"model__layers__0__mlp__up_proj__scales": torch.ones(1).half()}, "scales belongs to quantized weights"),
    ],
)
def test_quantized_weights_are_refused(model_dir: Path, values: dict[str, torch.Tensor], message: str) -> None:
    edit_weights(model_dir, **values)
    with pytest.raises(ConfigError, match=rf"^model.path: .* is quantized: .*{message}"):
        check_model_dir(model_dir)


def test_masks_and_other_float_types_are_no_quantized_weights(model_dir: Path) -> None:
    edit_weights(
        model_dir,
        model__layers__0__attn__bias=torch.ones(1, 4, dtype=torch.bool),
        model__embeddings__position_ids=torch.arange(4),
        lm_head__weight=torch.ones(16, 64, dtype=torch.float16),
    )
    check_model_dir(model_dir)


def test_head_of_its_own_beside_tied_embeddings_is_refused(model_dir: Path) -> None:
    edit_config(model_dir, tie_word_embeddings=True)
    message = "embed_tokens.weight and, with other values, lm_head.weight, which config.json ties"
    with pytest.raises(ConfigError, match=message):
        check_model_dir(model_dir)
    check_other_model_dir(model_dir, BACKBONE, key="critic.path")  # it has no use for that head
    edit_weights(model_dir, lm_head__weight=load_file(model_dir / "model.safetensors")["model.embed_tokens.weight"])
    check_model_dir(model_dir)
    edit_weights(model_dir, lm_head__weight=None)
    check_model_dir(model_dir)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": 1},
            r"says 1 layers \(num_hidden_layers\), but the weights have a layer 1; use the config",
        ),
        (
            {"num_hidden_layers": 3},
            r"says 3 layers \(num_hidden_layers\), but the weights lack layer 2; use the config",
        ),
        (
            {"vocab_size": 24},
            r"says vocab_size 24, but model\.embed_tokens\.weight of the weights has 16; use the config",
        ),
        ({"hidden_size": 32}, r"says hidden_size 32, but model\.embed_tokens\.weight of the weights has 64; use"),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_config_of_another_size_of_the_family_is_refused(
    model_dir: Path, changes: dict[str, object], message: str, sharded: bool
) -> None:
    if sharded:
        shard(model_dir)
    edit_config(model_dir, **changes)
    with pytest.raises(ConfigError, match=rf"^model\.path: .*config\.json {message}"):
        check_model_dir(model_dir)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 1, "num_nextn_predict_layers": 1},  # layers that transformers leaves out
        {"num_hidden_layers": 1, "num_layers": 2},
        {"num_hidden_layers": 9, "decoder_layers": 2},
        {"num_hidden_layers": 9, "is_encoder_decoder": True},
        {"num_hidden_layers": 9, "vision_config": {}},
        {"hidden_size": 32, "word_embed_proj_dim": 64},
        {"num_hidden_layers": None, "vocab_size": None, "hidden_size": None},
    ],
)
def test_sizes_that_fit_or_that_are_not_plain_pass(model_dir: Path, changes: dict[str, object]) -> None:
    edit_config(model_dir, **changes)
    check_model_dir(model_dir)


def test_several_stacks_of_layers_are_left_to_loading(model_dir: Path) -> None:
    edit_weights(model_dir, mtp__layers__0__norm__weight=torch.ones(1))
    edit_config(model_dir, num_hidden_layers=3)
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
        ConfigError, match=r"^model.path: .* holds a SomeOmniForCausalLM, which .* \(\w+ in config.json"
    ):
        check_trainable(model_dir)
    with pytest.raises(ConfigError, match=r"^critic.path: .* holds a SomeOmniForCausalLM, which"):
        check_other_model_dir(model_dir, BACKBONE, key="critic.path")


@pytest.mark.parametrize("architecture", ["Qwen2_5_VLForConditionalGeneration", "T5ForConditionalGeneration"])
def test_model_that_is_no_causal_language_model_is_refused_by_name(model_dir: Path, architecture: str) -> None:
    edit_config(model_dir, architectures=[architecture])
    with pytest.raises(
        ConfigError, match=f"describes a {architecture}, which is not a causal language model of text alone"
    ):
        check_model_dir(model_dir)
    with pytest.raises(ConfigError, match=rf"^critic.path: .* describes a {architecture}, which"):
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
    with pytest.raises(ConfigError, match=rf"`asyncflow import-gguf {file} DIRECTORY` makes from it$"):
        check_model_dir(file)
