"""Policy, old policy and reference in one micro-step, with the real engine."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from test_trainer import CPU, STEP, Loader, configure, make_rounds, make_trainer, weights
from torch import Tensor

from asyncflow.errors import ConfigError
from launcher.config.rules import AT_START, check_rules
from tq.columns import Column, PackedBatch
from workers.algorithms.parts import MicroLoss
from workers.engines.base import TrainEngine
from workers.engines.fsdp.sharding import FsdpEngine
from workers.engines.load_engine import load_frozen_model, load_train_engine
from workers.rows.packed_rows import sequences_of
from workers.settings.run import RunConfig
from workers.tasks.graph import graph_of

pytestmark = pytest.mark.usefixtures("single_rank")


def tri(*settings: str) -> RunConfig:
    return configure("actor.tri_model=true", "algorithm.kl_coef=0.1", *settings)


def rounds_of(versions: Sequence[int]) -> list[PackedBatch]:
    """The step's rounds, each drawn by another version."""
    made = []
    for batch, version in zip(make_rounds(), versions, strict=True):
        drawn = torch.full_like(batch["versions"].values, version)
        made.append(batch.with_columns({"versions": Column(drawn, batch["versions"].lengths)}))
    return made


def trained(config: RunConfig, steps: dict[int, Sequence[int]]) -> tuple[TrainEngine, list[dict[str, float]]]:
    """Train steps whose rounds were drawn by the named versions; returns their metrics."""
    engine = load_train_engine(config, device=CPU)
    loader = Loader([])
    trainer = make_trainer(config, engine, loader)
    metrics = []
    for step, versions in steps.items():
        loader._batches = rounds_of(versions)
        loader.round_partition = step
        record = trainer.train(step)
        assert record is not None
        metrics.append(record.totals.to_metrics() | record.training_metrics())
    return engine, metrics


NONE = "algorithm.off_policy.method=none"


def test_without_weights_the_ratio_is_exactly_one_on_policy_whatever_the_generator_recorded() -> None:
    """Its log-probabilities here are off by up to one nat; the trainer's own take their place."""
    _, (metrics,) = trained(tri("schedule.mode=periodic", NONE), {STEP: [STEP - 1] * 4})
    assert (metrics["ratio_mean"], metrics["effective_sample_size"]) == (1.0, 1.0)
    assert (metrics["behaviour_kl"], metrics["old_policy_kl"], metrics["clip_fraction"]) == (0.0, 0.0, 0.0)
    _, (recorded,) = trained(configure("schedule.mode=periodic"), {STEP: [STEP - 1] * 4})
    assert abs(recorded["ratio_mean"] - 1) > 0.05


@pytest.mark.parametrize("staleness", [0, 1])
def test_by_default_tokens_are_weighted_against_what_the_generator_recorded(staleness: int) -> None:
    """As without the copies: they are no other objective."""
    schedule = ("schedule.mode=async", "schedule.max_staleness=1", "actor.ppo_epochs=2")
    steps = {1: [0] * 4, 2: [1 - staleness] * 4}
    with_copies, metrics = trained(configure(*schedule, "actor.tri_model=true"), steps)
    without, expected = trained(configure(*schedule), steps)
    assert metrics[1] == expected[1] and metrics[1]["corrected_fraction"] > 0
    for actual, weight in zip(weights(with_copies), weights(without), strict=True):
        assert actual.equal(weight)


def test_the_reference_in_the_same_layout_is_the_policy_until_it_is_trained() -> None:
    _, metrics = trained(tri("schedule.mode=periodic"), {1: [0] * 4, 2: [1] * 4})
    assert metrics[0]["kl"] == 0.0
    assert metrics[1]["kl"] > 0


def test_reference_is_that_of_the_reference_role() -> None:
    config = tri()
    engine = load_train_engine(config, device=CPU)
    assert isinstance(engine, FsdpEngine)
    frozen = load_frozen_model(config, device=CPU, weights_dir=None)
    sequences = sequences_of(make_rounds()[0])
    reference = engine.open_copy(initial=True)
    engine.forward_backward(sequences, lambda log_probs, _: log_probs.sum())
    engine.step(1.0)
    torch.testing.assert_close(reference.log_probs(sequences), frozen.log_probs(sequences), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(engine.log_probs(sequences), reference.log_probs(sequences), atol=1e-3)
    reference.take()
    assert reference.log_probs(sequences).equal(engine.log_probs(sequences))
    assert reference.log_probs(None).shape == (0,)


def old_log_probs(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> dict[int, Tensor]:
    """Train step 1 and 2; returns the old policy's log-probabilities of every round of step 2."""
    seen: dict[int, Tensor] = {}
    engine = load_train_engine(config, device=CPU)
    loader = Loader(rounds_of([0] * 4))
    trainer = make_trainer(config, engine, loader)
    before = [engine.log_probs(sequences_of(batch)) for batch in make_rounds()]
    assert trainer.train(1) is not None
    between = [engine.log_probs(sequences_of(batch)) for batch in make_rounds()]
    (learner,) = trainer._learners

    def listening(batch: PackedBatch, device: torch.device) -> MicroLoss:
        seen[batch.groups[0]] = batch["rollout_log_probs"].values
        return learner.loss(batch, device)

    monkeypatch.setattr(trainer, "_learners", (replace(learner, loss=listening),))
    loader._batches = rounds_of([0, 1, 0, 1])
    assert trainer.train(2) is not None
    expected = [before[0], between[1], before[2], between[3]]
    for number, actual in seen.items():
        torch.testing.assert_close(actual, expected[number], rtol=0, atol=0)
    return seen


def test_old_policy_is_the_version_that_drew_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tri("schedule.mode=async", "schedule.max_staleness=1", "tq.max_live_rows=0", NONE)
    assert len(old_log_probs(config, monkeypatch)) == 4


def test_old_policy_stays_over_the_updates_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tri("schedule.mode=async", "schedule.max_staleness=1", "actor.num_mini_batches=2", NONE)
    assert len(old_log_probs(config, monkeypatch)) == 4


def test_a_version_that_is_not_held_keeps_what_the_generator_recorded() -> None:
    config = tri("schedule.mode=async", "schedule.max_staleness=1", NONE)
    _, (metrics,) = trained(config, {STEP: [STEP - 2] * 4})
    _, (recorded,) = trained(
        configure("algorithm.kl_coef=0", "schedule.mode=async", "schedule.max_staleness=1"), {STEP: [STEP - 2] * 4}
    )
    assert metrics["ratio_mean"] == pytest.approx(recorded["ratio_mean"], rel=1e-5)


def test_models_are_no_tasks_any_more() -> None:
    names = {task.name for task in graph_of(tri("actor.num_mini_batches=2", "schedule.mode=async"))}
    assert names.isdisjoint({"ref_log_probs", "actor_log_probs"})
    assert "ref_log_probs" in {task.name for task in graph_of(tri("actor.tri_model=false"))}


@pytest.mark.parametrize(
    ("setting", "said"),
    [("actor.engine=sim", "engine sim keeps no copies"), ("algorithm.ref_update_interval=4", "ref_update_interval")],
)
def test_what_cannot_be_is_refused(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_rules(tri(setting, "roles={rollout: 1, actor: 1}"), AT_START)


def test_tokens_are_compared_with_the_version_that_drew_them() -> None:
    """What the generator recorded is not what any version says, here."""
    config = tri("schedule.mode=async", "schedule.max_staleness=1", NONE)
    engine = load_train_engine(config, device=CPU)
    loader = Loader([])
    trainer = make_trainer(config, engine, loader)
    rounds = rounds_of([0] * 4)
    recorded = torch.cat([batch["rollout_log_probs"].values for batch in rounds])
    drew = torch.cat([engine.log_probs(sequences_of(batch)) for batch in rounds])
    for step in (1, 2):
        loader._batches, loader.round_partition = rounds_of([0] * 4), step
        record = trainer.train(step)
    assert record is not None
    sums = record.gap.ages["1"]
    assert sums["held"] == pytest.approx(float((recorded - drew).abs().sum()), rel=1e-4)
    assert sums["held_signed"] == pytest.approx(float((recorded - drew).sum()), rel=1e-4)
    assert sums["total"] != pytest.approx(sums["held"], rel=1e-3)
