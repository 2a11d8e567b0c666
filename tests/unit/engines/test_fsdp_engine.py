"""The training engine in a process group of one; several ranks are in tests/multiproc."""

import json
import logging
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from asyncflow.testing.plain import decay_groups
from workers.engines.fsdp.sharding import FsdpEngine, mixed_precision
from workers.engines.hf.model import DTYPES, decoder_layers
from workers.engines.packed_attention import PACKED_ATTENTION
from workers.engines.packed_forward import PackedInputs, response_log_probs, response_logits
from workers.rows.packed_rows import Sequences
from workers.settings.engines import ActorConfig

pytestmark = pytest.mark.usefixtures("single_rank")
CPU = torch.device("cpu")
EMBEDDING = "model.embed_tokens.weight"


def make_engine(path: Path, **actor: object) -> FsdpEngine:
    config = ActorConfig.model_validate({"lr": 1e-2, "weight_decay": 0.1, "grad_clip": 0.5} | actor)
    return FsdpEngine(path, actor=config, temperature=0.9, device=CPU, seed=0)


def square_loss(log_probs: Tensor, _entropy: Tensor) -> Tensor:
    return (log_probs + 1).square().sum()


def weights(engine: FsdpEngine) -> dict[str, Tensor]:
    return {shard.name: shard.values.reshape(shard.shape).clone() for shard in engine.shards()}


@pytest.mark.parametrize("tied", [False, True])
def test_updates_equal_plain_adamw(make_model_dir: Callable[..., Path], batch: Sequences, tied: bool) -> None:
    path = make_model_dir("llama", tie_word_embeddings=tied)
    engine = make_engine(path)
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation=PACKED_ATTENTION)
    optimizer = torch.optim.AdamW(decay_groups(plain, 0.1), lr=1e-2)
    inputs = PackedInputs.from_batch(batch, CPU)
    for _ in range(3):
        engine.forward_backward(batch, square_loss)
        engine.forward_backward(None, square_loss)
        stats = engine.step(1 / 16)
        (square_loss(response_log_probs(plain, inputs, 0.9)[0], inputs.targets_A) / 16).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert stats.grad_norm == pytest.approx(float(norm), rel=1e-4) and stats.lr == 1e-2
    expected = dict(plain.named_parameters())
    assert weights(engine).keys() == expected.keys()
    for name, value in weights(engine).items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("actor", [{}, {"autocast": "bfloat16"}])
def test_padding_token_is_trained_like_any_other(
    make_model_dir: Callable[..., Path], batch: Sequences, actor: dict[str, object]
) -> None:
    """It ends responses where a model has no token of its own for filling up, and is an input then."""
    used = int(batch.tokens_T[0])
    padded = make_model_dir(pad_token_id=used)
    plain = shutil.copytree(padded, padded.with_name("plain"))
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    trained = []
    for path in (padded, plain):
        engine = make_engine(path, weight_decay=0.0, **actor)
        before = weights(engine)[EMBEDDING][used]
        engine.forward_backward(batch, square_loss)
        engine.step(1.0)
        trained.append(weights(engine)[EMBEDDING])
        assert not trained[-1][used].equal(before)
    assert trained[0].equal(trained[1])


def test_norms_and_biases_do_not_decay(make_model_dir: Callable[..., Path], batch: Sequences) -> None:
    """Without a gradient, decay is all that an update does."""
    engine = make_engine(make_model_dir("qwen2"), weight_decay=0.5)
    before = weights(engine)
    assert [name for name, value in before.items() if value.dim() == 1 and name.endswith("bias")]
    for _ in range(2):
        engine.forward_backward(batch, lambda log_probs, _: log_probs.sum() * 0.0)
        engine.step(1.0)
    for name, value in weights(engine).items():
        factor = (1 - 1e-2 * 0.5) ** 2 if value.dim() > 1 else 1.0
        torch.testing.assert_close(value, before[name] * factor, msg=name)


def test_state_that_was_saved_when_the_optimizer_decayed_is_resumed_without_doing_it_twice(
    model_dir: Path, batch: Sequences
) -> None:
    engine, resumed = make_engine(model_dir), make_engine(model_dir)
    engine.forward_backward(batch, square_loss)
    engine.step(1 / 16)
    state = deepcopy(engine.state_dict())
    for group in state["optimizer"]["param_groups"]:
        assert group["weight_decay"] == 0.0
        group["weight_decay"] = 0.1
    resumed.load_state_dict(state)
    for one in (engine, resumed):
        one.forward_backward(batch, square_loss)
        one.step(1 / 16)
    for name, value in weights(engine).items():
        assert value.equal(weights(resumed)[name])


@pytest.mark.parametrize("tied", [False, True])
def test_entropy_has_a_gradient(make_model_dir: Callable[..., Path], batch: Sequences, tied: bool) -> None:
    path = make_model_dir("llama", tie_word_embeddings=tied)
    engine = make_engine(path, grad_clip=None, weight_decay=0.0)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation=PACKED_ATTENTION)
    inputs = PackedInputs.from_batch(batch, CPU)
    logits = response_logits(plain, inputs) / 0.9
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    weight = torch.linspace(-1, 2, len(entropy))
    drawn = log_probs.gather(-1, inputs.targets_A[:, None])[:, 0]
    (square_loss(drawn, entropy) - 3 * (weight * entropy).sum()).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    engine.forward_backward(batch, lambda given, spread: square_loss(given, spread) - 3 * (weight * spread).sum())
    for name, parameter in engine._model.named_parameters():
        torch.testing.assert_close(parameter.grad.double(), plain.get_parameter(name).grad, rtol=1e-3, atol=1e-4)
    assert engine.step(1.0).grad_norm == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("actor", [{"gradient_checkpointing": True}, {"autocast": "bfloat16"}])
def test_options_change_gradients_by_rounding_only(model_dir: Path, batch: Sequences, actor: dict[str, object]) -> None:
    norms = []
    for changes in ({}, actor):
        engine = make_engine(model_dir, **changes)
        engine.forward_backward(batch, square_loss)
        norms.append(engine.step(1.0).grad_norm)
    assert norms[1] == pytest.approx(norms[0], rel=0.1 if "autocast" in actor else 1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2"])  # olmo2's rotary embedding stays in float32
def test_one_rank_computes_in_bfloat16_what_fsdp2_does(
    make_model_dir: Callable[..., Path], batch: Sequences, family: str, tied: bool
) -> None:
    path = make_model_dir(family, tie_word_embeddings=tied)
    engine = make_engine(path, autocast="bfloat16")
    sharded = AutoModelForCausalLM.from_pretrained(path, attn_implementation=PACKED_ATTENTION)
    mesh = init_device_mesh("cpu", (1,))
    policy = mixed_precision(ActorConfig(autocast="bfloat16"))
    for module in (*decoder_layers(sharded), sharded):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for _ in range(2):
        engine.forward_backward(batch, square_loss)
        square_loss(*response_log_probs(sharded, PackedInputs.from_batch(batch, CPU), 0.9)).backward()
    mine = {name: weight.grad for name, weight in engine._model.named_parameters()}
    theirs = {name: weight.grad.to_local() for name, weight in sharded.named_parameters()}
    assert mine.keys() == theirs.keys()
    for name, gradient in mine.items():
        assert torch.equal(gradient, theirs[name]), name
    expected = torch.stack(torch._foreach_norm(list(theirs.values()))).square().sum().sqrt()
    assert engine.step(1.0).grad_norm == float(expected)


# Dynamo looks at the gradients of whatever it traces.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_train_alike(
    make_model_dir: Callable[..., Path], batch: Sequences, monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    """Traced as for a real compiler, which would take minutes; the second micro-batch has other lengths."""
    monkeypatch.setattr("workers.engines.fsdp.sharding.COMPILER", "aot_eager")
    first = Sequences(batch.tokens_T[:7], batch.lengths_N[:1], batch.response_mask_T[:7])
    model_dir, stats = make_model_dir(num_hidden_layers=1), []
    for compiled in (False, True):
        engine = make_engine(model_dir, compile=compiled, gradient_checkpointing=checkpointing)
        for part in (batch, first):
            engine.forward_backward(part, square_loss)
        stats.append(engine.step(1.0).grad_norm)
        assert engine.log_probs(None).shape == (0,)
    assert stats[1] == pytest.approx(stats[0], rel=1e-5)
    torch.compiler.reset()


def test_micro_batches_add_up(model_dir: Path, batch: Sequences) -> None:
    whole, parts = make_engine(model_dir), make_engine(model_dir)
    whole.forward_backward(batch, square_loss)
    sizes = batch.lengths_N.tolist()
    for tokens, length, mask in zip(
        batch.tokens_T.split(sizes), batch.lengths_N, batch.response_mask_T.split(sizes), strict=True
    ):
        parts.forward_backward(Sequences(tokens, length[None], mask), square_loss)
    assert parts.step(1.0).grad_norm == pytest.approx(whole.step(1.0).grad_norm, rel=1e-5)


def test_learning_rate_rises_over_the_warm_up(model_dir: Path, batch: Sequences) -> None:
    engine = make_engine(model_dir, lr=1.0, lr_warmup_steps=4)
    rates = []
    for _ in range(5):
        engine.forward_backward(batch, square_loss)
        rates.append(engine.step(1.0).lr)
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_warm_up_counts_steps_however_many_updates_they_make(model_dir: Path, batch: Sequences) -> None:
    engine = make_engine(model_dir, lr=1.0, lr_warmup_steps=4, num_mini_batches=2)
    rates = []
    for _ in range(6):
        engine.forward_backward(batch, square_loss)
        rates.append(engine.step(1.0).lr)
    assert rates == [0.25, 0.25, 0.5, 0.5, 0.75, 0.75]


def test_counts_go_on_over_a_resume_with_another_number_of_updates_per_step(model_dir: Path, batch: Sequences) -> None:
    engine = make_engine(model_dir, lr=1.0, lr_warmup_steps=8, num_mini_batches=2)
    for _ in range(4):
        engine.forward_backward(batch, square_loss)
        engine.step(1.0)
    state = engine.state_dict()
    assert (engine.optimizer_updates, int(state["optimizer_updates"]), int(state["num_steps"])) == (4, 4, 2)
    resumed = make_engine(model_dir, lr=1.0, lr_warmup_steps=8, num_mini_batches=1)
    resumed.load_state_dict(state)
    resumed.forward_backward(batch, square_loss)
    assert resumed.step(1.0).lr == 3 / 8
    assert resumed.optimizer_updates == 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_are_those_of_the_weights_after_an_update(model_dir: Path, batch: Sequences, dtype: str) -> None:
    """A forward without a backward must not leave whole parameters behind that an update does not change."""
    engine = make_engine(model_dir, lr=1.0, autocast=dtype)
    first = engine.log_probs(batch)
    engine.forward_backward(batch, square_loss)
    assert engine.log_probs(batch).equal(first)
    engine.step(1.0)
    changed = engine.log_probs(batch)
    assert not torch.allclose(changed, first, atol=1e-2)
    plain = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation=PACKED_ATTENTION)
    plain.load_state_dict(weights(engine))
    for parameter in plain.parameters():  # not the rotary frequencies
        parameter.data = parameter.data.to(DTYPES[dtype])
    with torch.no_grad():
        expected = response_log_probs(plain, PackedInputs.from_batch(batch, CPU), 0.9)[0]
    torch.testing.assert_close(changed, expected, rtol=1e-4, atol=1e-5)
    assert engine.log_probs(None).shape == (0,)


def test_zero_grad_abandons_the_step(model_dir: Path, batch: Sequences) -> None:
    engine = make_engine(model_dir)
    engine.forward_backward(batch, square_loss)
    engine.zero_grad()
    engine.forward_backward(None, square_loss)
    assert engine.step(1.0).grad_norm == 0.0


def test_gradient_that_is_not_finite_changes_nothing(
    model_dir: Path, batch: Sequences, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(model_dir)
    before = weights(engine)
    engine.forward_backward(batch, lambda log_probs, _: log_probs.sum() * float("inf"))
    with caplog.at_level(logging.WARNING):
        engine.step(1.0)
    assert "update 1 skipped" in caplog.text
    assert all(value.equal(before[name]) for name, value in weights(engine).items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoint_restores_the_next_update_exactly(
    model_dir: Path, batch: Sequences, tmp_path: Path, dtype: str
) -> None:
    first = make_engine(model_dir, lr_warmup_steps=8, autocast=dtype)
    for _ in range(2):
        first.forward_backward(batch, square_loss)
        first.step(1.0)
    dcp.save(first.state_dict(), checkpoint_id=tmp_path / "checkpoint")

    second = make_engine(model_dir, lr_warmup_steps=8, autocast=dtype)
    second.log_probs(batch)
    state = second.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
    second.load_state_dict(state)
    for engine in (first, second):
        engine.forward_backward(batch, square_loss)
    assert first.step(1.0) == second.step(1.0)
    restored = weights(second)
    assert all(value.equal(restored[name]) for name, value in weights(first).items())


def test_checkpoint_before_the_first_update_starts_adam_afresh(
    model_dir: Path, batch: Sequences, tmp_path: Path
) -> None:
    saved = make_engine(model_dir)
    dcp.save(saved.state_dict(), checkpoint_id=tmp_path / "checkpoint")
    restored, fresh = make_engine(model_dir), make_engine(model_dir)
    state = restored.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
    restored.load_state_dict(state)
    for engine in (saved, restored, fresh):
        engine.forward_backward(batch, square_loss)
        engine.step(1.0)
    expected = weights(fresh)
    for engine in (saved, restored):
        assert all(value.equal(expected[name]) for name, value in weights(engine).items())


@pytest.mark.parametrize("tied", [False, True])
def test_export_is_loaded_by_transformers(
    make_model_dir: Callable[..., Path], batch: Sequences, tmp_path: Path, tied: bool
) -> None:
    path = make_model_dir(tie_word_embeddings=tied)
    (path / "tokenizer.json").write_text("{}")
    (path / "generation_config.json").write_text('{"eos_token_id": [1, 4]}')
    engine = make_engine(path)
    engine.forward_backward(batch, square_loss)
    engine.step(1.0)
    dcp.save(engine.state_dict(), checkpoint_id=tmp_path / "saved")
    expected = {name: value.clone() for name, value in weights(engine).items()}
    engine.forward_backward(batch, square_loss)
    engine.step(1.0)
    engine.export_hf(tmp_path / "export", tmp_path / "saved")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    parameters = dict(loaded.named_parameters())
    assert all(value.equal(parameters[name]) for name, value in expected.items())
    assert {"config.json", "tokenizer.json", "generation_config.json"} <= {
        p.name for p in (tmp_path / "export").iterdir()
    }
