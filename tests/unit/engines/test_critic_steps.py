"""Steps of PPO with the critic inside the actor, against a loop written by hand, with the real engines; and of a critic
whose advantages are computed by another role."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncflow.timeline import NoTimeline
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from tests.support.training_role import CountingRole
from tq.columns import Column, PackedBatch
from workers.algorithms.algorithm import PPO, Moments
from workers.algorithms.load_algorithm import load_algorithm
from workers.algorithms.parts import LossCounts
from workers.engines.base import TrainEngine, ValueEngine
from workers.engines.load_engine import load_train_engine, load_value_engine
from workers.records.step_record import StepRecord
from workers.rows.packed_rows import Sequences, sample_columns, samples_of, sequences_of
from workers.settings.dataflow import PlacedTask, place_tasks
from workers.settings.run import RunConfig
from workers.tasks.chain import TaskChain
from workers.trainer.actor import AheadOfTraining, WholeSteps
from workers.trainer.step_trainer import StepTrainer, critic_learner, policy_learner

pytestmark = pytest.mark.usefixtures("single_rank")
CPU = torch.device("cpu")
GROUPS, SIZE, STEP = 4, 2, 3


class Loader:
    """Rounds of one group; stops before the last one if it is told."""

    def __init__(self, batches: Sequence[PackedBatch], *, stops: bool = False) -> None:
        self._batches = batches[:-1] if stops else batches
        self.stopped, self._stops = False, stops
        self.largest_slice, self.round_partition = SIZE, STEP

    def __iter__(self) -> Iterator[PackedBatch]:
        yield from self._batches
        self.stopped = self._stops


def configure(*settings: str) -> RunConfig:
    small = (
        f"schedule.rollout_batch_size={GROUPS}", f"schedule.n_samples_per_prompt={SIZE}", "algorithm.kl_coef=0",
        "actor.micro_batch_size=2", "actor.lr=0.01", "critic.lr=0.02", "critic.num_critic_only_steps=0",
        "algorithm.off_policy.method=none", "launcher.device=cpu",
    )  # fmt: skip
    return load_config(find_recipe("quickstart-ppo-cpu"), overrides=(*small, *settings), roles="rollout:1,actor:1")


def make_rounds() -> list[PackedBatch]:
    chance = torch.Generator().manual_seed(4)
    rounds = []
    for group in range(GROUPS):
        responses = [torch.randint(3, 12, (2 + k,), generator=chance) for k in range(SIZE)]
        prompts = [torch.randint(3, 12, (4,), generator=chance)] * SIZE
        columns = {
            "prompts": Column.of_rows(prompts),
            **sample_columns(prompts, responses),
            "rollout_log_probs": Column.of_rows([-2 - torch.rand(len(one), generator=chance) for one in responses]),
            "versions": Column.of_rows([torch.full((len(one),), STEP - 1, dtype=torch.int32) for one in responses]),
            "rewards": Column.of_scalars(torch.rand(SIZE, generator=chance)),
            "correct": Column.of_scalars(torch.tensor([True, False])),
            "truncated": Column.of_scalars(torch.tensor([False, False])),
            "epochs": Column.of_scalars(torch.zeros(SIZE, dtype=torch.int32)),
        }
        rows = tuple(range(group * SIZE, (group + 1) * SIZE))
        rounds.append(PackedBatch(rows, columns, (group,) * SIZE))
    return rounds


def engines(config: RunConfig) -> tuple[TrainEngine, ValueEngine]:
    return load_train_engine(config, device=CPU), load_value_engine(config, device=CPU)


def context_of(role: str, config: RunConfig) -> Any:
    return SimpleNamespace(
        config=config, device=CPU, timeline=NoTimeline(), report_state=lambda *_, **__: None,
        report_progress=lambda: None, run_dir=Path("nowhere"), gang=SimpleNamespace(role=role),
    )  # fmt: skip


def train(config: RunConfig, policy: TrainEngine, critic: ValueEngine, *, stops: bool = False) -> StepRecord | None:
    context = context_of("actor", config)
    loader: Any = Loader(make_rounds(), stops=stops)
    tasks = ("values", "compute_advantages_and_returns", "critic_train")
    return StepTrainer(
        context,
        (policy_learner(config, policy), critic_learner(config, critic)),
        loader,
        columns=TaskChain(tasks, context, policy, critic=critic),
        training=config.actor,
        role=CountingRole(),
    ).train(STEP)


def parameters(policy: TrainEngine, critic: ValueEngine) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    ours = [shard.values.clone() for shard in policy.shards()]
    state = critic.state_dict()["model"]
    return ours, [state[name].clone() for name in sorted(state)]


def train_by_hand(config: RunConfig, policy: TrainEngine, critic: ValueEngine, *, whitened: bool) -> None:
    """One update of each from the whole step: values, advantages, then both losses."""
    ppo = load_algorithm(config.algorithm, config.rollout)
    assert isinstance(ppo, PPO)
    batches = []
    for batch in make_rounds():
        values = Column(critic.values(sequences_of(batch)), batch["versions"].lengths)
        batch = batch.with_columns({"values": values})
        batches.append(samples_of(batch.with_columns(ppo.advantages(batch, group_size=SIZE))))
    moments = Moments.merged(ppo.moments(batch) for batch in batches)
    counts = LossCounts(0, 0, 0)
    for batch in batches:
        sequences: Sequences = sequences_of(batch)
        critic.forward_backward(sequences, ppo.value_loss(batch, device=CPU))
        policy.forward_backward(sequences, ppo.loss(ppo.normalized(batch, moments) if whitened else batch, device=CPU))
        counts += ppo.counts(batch)
    critic.step(ppo.scale(counts))
    policy.step(ppo.scale(counts))


@pytest.mark.parametrize("whitened", [True, False])
def test_step_equals_a_loop_by_hand(whitened: bool) -> None:
    config = configure(f"algorithm.whiten_advantages={str(whitened).lower()}")
    by_hand, ours = engines(config), engines(config)
    train_by_hand(config, *by_hand, whitened=whitened)
    record = train(config, *ours)
    assert record is not None
    for expected, actual in zip(parameters(*by_hand), parameters(*ours), strict=True):
        for one, other in zip(expected, actual, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-7)
    metrics = record.totals.to_metrics() | record.training_metrics()
    assert (metrics["num_updates"], metrics["critic_num_updates"], metrics["critic_lr"]) == (1, 1, 0.02)
    assert metrics["value_mean"] == 0 and metrics["return_mean"] > 0 and metrics["explained_variance"] <= 0


def test_values_of_a_step_are_those_before_its_first_update_whatever_comes_after() -> None:
    config = configure("actor.num_mini_batches=2", "actor.ppo_epochs=2")
    policy, critic = engines(config)
    record = train(config, policy, critic)
    assert record is not None
    assert (len(record.policy.made), len(record.critic.made), critic.optimizer_updates) == (4, 4, 4)
    assert record.critic_metrics()["value_mean"] == 0, "a new critic says 0; values of later updates would not be"
    assert critic.values(sequences_of(make_rounds()[0])).abs().min() > 0


def test_steps_of_the_critic_alone_leave_the_policy_as_it_is() -> None:
    config = configure(f"critic.num_critic_only_steps={STEP}")
    policy, critic = engines(config)
    before, critic_before = parameters(policy, critic)
    record = train(config, policy, critic)
    assert record is not None
    after, critic_after = parameters(policy, critic)
    assert all(one.equal(other) for one, other in zip(before, after, strict=True))
    assert not all(one.equal(other) for one, other in zip(critic_before, critic_after, strict=True))
    metrics = record.totals.to_metrics() | record.training_metrics()
    assert (metrics["num_updates"], metrics["loss"], metrics["critic_num_updates"]) == (0, 0.0, 1)
    assert (policy.optimizer_updates, critic.optimizer_updates, metrics["samples"]) == (0, 1, GROUPS * SIZE)


def test_the_policys_schedule_ends_with_the_run_although_it_begins_after_the_critics() -> None:
    config = configure("steps=4", f"critic.num_critic_only_steps={STEP - 1}", "actor.lr_schedule=linear")
    policy, critic = engines(config)
    rates = []
    for _ in range(2):  # steps 3 and 4
        record = train(config, policy, critic)
        assert record is not None
        rates.append(record.training_metrics()["lr"])
    assert rates == [0.01, 0.0]


def test_a_stop_leaves_no_trace_in_either() -> None:
    config = configure("algorithm.whiten_advantages=false")
    stopped, untouched = engines(config), engines(config)
    assert train(config, *stopped, stops=True) is None
    train(config, *stopped)
    train(config, *untouched)
    for expected, actual in zip(parameters(*untouched), parameters(*stopped), strict=True):
        assert all(one.equal(other) for one, other in zip(expected, actual, strict=True))


class StepLoader(Loader):
    """A loader of one step that takes what is put, and repeats its rounds."""

    partition = 0

    def __init__(self, batches: Sequence[PackedBatch], *, stops: bool = False) -> None:
        super().__init__(batches, stops=stops)
        self.columns: list[Mapping[str, Column]] = []

    def next_partition(self) -> int:
        self.partition = STEP
        return STEP

    def passes(self, count: int) -> Iterator[Iterator[PackedBatch]]:
        for _ in range(count):
            yield iter(self)

    def put(self, columns: Mapping[str, Column]) -> None:
        self.columns.append(columns)

    def close(self) -> None:
        self._batches = ()


def placed_at(role: str, config: RunConfig) -> list[PlacedTask]:
    roles = ("rollout", "actor", "critic", "advantages")
    return [task for task in place_tasks(config.algorithm.tasks(), roles) if task.role == role]


def train_apart(config: RunConfig, critic: ValueEngine, *, stops: bool = False) -> tuple[StepRecord | None, list[bool]]:
    """One step of a critic whose values travel to the role `advantages`; returns also what it tells the actor."""
    context = context_of("critic", config)
    values, training = placed_at("critic", config)
    loader: Any = StepLoader(make_rounds())
    ahead = AheadOfTraining(context, values, loader, critic)
    ahead.put_columns(STEP)
    with_values = [batch.with_columns(new) for batch, new in zip(make_rounds(), loader.columns, strict=True)]
    (advantages,) = placed_at("advantages", config)
    chain = TaskChain((advantages.name,), context)
    ready: Any = StepLoader([chain.add_columns(batch, step=STEP) for batch in with_values], stops=stops)
    ready.next_partition()
    told: list[bool] = []

    def agree(step: int, stopped: bool) -> bool:
        assert step == STEP
        told.append(not stopped)
        return not stopped

    record = StepTrainer(
        context,
        (critic_learner(config, critic),),
        WholeSteps(ready, agree),
        columns=TaskChain(training.fused, context, critic=critic),
        training=config.critic.training(config.actor),
        role=CountingRole(),
    ).train(STEP)
    ahead.close()
    return record, told


def test_critic_ends_with_the_same_bits_whoever_computes_its_advantages() -> None:
    config = configure("critic.micro_batch_size=2", "actor.ppo_epochs=2", "actor.num_mini_batches=2")
    (policy, hosted), (_, apart) = engines(config), engines(config)
    assert train(config, policy, hosted) is not None
    record, told = train_apart(config, apart)
    assert record is not None and told == [True]
    for expected, actual in zip(parameters(policy, hosted)[1], parameters(policy, apart)[1], strict=True):
        assert expected.equal(actual)


def test_critic_that_lacks_rows_at_a_stop_says_so_and_trains_none_of_the_step() -> None:
    config = configure("critic.micro_batch_size=2")
    (policy, critic), (_, untouched) = engines(config), engines(config)
    assert train_apart(config, critic, stops=True) == (None, [False])
    train_apart(config, critic)
    train_apart(config, untouched)
    for expected, actual in zip(parameters(policy, untouched)[1], parameters(policy, critic)[1], strict=True):
        assert expected.equal(actual)
