"""Which models are proven before a start, on what small config, and what is remembered. The proof itself is faked."""

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MODEL_CONFIG
from safetensors.numpy import save_file

from asyncflow.errors import ConfigError
from launcher.checks import proof_cache as model_proof
from launcher.checks.proof_cache import check_proven, known_verdicts, models_of, question_of, small_config
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe

QWEN = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
    "max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rope_theta": 1000000.0, "sliding_window": 131072, "use_sliding_window": False,
    "tie_word_embeddings": False, "vocab_size": 152064, "torch_dtype": "bfloat16",
}  # fmt: skip


class Prover:
    """Answers in place of the child."""

    def __init__(self, **problems: str) -> None:
        self.asked: list[Any] = []
        self._problems = problems

    def __call__(self, asked: Sequence[Sequence[Any]], *, key: str) -> list[dict[str, str | None]]:
        self.asked += asked
        return [{part: self._problems.get(part) for part in parts} for _, _, parts in asked]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(model_dir: Path, *settings: str, recipe: str = "quickstart", roles: str | None = None) -> Any:
    return load_config(find_recipe(recipe), overrides=[f"model.path={model_dir}", *settings], roles=roles)


def test_sizes_and_numbers_of_a_family_make_one_small_config() -> None:
    small = small_config(QWEN)
    assert (small["hidden_size"], small["num_hidden_layers"], small["num_key_value_heads"]) == (64, 2, 2)
    others = {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "num_hidden_layers": 24}
    assert small_config(QWEN | others | {"rope_theta": 10000.0, "vocab_size": 151936}) == small
    assert small_config(QWEN | {"tie_word_embeddings": True}) != small
    assert small_config(QWEN | {"num_key_value_heads": 28}) != small
    assert small_config(QWEN | {"use_sliding_window": True, "max_window_layers": 14}) != small


def test_a_small_config_has_a_layer_of_each_kind() -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    assert small_config(QWEN | {"layer_types": kinds * 7})["layer_types"] == ["linear_attention", "full_attention"]
    assert small_config(QWEN | {"sliding_window_pattern": 6})["num_hidden_layers"] == 6
    assert small_config(QWEN | {"full_attn_idxs": [2, 5, 8]})["full_attn_idxs"] == [1]


def test_windows_are_shorter_than_the_samples_of_the_proof_and_rotary_factors_fit_the_heads() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "factor": 32.0}
    small = small_config(QWEN | {"use_sliding_window": True, "rope_scaling": rope})
    assert small["sliding_window"] == 5
    assert len(small["rope_scaling"]["long_factor"]) == small["hidden_size"] // small["num_attention_heads"] // 2


@pytest.mark.parametrize(
    "recipe", ["quickstart", "quickstart-ppo-cpu", "quickstart-reward-model-cpu", "quickstart-tools"]
)
def test_models_that_are_shipped_need_no_proof(recipe: str, cache: Path) -> None:
    config = load_config(find_recipe(recipe))
    uses = models_of(config)
    assert uses
    for use in uses:
        assert set(use.parts) <= known_verdicts(question_of(use.path)).keys()
    check_proven(config)
    assert not cache.exists()


def test_common_families_need_no_proof(tmp_path: Path, cache: Path) -> None:
    """The values of Qwen2.5's files, and the names of its weights, without a proof."""
    layer = "model.layers.0."
    names = [
        "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
        *(f"{layer}self_attn.{x}_proj.{kind}" for x in "qkv" for kind in ("weight", "bias")),
        f"{layer}self_attn.o_proj.weight", *(f"{layer}mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
        f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight",
    ]  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"rms_norm_eps": 1e-06, "hidden_act": "silu"}))
    save_file(dict.fromkeys(names, np.zeros(1, np.float32)), tmp_path / "model.safetensors")
    assert known_verdicts(question_of(tmp_path))["packed"] is None


def test_a_verdict_is_remembered_and_its_parts_are_added(
    model_dir: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prover = Prover()
    monkeypatch.setattr(model_proof, "_prove", prover)
    said: list[str] = []
    check_proven(run(model_dir, roles="rollout:1,actor:1"), say=said.append)
    assert said == [f"proving {model_dir} (once for this machine)"]
    check_proven(run(model_dir, roles="rollout:1,actor:1"), say=said.append)
    assert len(said) == 1, "nothing is proven again"
    assert [parts for _, _, parts in prover.asked] == [("names", "packed", "generate")]
    check_proven(run(model_dir, roles="rollout:1,actor:2"))
    assert prover.asked[-1][2] == ("names", "packed", "sharded", "generate")
    assert len(prover.asked) == 2
    assert len(list(cache.rglob("models/*"))) == 1


@pytest.mark.parametrize("root", ["/proc/nobody", "not/absolute", ""])
def test_a_cache_that_cannot_be_written_costs_time_alone(
    root: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", root)
    monkeypatch.setenv("HOME", "/proc/nobody")
    monkeypatch.setattr(model_proof, "_prove", prover := Prover())
    for _ in range(2):
        check_proven(run(model_dir))
    assert len(prover.asked) == 2


def test_what_is_in_the_cache_is_whole_though_many_starts_write_it(
    model_dir: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_proof, "_prove", Prover())
    question, config = question_of(model_dir), run(model_dir)
    check_proven(config)
    (file,) = cache.rglob("models/*")
    stop, broken = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            broken.extend([1] if not known_verdicts(question) else [])

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(200):
        model_proof._remember(question, {"names": None, "packed": "x" * 5000})
    stop.set()
    reader.join()
    assert not broken
    assert [each.name for each in file.parent.iterdir()] == [file.name]
    file.write_text("{")  # of another hand
    assert known_verdicts(question) == {}


def test_the_refusal_is_one_line_with_model_layer_and_what_to_do(
    model_dir: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_proof, "_prove", prover := Prover(packed="has layers whose X mixes samples"))
    for _ in range(2):
        with pytest.raises(ConfigError) as refusal:
            check_proven(run(model_dir))
        assert str(refusal.value) == (
            f"model.path: {model_dir} has layers whose X mixes samples; name a model of a family that docs/models.md "
            f"lists as proven"
        )
    assert len(prover.asked) == 2, "it may have been the machine, so it is proven again"
    monkeypatch.setattr(model_proof, "_prove", Prover())
    check_proven(run(model_dir))


def test_a_refusal_in_the_cache_is_none(model_dir: Path, cache: Path) -> None:
    question = question_of(model_dir)
    model_proof._remember(question, {"packed": "failed", "names": None})
    assert known_verdicts(question) == {"names": None}
    model_proof._cache_file(question).write_text('{"packed": "of an older version", "names": null}')
    assert known_verdicts(question) == {"names": None}


def test_what_is_remembered_adds_to_what_is_shipped(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (use,) = models_of(load_config(find_recipe("quickstart")))
    question = question_of(use.path)
    shipped = {"transformers": model_proof._version("transformers"), "parts": {"few": ["names"]}}
    shipped |= {"models": {model_proof.shipped_key(question): "few"}}
    monkeypatch.setattr(model_proof, "_shipped", lambda: shipped)
    model_proof._remember(question, {"sharded": None})
    assert known_verdicts(question) == {"names": None, "sharded": None}


def test_a_user_without_a_home_has_a_cache_of_temporary_files(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(_: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = model_proof._cache_file(question_of(model_dir))
    assert file.is_relative_to(tmp_path / f"asyncflow-{os.getuid()}")


def test_only_what_the_run_computes_is_proven(model_dir: Path) -> None:
    def parts(*settings: str, **options: Any) -> dict[str, tuple[str, ...]]:
        return {use.key: use.parts for use in models_of(run(model_dir, *settings, **options))}

    assert parts(roles="rollout:1,actor:1") == {"model.path": ("names", "packed", "generate")}
    assert parts("rollout.engine=vllm", roles="rollout:1,actor:1")["model.path"] == ("names", "packed", "export")
    assert "checkpointing" in parts("actor.gradient_checkpointing=true")["model.path"]
    assert parts("rollout.engine=sim", "actor.engine=sim", "algorithm.kl_coef=0", roles="rollout:1,actor:1") == {}
    assert "critic" in parts(recipe="quickstart-ppo-cpu")["model.path"]
    apart = parts(f"critic.path={model_dir}", recipe="quickstart-ppo-cpu")
    assert "critic" in apart["critic.path"] and "critic" not in apart["model.path"]
    assert parts(recipe="quickstart-reward-model-cpu")["reward.model.path"] == ("score",)


def test_another_config_of_the_same_sizes_is_another_question(tmp_path: Path, model_dir: Path) -> None:
    first = question_of(model_dir)
    (model_dir / "config.json").write_text(json.dumps(MODEL_CONFIG | {"hidden_act": "gelu"}))
    assert question_of(model_dir) != first


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_sequences_that_turn_the_tokens_of_others_are_refused(kind: str, model_dir: Path) -> None:
    from launcher.checks.models import check_positions

    rope = {"type": kind, "factor": 4.0, "original_max_position_embeddings": 32}
    (model_dir / "config.json").write_text(
        json.dumps(MODEL_CONFIG | {"rope_scaling": rope, "max_position_embeddings": 128})
    )
    long = ("data.max_prompt_tokens=30", "rollout.max_response_tokens=30")
    with pytest.raises(ConfigError, match=rf"^model\.path: .* longer than 32 tokens \(rope_type {kind}"):
        check_positions(run(model_dir, *long))
    check_positions(run(model_dir, "data.max_prompt_tokens=10", "rollout.max_response_tokens=10"))
    rows_of_sft = ("algorithm={name: sft}", "data.completion_field=answer", "schedule.n_samples_per_prompt=1")
    with pytest.raises(ConfigError, match=r"sequences may have 40"):
        check_positions(run(model_dir, *rows_of_sft, "data.max_prompt_tokens=40", roles="actor:1"))


@pytest.mark.slow
def test_a_child_proves_and_refuses(tmp_path: Path, model_dir: Path, cache: Path) -> None:
    bloom = {"model_type": "bloom", "architectures": ["BloomForCausalLM"], "n_layer": 2, "n_head": 4, "hidden_size": 64}
    (model_dir / "config.json").write_text(json.dumps(bloom))
    with pytest.raises(ConfigError, match=r"lacks the weight transformer\."):
        check_proven(run(model_dir))
    assert len(list(cache.rglob("models/*"))) == 1
