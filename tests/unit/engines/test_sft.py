"""SFT's loss and gradient against cross entropy as torch computes it, and against the engine."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import configs
from asyncflow.errors import ConfigError
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.config.rules import AT_START, check_rules
from tq.columns import Column, PackedBatch
from workers.algorithms.algorithm import SFT
from workers.algorithms.load_algorithm import load_algorithm
from workers.data.prompt_dataset import open_prompts
from workers.engines.load_engine import load_train_engine
from workers.records.step_totals import StepTotals
from workers.rows.packed_rows import samples_of, sequences_of, supervised_columns
from workers.settings.algorithms import SFTConfig
from workers.settings.run import RunConfig

CPU = torch.device("cpu")
VOCABULARY = 11


def configure(*settings: str) -> RunConfig:
    return load_config(find_recipe("quickstart-sft-cpu"), overrides=("launcher.device=cpu", *settings))


def batch_of(rows: list[tuple[torch.Tensor, torch.Tensor]], **columns: Column) -> PackedBatch:
    return samples_of(
        PackedBatch(tuple(range(len(rows))), {**supervised_columns(rows), **columns}, tuple(range(len(rows))))
    )


def some_rows(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    chance = torch.Generator().manual_seed(3)
    rows = []
    for length in range(2, 2 + number):
        mask = torch.randint(2, (length,), generator=chance, dtype=torch.uint8)
        mask[0], mask[-1] = 0, 1
        rows.append((torch.randint(VOCABULARY, (length,), generator=chance), mask))
    return rows


@pytest.mark.parametrize("normalization", ["token", "sequence"])
@pytest.mark.parametrize("pieces", [1, 3])
def test_loss_and_gradient_are_those_of_cross_entropy(normalization: str, pieces: int) -> None:
    rows = some_rows(7)
    config = SFTConfig.model_validate({"name": "sft", "loss_normalization": normalization})
    algorithm = SFT(config, max_response_tokens=1, mask_truncated=False)
    chance = torch.Generator().manual_seed(4)
    logits = [torch.randn(len(tokens), VOCABULARY, generator=chance, dtype=torch.float64) for tokens, _ in rows]
    ours, theirs = ([one.clone().requires_grad_() for one in logits] for _ in range(2))

    batch, total, counts = batch_of(rows), torch.zeros((), dtype=torch.float64), []
    for k in range(pieces):
        part = batch.select(range(k, len(rows), pieces))
        drawn = [
            ours[row][place - 1].log_softmax(-1)[rows[row][0][place]]
            for row in range(k, len(rows), pieces)
            for place in rows[row][1].nonzero()[:, 0].tolist()
        ]
        loss = algorithm.loss(part, device=CPU)
        loss.weight_A = loss.weight_A.double()  # as a model in float64 would have it
        value = loss(torch.stack(drawn), torch.zeros(len(drawn), dtype=torch.float64))
        sizes = [(1, int(rows[row][1].sum())) for row in range(k, len(rows), pieces)]
        cut = sum(
            one(piece, torch.zeros_like(piece))
            for one, piece in zip(
                loss.cut_loss(sizes), torch.stack(drawn).detach().split([n for _, n in sizes]), strict=True
            )
        )
        torch.testing.assert_close(torch.as_tensor(cut), value.detach(), rtol=1e-12, atol=0)
        total, counts = total + value, [*counts, algorithm.counts(part)]
    whole = counts[0]
    for one in counts[1:]:
        whole = whole + one
    (total * algorithm.scale(whole)).backward()

    losses = [
        torch.nn.functional.cross_entropy(
            theirs[row][:-1], tokens[1:].masked_fill(mask[1:] == 0, -100), reduction="sum"
        )
        for row, (tokens, mask) in enumerate(rows)
    ]
    lengths = torch.tensor([int(mask.sum()) for _, mask in rows], dtype=torch.float64)
    stacked = torch.stack(losses)
    expected = stacked.sum() / lengths.sum() if normalization == "token" else (stacked / lengths).mean()
    expected.backward()
    # Weights of whole rows are float32: 1e-7 of a row's share.
    tolerance = 1e-9 if normalization == "token" else 1e-6
    torch.testing.assert_close(total * algorithm.scale(whole), expected, rtol=tolerance, atol=0)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=tolerance, atol=1e-12)


def test_loss_weights_of_a_users_task_count() -> None:
    rows = some_rows(3)
    algorithm = SFT(SFTConfig(), max_response_tokens=1, mask_truncated=False)
    batch = batch_of(rows, loss_weights=Column.of_scalars(torch.tensor([1.0, 0.0, 0.5])))
    drawn = [int(mask.sum()) for _, mask in rows]
    loss = algorithm.loss(batch, device=CPU)
    assert loss.weight_A.tolist() == [1.0] * drawn[0] + [0.0] * drawn[1] + [0.5] * drawn[2]
    assert algorithm.counts(batch).tokens == drawn[0] + drawn[2]
    loss(torch.full((sum(drawn),), -1.0), torch.zeros(sum(drawn)))
    assert float(loss.stats["tokens"]) == drawn[0] + drawn[2]
    assert float(loss.stats["cross_entropy"]) == drawn[0] + drawn[2]


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("packed", [False, True])
def test_engine_trains_what_transformers_would(packed: bool) -> None:
    config = configure("actor.max_tokens_per_micro_batch=64" if packed else "actor.max_tokens_per_micro_batch=0")
    engine, algorithm = load_train_engine(config, device=CPU), load_algorithm(config.algorithm, config.rollout)
    prompts = open_prompts(config, Path("unused"))
    made = [prompts.prompt_at(place) for place in range(8)]
    batch = batch_of([(one.tokens, one.mask) for one in made if one.mask is not None])
    losses = []
    for positions in [range(8)] if packed else [[k] for k in range(8)]:
        part = batch.select(positions)
        losses.append(algorithm.loss(part, device=CPU))
        engine.forward_backward(sequences_of(part), losses[-1])
    scale = algorithm.scale(algorithm.counts(batch))
    stats = engine.step(scale)

    model = AutoModelForCausalLM.from_pretrained(config.model.path)
    total, number = torch.zeros(()), 0
    for one in made:
        assert one.mask is not None
        labels = one.tokens.masked_fill(one.mask == 0, -100)
        logits = model(one.tokens[None]).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")
        number += int((labels[1:] != -100).sum())
    (total / number).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    ours = sum(float(loss.stats["loss"]) for loss in losses) * scale
    assert ours == pytest.approx(float(total.detach() / number), rel=1e-5)
    assert stats.grad_norm == pytest.approx(float(norm), rel=1e-5)


def test_metrics_say_nothing_of_rewards() -> None:
    rows = some_rows(4)
    batch = PackedBatch(tuple(range(4)), supervised_columns(rows), tuple(range(4)))
    totals = StepTotals()
    totals.add_batch(batch, step=1, admitted_step=1)
    trained = sum(int(mask.sum()) for _, mask in rows)
    totals.add_loss({"loss": 1.0, "tokens": trained, "cross_entropy": 2.0 * trained, "entropy": 0.5 * trained})
    metrics = StepTotals.merge_parts([totals, totals]).to_metrics()
    assert metrics["cross_entropy"] == pytest.approx(2.0)
    assert metrics["perplexity"] == pytest.approx(torch.tensor(2.0).exp().item())
    assert (metrics["samples"], metrics["response_tokens_mean"]) == (8, trained / 4)
    assert metrics["train_tokens"] == 2 * sum(len(tokens) for tokens, _ in rows)
    assert not [name for name in metrics if "reward" in name or name in ("accuracy", "kl", "truncated_fraction")]
    assert totals.find_complaint() == ""


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            ("algorithm.kl_coef=0.1",),
            "^algorithm.kl_coef: 0.1 .*--set algorithm.kl_coef=0.1.*; it is for algorithms that ",
        ),
        (
            ("algorithm.off_policy.method=none",),
            "^algorithm.off_policy.method: 'none' .*; it is for algorithms that gene",
        ),
        (("algorithm.loss_normalization=constant",), "'token' or 'sequence'"),
        (("roles={rollout: 1, actor: 1, ref: 1}", "algorithm.name=grpo"), "n_samples_per_prompt|completion_field"),
    ],
)
def test_settings_that_do_nothing_are_refused_at_loading(settings: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        configure(*settings)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("schedule.n_samples_per_prompt=2", "schedule.n_samples_per_prompt: 2"),
        ("rollout.temperature=0.5", "rollout.temperature: 0.5"),
        ("actor.ppo_epochs=2", "actor.ppo_epochs: 2"),
        ("data.completion_field=null", "data.completion_field: null"),
        ("data.sampler=own:Sampler", "data.sampler: own:Sampler"),
        ("rollout.function=tools", "rollout.function: tools"),
    ],
)
def test_settings_of_generation_are_refused_before_a_start(setting: str, complaint: str) -> None:
    config = configure(setting)
    with pytest.raises(ConfigError, match=complaint):
        config.algorithm.check(config)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("roles={actor: 1, ref: 1}", "^roles: 'ref' has nothing to do because algorithm.name sft .*; leave ref out$"),
        ("ref.path=quickstart/model", "^ref.path: has nothing to do because algorithm.name sft .*; leave it out$"),
    ],
)
def test_a_reference_is_refused_without_advice_that_would_be_refused(setting: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_rules(configure(setting), AT_START)


def test_recipe_trains_the_answers_of_the_quickstart() -> None:
    data = Path(configs.__path__[0]) / "quickstart" / "train.jsonl"
    prompts = open_prompts(configure(), Path("unused"))
    with data.open() as file:
        first = json.loads(next(file))
    assert prompts.prompt_at(0).text == first["prompt"] + first["answer"]
