"""The critic's engine in a process group of one, against transformers; several ranks are in tests/multiproc."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from asyncflow.errors import ConfigError
from workers.engines.fsdp.sharding import FsdpValueEngine
from workers.rows.packed_rows import Sequences
from workers.settings.engines import ActorConfig, CriticConfig

pytestmark = pytest.mark.usefixtures("single_rank")
CPU = torch.device("cpu")


def make_engine(path: Path, **critic: object) -> FsdpValueEngine:
    config = CriticConfig.model_validate({"lr": 1e-2, "grad_clip": 100.0} | critic)
    training = config.training(ActorConfig()).for_run(100)
    return FsdpValueEngine(path, training, device=CPU, seed=0)


def give_head(path: Path) -> Tensor:
    """Give the files a head of one number, as transformers stores it."""
    weights = load_file(path / "model.safetensors")
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(5))
    save_file(weights | {"score.weight": head}, path / "model.safetensors", metadata={"format": "pt"})
    return head


def states(path: Path, batch: Sequences) -> Tensor:
    """Return [A, H]: what the backbone of transformers makes of the tokens before each response token."""
    model = AutoModelForCausalLM.from_pretrained(path).model
    rows, start = [], 0
    for length, prompt in zip(batch.lengths_N.tolist(), batch.prompt_lengths.tolist(), strict=True):
        tokens = batch.tokens_T[start : start + length]
        start += length
        hidden = model(input_ids=tokens[None]).last_hidden_state[0]
        rows.append(hidden[prompt - 1 : length - 1])
    return torch.cat(rows)


def square_loss(value_A: Tensor) -> Tensor:
    return (value_A - 2).square().sum()


@pytest.mark.parametrize(("family", "tied"), [("qwen2", False), ("qwen3", True), ("llama", True)])
def test_values_are_a_head_on_the_state_before_each_response_token(
    make_model_dir: Callable[..., Path], batch: Sequences, family: str, tied: bool
) -> None:
    path = make_model_dir(family, tie_word_embeddings=tied)
    head = give_head(path)
    values = make_engine(path).values(batch)
    assert values.shape == (16,) and values.dtype == torch.float32
    with torch.no_grad():
        expected = (states(path, batch) @ head.T).squeeze(1)
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)


def test_part_of_a_head_that_the_critic_has_not_is_refused(model_dir: Path) -> None:
    give_head(model_dir)
    weights = load_file(model_dir / "model.safetensors")
    save_file(weights | {"score.bias": torch.ones(1)}, model_dir / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"^critic.path: .* holds score.bias, for which"):
        make_engine(model_dir)


def test_critic_begins_with_backbone_and_head_of_a_reward_model(
    model_dir: Path, batch: Sequences, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(model_dir, num_labels=1)
    reward = AutoModelForSequenceClassification.from_config(config)
    reward.save_pretrained(tmp_path / "reward")
    values = make_engine(tmp_path / "reward").values(batch)
    with torch.no_grad():
        expected = (states(tmp_path / "reward", batch) @ reward.score.weight.T).squeeze(1)
    assert float(expected.std()) > 0.01
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)


def test_policy_without_a_head_is_worth_nothing_at_first_and_learns(model_dir: Path, batch: Sequences) -> None:
    engine = make_engine(model_dir)
    assert engine.values(batch).eq(0).all() and engine.values(None).shape == (0,)
    losses = []
    for _ in range(30):
        engine.forward_backward(batch, square_loss)
        engine.forward_backward(None, square_loss)
        engine.step(1 / 16)
        losses.append(float(square_loss(engine.values(batch))))
    assert engine.optimizer_updates == 30
    assert losses[-1] < 0.05 * losses[0]


def test_gradient_is_that_of_plain_autograd(model_dir: Path, batch: Sequences) -> None:
    head = give_head(model_dir).requires_grad_()
    engine = make_engine(model_dir)
    engine.forward_backward(batch, square_loss)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    total = torch.zeros(())
    start = 0
    for length, prompt in zip(batch.lengths_N.tolist(), batch.prompt_lengths.tolist(), strict=True):
        hidden = model.model(input_ids=batch.tokens_T[start : start + length][None]).last_hidden_state[0]
        total = total + square_loss((hidden[prompt - 1 : length - 1] @ head.T).squeeze(1))
        start += length
    total.backward()
    parameters = [p for name, p in model.named_parameters() if not name.startswith("lm_head")]
    norm = torch.cat([p.grad.flatten() for p in (*parameters, head) if p.grad is not None]).norm()
    assert engine.step(1.0).grad_norm == pytest.approx(float(norm), rel=1e-4)


def test_checkpoint_restores_the_next_update_exactly(model_dir: Path, batch: Sequences, tmp_path: Path) -> None:
    first = make_engine(model_dir, lr_warmup_steps=8)
    for _ in range(2):
        first.forward_backward(batch, square_loss)
        first.step(1.0)
    dcp.save(first.state_dict(), checkpoint_id=tmp_path / "checkpoint")
    second = make_engine(model_dir, lr_warmup_steps=8)
    state = second.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
    second.load_state_dict(state)
    assert second.optimizer_updates == 2
    for engine in (first, second):
        engine.forward_backward(batch, square_loss)
    assert first.step(1.0) == second.step(1.0)
    assert first.values(batch).equal(second.values(batch))


def test_updates_of_a_step_are_the_actors() -> None:
    training = CriticConfig(lr=3e-4, micro_batch_size=2).training(ActorConfig(num_mini_batches=2, ppo_epochs=3))
    assert (training.lr, training.micro_batch_size, training.num_updates) == (3e-4, 2, 6)
