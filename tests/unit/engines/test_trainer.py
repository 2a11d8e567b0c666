"""Steps of several updates against a loop written by hand over the same mini-batches, with the real engine."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from asyncflow.errors import TrainingDiverged
from asyncflow.timeline import NoTimeline
from launcher.config.key_reference import all_keys
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from tests.support.training_role import CountingRole
from tq.columns import Column, PackedBatch
from workers.algorithms.load_algorithm import load_algorithm
from workers.algorithms.parts import LossCounts
from workers.engines.base import StepStats, TrainEngine
from workers.engines.load_engine import load_train_engine
from workers.rows.micro_batches import MiniBatchAssigner
from workers.rows.packed_rows import Sequences, sample_columns, samples_of, sequences_of
from workers.settings.dataflow import SAMPLE_COLUMNS
from workers.settings.run import RunConfig
from workers.tasks.chain import TaskChain
from workers.trainer.step_trainer import StepTrainer, open_loader, policy_learner
from workers.trainer.tri_model import TriModel

pytestmark = pytest.mark.usefixtures("single_rank")
CPU = torch.device("cpu")
GROUPS, SIZE, STEP = 4, 2, 3


class Loader:
    """Rounds of two groups; stops before the last one if it is told."""

    def __init__(self, batches: Sequence[PackedBatch], *, stops: bool = False) -> None:
        self._batches = batches[:-1] if stops else batches
        self.stopped = False
        self.largest_slice, self.round_partition = 0, STEP
        self._stops = stops

    def __iter__(self) -> Iterator[PackedBatch]:
        for batch in self._batches:
            self.largest_slice = len(batch)
            yield batch
        self.stopped = self._stops


def configure(*settings: str) -> RunConfig:
    small = (f"schedule.rollout_batch_size={GROUPS}", f"schedule.n_samples_per_prompt={SIZE}", "algorithm.kl_coef=0")
    overrides = (*small, "actor.micro_batch_size=2", "actor.lr=0.01", "launcher.device=cpu", *settings)
    return load_config(find_recipe("quickstart"), overrides=overrides)


def make_rounds() -> list[PackedBatch]:
    """The step's rows, a group a round; old log-probabilities are the sampler's, off by little."""
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
            "rewards": Column.of_scalars(torch.tensor([1.0, 0.0])),
            "correct": Column.of_scalars(torch.tensor([True, False])),
            "truncated": Column.of_scalars(torch.tensor([False, group == 1])),
            "epochs": Column.of_scalars(torch.zeros(SIZE, dtype=torch.int32)),
        }
        rows = tuple(range(group * SIZE, (group + 1) * SIZE))
        rounds.append(PackedBatch(rows, columns, (group,) * SIZE))
    return rounds


def make_trainer(
    config: RunConfig,
    engine: TrainEngine,
    loader: Loader,
    *,
    role: CountingRole | None = None,
    run_dir: Path = Path("nowhere"),
) -> StepTrainer:
    context: Any = SimpleNamespace(
        config=config, device=CPU, timeline=NoTimeline(), report_state=lambda *_, **__: None,
        job=SimpleNamespace(lineage=0), elapsed_s=0.0,
        report_progress=lambda: None, run_dir=run_dir,
    )  # fmt: skip
    tasks = ["compute_advantages_and_returns"]
    if config.actor.num_updates > 1 and config.algorithm.off_policy.method != "none":
        tasks.insert(0, "actor_log_probs")
    stub: Any = loader
    return StepTrainer(
        context,
        (policy_learner(config, engine),),
        stub,
        columns=TaskChain(tasks, context, engine),
        training=config.actor,
        tri_model=TriModel(config, engine) if config.actor.tri_model else None,
        role=role or CountingRole(),
    )


def weights(engine: TrainEngine) -> list[torch.Tensor]:
    return [shard.values.clone() for shard in engine.shards()]


def train_by_hand(config: RunConfig, engine: TrainEngine, updates: list[list[int]]) -> list[float]:
    """Update with the named rounds of each mini-batch; returns the losses."""
    algorithm, losses = load_algorithm(config.algorithm, config.rollout), []
    prepared = []
    for batch in make_rounds():
        old = Column(engine.log_probs(sequences_of(batch)), batch["versions"].lengths)
        advantages = algorithm.advantages(batch, group_size=SIZE)
        prepared.append(samples_of(batch.with_columns({"old_log_probs": old, **advantages})))
    for rounds in updates:
        counts, total = LossCounts(0, 0, 0), 0.0
        for number in rounds:
            loss = algorithm.loss(prepared[number], device=CPU)
            engine.forward_backward(sequences_of(prepared[number]), loss)
            counts += algorithm.counts(prepared[number])
            total += float(loss.stats["loss"])
        scale = algorithm.scale(counts)
        engine.step(scale)
        losses.append(total * scale)
    return losses


def assigned(config: RunConfig, pass_number: int) -> list[list[int]]:
    """Return the rounds of each mini-batch of a pass."""
    count = config.actor.num_mini_batches
    seed = f"{config.seed}/{STEP}/{pass_number}"
    assigner = MiniBatchAssigner(num_mini_batches=count, size=GROUPS * SIZE // count, seed=seed)
    numbers = [assigner.assign_round(SIZE) for _ in range(GROUPS)]
    return [[position for position in range(GROUPS) if numbers[position] == number] for number in range(count)]


def test_updates_equal_a_loop_over_the_same_mini_batches() -> None:
    config = configure("actor.num_mini_batches=2", "actor.ppo_epochs=2", "rollout.truncated=mask")
    by_hand = load_train_engine(config, device=CPU)
    losses = train_by_hand(config, by_hand, [*assigned(config, 0), *assigned(config, 1)])
    engine = load_train_engine(config, device=CPU)
    role = CountingRole()
    record = make_trainer(config, engine, Loader(make_rounds()), role=role).train(STEP)
    assert role.updates == [(STEP, number, number) for number in range(1, 5)]
    assert record is not None
    for actual, expected in zip(weights(engine), weights(by_hand), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
    assert [update.loss for update in record.policy.made] == pytest.approx(losses, rel=1e-4, abs=1e-6)
    metrics = record.totals.to_metrics() | record.training_metrics()
    assert (metrics["num_updates"], metrics["samples"], metrics["reward_mean"]) == (4, GROUPS * SIZE, 0.5)
    assert metrics["masked_fraction"] == pytest.approx(1 / 8)
    assert len(record.ledger) == GROUPS


def conversations(rounds: Sequence[PackedBatch]) -> list[PackedBatch]:
    """The same drawn tokens in two samples a row: the prompt and the first of them; the prompt, a word and the rest."""
    changed = []
    for batch in rounds:
        tokens, lengths, masks = [], [], []
        for row, mask in zip(batch["tokens"].rows(), batch["response_mask"].rows(), strict=True):
            prompt, drawn = row[mask == 0], row[mask == 1]
            samples = [(prompt, drawn[:1]), (torch.cat([prompt, torch.tensor([3])]), drawn[1:])]
            one = Sequences.from_turns([begin for begin, _ in samples], [rest for _, rest in samples])
            tokens.append(one.tokens_T)
            lengths.append(one.lengths_N)
            masks.append(one.response_mask_T)
        columns = dict(zip(SAMPLE_COLUMNS, map(Column.of_rows, (tokens, lengths, masks)), strict=True))
        changed.append(batch.with_columns(columns))
    return changed


@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
@pytest.mark.parametrize(
    ("budget", "turn"), [(9, list), (12, list), (1000, list), (9, conversations), (40, conversations)]
)
def test_packed_by_tokens_trains_as_sample_by_sample(
    normalization: str, budget: int, turn: Callable[[list[PackedBatch]], list[PackedBatch]]
) -> None:
    """The divisor is that of the whole update, so neither packing nor shared prompts change what it is."""
    weights_after, norms = [], []
    single = ("actor.micro_batch_size=1", "actor.shared_prompt=false")
    packed = (f"actor.max_tokens_per_micro_batch={budget}",)
    for settings in (single, packed):
        config = configure(*settings, f"algorithm.loss_normalization={normalization}", "rollout.truncated=mask")
        engine = load_train_engine(config, device=CPU)
        record = make_trainer(config, engine, Loader(turn(make_rounds()))).train(STEP)
        assert record is not None
        weights_after.append(torch.cat([one.flatten() for one in weights(engine)]))
        norms.append(record.training_metrics()["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    # AdamW's first update is the learning rate for each weight, whatever the gradient's size, so compare loosely where
    # a gradient is next to nothing.
    assert float((weights_after[1] - weights_after[0]).abs().mean()) < 1e-6


def test_a_second_pass_meets_the_clip() -> None:
    for passes, clips in ((1, False), (2, True)):
        config = configure(f"actor.ppo_epochs={passes}", "algorithm.off_policy.method=decoupled", "actor.lr=0.05")
        engine = load_train_engine(config, device=CPU)
        record = make_trainer(config, engine, Loader(make_rounds())).train(STEP)
        assert record is not None and len(record.policy.made) == passes
        assert (record.totals.to_metrics()["clip_fraction"] > 0) == clips


class Pipelined:
    """An engine that trains micro-batches later, as a pipeline does."""

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        self.waiting: list[tuple[Sequences | None, Any]] = []
        self.finished = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward_backward(self, batch: Sequences | None, loss: Any) -> None:
        self.waiting.append((batch, loss))

    def finish_micro_batches(self) -> None:
        self.finished += len(self.waiting)
        while self.waiting:
            self._engine.forward_backward(*self.waiting.pop(0))

    def zero_grad(self) -> None:
        self.waiting.clear()
        self._engine.zero_grad()


def test_figures_of_micro_batches_that_a_pipeline_finishes_later_are_noted_before_the_update() -> None:
    config = configure("actor.num_mini_batches=2", "schedule.mode=async", "schedule.max_staleness=1")
    plain, inner = (load_train_engine(config, device=CPU) for _ in range(2))
    pipelined: Any = Pipelined(inner)
    expected = make_trainer(config, plain, Loader(make_rounds())).train(STEP)
    found = make_trainer(config, pipelined, Loader(make_rounds())).train(STEP)
    assert expected is not None and found is not None and pipelined.finished == GROUPS
    assert found.training_metrics() == expected.training_metrics()
    assert found.totals.to_metrics() == expected.totals.to_metrics() and vars(found.gap) == vars(expected.gap)
    assert all(one.equal(other) for one, other in zip(weights(inner), weights(plain), strict=True))
    assert make_trainer(config, pipelined, Loader(make_rounds(), stops=True)).train(STEP) is None
    assert not pipelined.waiting, "an abandoned step leaves nothing behind"


@pytest.mark.parametrize("updates", [1, 2])
def test_a_stop_before_the_last_row_leaves_no_trace(updates: int) -> None:
    config = configure(f"actor.num_mini_batches={updates}", "algorithm.off_policy.method=none")
    engine, untouched = (load_train_engine(config, device=CPU) for _ in range(2))
    role = CountingRole()
    assert make_trainer(config, engine, Loader(make_rounds(), stops=True), role=role).train(STEP) is None
    assert not role.ended
    assert all(one.equal(other) for one, other in zip(weights(engine), weights(untouched), strict=True))
    make_trainer(config, engine, Loader(make_rounds()), role=role).train(STEP)
    assert role.ended == [f"publish {STEP}", f"record {STEP}"]
    make_trainer(config, untouched, Loader(make_rounds())).train(STEP)
    assert all(one.equal(other) for one, other in zip(weights(engine), weights(untouched), strict=True))


@pytest.mark.parametrize(("poison", "what"), [("log_probs", "loss is nan"), ("gradient", "gradient norm is inf")])
def test_what_is_not_finite_ends_the_run_and_changes_no_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, poison: str, what: str
) -> None:
    config = configure()
    engine, rounds = load_train_engine(config, device=CPU), make_rounds()
    (tmp_path / "checkpoints" / "step_000002").mkdir(parents=True)
    if poison == "log_probs":
        rounds[1].columns["rollout_log_probs"].values[0] = math.nan
    else:
        monkeypatch.setattr(engine, "step", lambda scale: StepStats(grad_norm=math.inf, lr=1.0))
    before = weights(engine)
    with pytest.raises(TrainingDiverged, match=f"step {STEP}, update 1: the {what}.*step_000002") as caught:
        make_trainer(config, engine, Loader(rounds), run_dir=tmp_path).train(STEP)
    assert caught.value.final
    assert all(one.equal(other) for one, other in zip(weights(engine), before, strict=True))


@pytest.mark.parametrize(
    ("section", "start_s", "engine", "awaited"),
    [
        ("actor", 123, "hf", (123, "launcher.start_timeout_s")),
        ("critic", 123, "hf", (123, "launcher.start_timeout_s")),
        ("actor", 20, "hf", (50, "launcher.operation_timeout_s")),
        ("actor", 20, "vllm", (400, "vllm.start_timeout_s")),
        ("actor", 500, "vllm", (500, "launcher.start_timeout_s")),
    ],
)
def test_a_trainer_waits_for_producers_as_long_as_a_start_may_take(
    monkeypatch: pytest.MonkeyPatch, section: str, start_s: float, engine: str, awaited: tuple[float, str]
) -> None:
    """A generating engine that loads slowly connects late, and its start is judged by progress."""
    limits = (f"launcher.start_timeout_s={start_s}", "launcher.operation_timeout_s=50", "vllm.start_timeout_s=400")
    config = configure(f"rollout.engine={engine}", *limits)
    monkeypatch.setattr("workers.trainer.step_trainer.StreamingDataLoader", lambda *_, **settings: settings)
    context: Any = SimpleNamespace(config=config, start_step=2, job=SimpleNamespace(last_step=9))
    task: Any = SimpleNamespace(name="train", inputs=())
    settings: Any = open_loader(context, cast(Any, None), task, getattr(config, section), rank=0, num_ranks=1)
    assert (settings["producers_timeout_s"], settings["producers_setting"]) == awaited
    assert awaited[1] in {key.path for key in all_keys()}
    assert (settings["first_partition"], settings["last_partition"]) == (STEP, 9)


def test_the_move_of_an_update_is_measured_on_samples_of_its_step_with_the_weights_of_the_next() -> None:
    config = configure("schedule.mode=async", "schedule.max_staleness=1")
    engine = load_train_engine(config, device=CPU)
    first, *_ = rounds = make_rounds()
    before = engine.log_probs(sequences_of(first))
    loader = Loader(rounds)
    trainer = make_trainer(config, engine, loader)
    records = []
    for step in (STEP, STEP + 1):
        loader._batches, loader.round_partition = rounds, step
        records.append(trainer.train(step))
        if step == STEP:
            moved = (engine.log_probs(sequences_of(first)) - before).abs()
    assert records[0] is not None and records[1] is not None
    assert records[0].gap.mean_move is None and set(records[0].gap.ages) == {"0"} and set(records[1].gap.ages) == {"1"}
    assert records[1].gap.mean_move == pytest.approx(float(moved.mean()), rel=1e-4)
    assert float(moved.mean()) > 0.01


def test_where_no_older_tokens_are_trained_no_move_is_measured() -> None:
    config = configure("schedule.mode=sync")
    trainer = make_trainer(config, load_train_engine(config, device=CPU), Loader(make_rounds()))
    assert trainer._move_probe is None
