"""AsyncFlow's own column tasks: they compute new columns from columns of rows.

One object serves either a role of its own (`workers.tasks.task_worker`) or the actor; `workers.tasks.chain` opens and
runs it in both.

To add a task: a node in the algorithm's graph, a class here, its name in `open_task` of the chain.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from asyncflow.errors import UserCodeFailed
from tq.columns import Column, PackedBatch
from weightsync.version import Version
from workers.algorithms.load_algorithm import load_algorithm
from workers.calls.user_function import excerpt
from workers.engines.base import FrozenEngine, TrainEngine
from workers.engines.load_engine import load_forward_model, load_reward_model, load_teacher
from workers.engines.weight_path import HeldWeights, open_receiver
from workers.rank.context import LOADING, STARTING, WorkerContext
from workers.rank.peers import all_ranks, max_over_ranks
from workers.rewards.base import LARGEST_REWARD, NO_FIELDS
from workers.rewards.scorer import ScoredResponse, Scorer
from workers.rows.packed_rows import Sequences, drawn_column, responses_of, sequences_of
from workers.settings.algorithms import DistillConfig
from workers.settings.dataflow import REF_TOP_COLUMNS, SOURCES, TASKS, TEACHER, TEACHER_TOP_COLUMNS
from workers.settings.engines import TrainingConfig
from workers.settings.rewards import RewardModelConfig
from workers.settings.run import RunConfig
from workers.tasks.reference import ReferencePolicy, reference_step, tokens_of

# Number of whole groups whose advantages are computed at a time.
_GROUPS = 8


class ColumnTask(ABC):
    """Computes the outputs of one task of the graph. Used by one thread."""

    # Most rows at a time; a multiple of the group size for a task over whole groups.
    num_rows: int
    # If set, forward passes are cut at sample borders like this model's micro-batches, the columns have one value per
    # drawn token, and `num_rows` only limits fetching. None: each row is one sample.
    cut: TrainingConfig | None = None
    # All ranks of the gang compute together, equally often; a rank without rows gets a batch without columns.
    collective = False

    @property
    def version(self) -> int | None:
        """Step of the weights that gate the rows; None: no weights do."""
        return None

    def computing(self) -> AbstractContextManager[None]:
        """Enter while ranks that share the model exchange rows on their devices."""
        return nullcontext()

    @property
    def model(self) -> FrozenEngine | None:
        """The model of its own that it computes with on this rank's device."""
        return None

    @abstractmethod
    def compute_columns(self, batch: PackedBatch, step: int) -> Mapping[str, Column]:
        """Return the task's output columns for rows of `step`: N >= 1 unless `collective`, in whole groups if the task
        needs them."""

    def take_weights(self, step: int) -> None:
        """Wait for weights of `step` or later and compute with them from now on; returns early if the run stops. Raises
        WeightSyncError if they do not arrive."""
        raise AssertionError(f"{type(self).__name__} depends on no weights")

    @abstractmethod
    def close(self) -> None:
        """Release the resources of the task."""


class Rewards(ColumnTask):
    """Task `rewards` in a role of its own. Inside the rollout every response is scored as it ends
    (`workers.rollout.outbox`)."""

    def __init__(self, context: WorkerContext) -> None:
        config = context.config
        self._config = config.reward.model
        self.num_rows = config.schedule.n_samples_per_prompt
        if self._config is not None:
            context.report_state(STARTING, LOADING)
            self._model = load_reward_model(self._config, device=context.device)
            self.num_rows = self._config.micro_batch_size
        self._scorer: Scorer | None = None
        if context.rank == 0:  # if ranks share the model, only one calls the function
            tokenizer = context.load_tokenizer()
            self._scorer = Scorer(config.reward, tokenizer, failed=context.reward_failed, scores=config.has_rewards)

    def compute_columns(self, batch: PackedBatch, _: int) -> Mapping[str, Column]:
        """Return `rewards` and `correct`. The function gets the drawn tokens as text, the model the row's last sample.
        If ranks share the model, only the first one returns columns. Raises UserCodeFailed if the reward model gave a
        response no finite number."""
        if self._scorer is None:
            self._model.score_samples(sequences_of(batch))
            return {}
        prompts, responses = list(batch["prompts"].rows()), responses_of(batch)
        ground_truths = batch["ground_truth"].texts()
        tasks = batch[TASKS].texts() if TASKS in batch.columns else [NO_FIELDS] * len(ground_truths)
        rows = zip(prompts, responses, ground_truths, tasks, strict=True)
        cuts = batch["truncated"].values.tolist()
        futures = [self._scorer.submit(*row, truncated=bool(cut)) for row, cut in zip(rows, cuts, strict=True)]
        if self._config is None:
            return self._scorer.columns([future.result() for future in futures])
        last_N = batch["sample_lengths"].lengths.cumsum(0) - 1
        # The reward function runs meanwhile, in the scorer.
        model_scores = self._model.score_samples(sequences_of(batch))[last_N].tolist()
        pairs = zip((future.result() for future in futures), model_scores, strict=True)
        return self._scorer.columns([_combined(scored, score, self._config) for scored, score in pairs])

    def close(self) -> None:
        if self._scorer is not None:
            self._scorer.close()


class ReferenceLogProbs(ColumnTask):
    """Log-probabilities under the reference policy. In a role of its own, a reference that follows the policy gets only
    rows of the steps that its weights are the reference of."""

    def __init__(self, context: WorkerContext, engine: TrainEngine | None = None) -> None:
        config = context.config
        self.num_rows = config.ref.micro_batch_size
        if engine is not None:
            self.num_rows = min(self.num_rows, config.actor.micro_batch_size)
        self.cut = cut_of(config, config.actor.model_copy(update={"shared_prompt": config.ref.shared_prompt}))
        self._interval = config.algorithm.ref_update_interval
        algorithm = config.algorithm
        is_teacher = isinstance(algorithm, DistillConfig) and not algorithm.has_own_teacher
        self._top_k = algorithm.top_k if isinstance(algorithm, DistillConfig) and is_teacher else 0
        self._num_tokens = tokens_of(config.model.path)
        self._reference = ReferencePolicy(context, hosted=engine is not None)
        self._is_hosted = engine is not None

    def compute_columns(self, batch: PackedBatch, step: int) -> Mapping[str, Column]:
        """Return `ref_log_probs`, float32 per drawn token, or the most likely tokens (`REF_TOP_COLUMNS`)."""
        held = self.version  # may be newer: a lost row of a trained step may come again, but nobody reads the result
        assert held is None or held >= reference_step(step, self._interval), f"step {step} came to reference {held}"
        if self._top_k:
            found = self._reference.top_log_probs(sequences_of(batch), self._top_k, num_tokens=self._num_tokens)
            return {name: drawn_column(value_AK, batch) for name, value_AK in zip(REF_TOP_COLUMNS, found, strict=True)}
        return {"ref_log_probs": drawn_column(self._reference.log_probs(sequences_of(batch), step=step), batch)}

    @property
    def version(self) -> int | None:
        """Step of the reference; None: it never changes, or the task is hosted: the host requests rows only once it has
        theirs."""
        return None if self._is_hosted else self._reference.version

    def computing(self) -> AbstractContextManager[None]:
        return self._reference.computing()

    @property
    def model(self) -> FrozenEngine:
        return self._reference.model

    def take_weights(self, step: int) -> None:
        self._reference.take_weights(step)

    def close(self) -> None:
        self._reference.close()


class TeacherLogProbs(ColumnTask):
    """What the teachers give the tokens that the policy drew, each for rows of its sources; in a role of its own."""

    def __init__(self, context: WorkerContext) -> None:
        config = context.config
        assert isinstance(config.algorithm, DistillConfig), "no other algorithm has the task"
        self.num_rows = config.teacher.micro_batch_size
        self.cut = cut_of(config, config.actor.model_copy(update={"shared_prompt": config.teacher.shared_prompt}))
        self._algorithm = config.algorithm
        self._sources = config.teacher.sources
        context.report_state(STARTING, LOADING)
        paths = dict.fromkeys(config.teacher.models.values())
        self._teachers = {path: load_teacher(config, Path(path), device=context.device) for path in paths}
        self._known_tokens = {path: tokens_of(path) for path in paths}
        self._num_tokens = tokens_of(config.model.path)
        self._path = config.teacher.path

    def compute_columns(self, batch: PackedBatch, _: int) -> Mapping[str, Column]:
        """Return `teacher_log_probs`, float32 per drawn token, or the most likely tokens (`TEACHER_TOP_COLUMNS`)."""
        if not self._sources:
            return self._columns_of(self._path, batch)
        rows: dict[str | None, list[int]] = {}
        for row, source in enumerate(batch[SOURCES].texts()):
            path = self._sources[source].path if source in self._sources else self._path
            rows.setdefault(path, []).append(row)
        parts = [self._columns_of(path, batch.select(chosen)) for path, chosen in rows.items()]
        order = [row for chosen in rows.values() for row in chosen]
        back = sorted(range(len(order)), key=order.__getitem__)
        return {name: Column.concatenate([part[name] for part in parts]).select(back) for name in parts[0]}

    def close(self) -> None:
        """Do nothing: the models end with the process."""

    def _columns_of(self, path: str | None, batch: PackedBatch) -> Mapping[str, Column]:
        assert path is not None, "the algorithm's check refuses rows without a teacher"
        teacher, k = self._teachers[path], self._algorithm.top_k
        sequences = sequences_of(batch).clamped(self._known_tokens[path])
        if not k:
            return {TEACHER: drawn_column(teacher.log_probs(sequences), batch)}
        # Its embeddings may be padded to more tokens than the policy has.
        found = teacher.top_log_probs(sequences, k, num_tokens=self._num_tokens)
        return {name: drawn_column(value_AK, batch) for name, value_AK in zip(TEACHER_TOP_COLUMNS, found, strict=True)}


class HostedColumn(ColumnTask):
    """A column that `compute`, of an engine in training, returns: float32 [A]; collective. Rows of a step come before
    its first update, so the engine holds the right weights."""

    collective = True

    def __init__(
        self,
        name: str,
        compute: Callable[[Sequences | None], Tensor],
        *,
        num_rows: int,
        cut: TrainingConfig | None = None,
    ) -> None:
        self.num_rows = num_rows
        self.cut = cut
        self._name = name
        self._compute = compute

    def compute_columns(self, batch: PackedBatch, _: int) -> Mapping[str, Column]:
        if not len(batch):
            self._compute(None)
            return {}
        return {self._name: drawn_column(self._compute(sequences_of(batch)), batch)}

    def close(self) -> None:
        """Do nothing: the trainer owns the engine."""


class FollowerLogProbs(ColumnTask):
    """`old_log_probs` in a role of its own: a copy of the policy that gets rows of step s when it holds weights of step
    s - 1.

    Later weights do not exist before these rows are trained. (A row lost after that may be requested again; nobody
    reads the result then.)
    """

    def __init__(self, context: WorkerContext) -> None:
        config = context.config
        self.num_rows = config.ref.micro_batch_size
        self.cut = cut_of(config, config.actor.model_copy(update={"shared_prompt": config.ref.shared_prompt}))
        self._context = context
        context.report_state(STARTING, LOADING)
        self._model = load_forward_model(context.config, device=context.device)
        receiver = open_receiver(
            context, self._model.weight_needs(), adopts=self._model.adopts_weights, whole=context.gang.num_ranks == 1
        )
        load = partial(self._model.load_weights, adopt=receiver.adopts)
        self._weights = HeldWeights(context, receiver, load)

    @property
    def version(self) -> int | None:
        return self._weights.step

    def compute_columns(self, batch: PackedBatch, step: int) -> Mapping[str, Column]:
        """Return `old_log_probs`, float32 per drawn token."""
        assert self._weights.step >= step - 1, f"rows of step {step} came to weights of step {self._weights.step}"
        with self._weights.computing():
            return {"old_log_probs": drawn_column(self._model.log_probs(sequences_of(batch)), batch)}

    def computing(self) -> AbstractContextManager[None]:
        return self._weights.computing()

    def take_weights(self, step: int) -> None:
        """Wait for weights of `step` or later and compute with them from now on. All ranks that share the model end
        with the same version."""
        lineage, stopping = self._context.job.lineage, self._context.stopping
        while True:
            self._weights.wait_for(Version(lineage, step))
            if self._context.gang.num_ranks == 1:
                return
            step = max_over_ranks(self._weights.step)  # a later rank may have received newer weights
            if all_ranks(self._weights.step == step) or not all_ranks(not stopping.is_set()):
                return

    def close(self) -> None:
        self._weights.close()


class Advantages(ColumnTask):
    """Task `compute_advantages_and_returns`: the algorithm's advantages of whole groups."""

    def __init__(self, context: WorkerContext) -> None:
        self._algorithm = load_algorithm(context.config.algorithm, context.config.rollout)
        self._group_size = context.config.schedule.n_samples_per_prompt
        self.num_rows = self._group_size * _GROUPS

    def compute_columns(self, batch: PackedBatch, _: int) -> Mapping[str, Column]:
        """Return the algorithm's columns, at least `advantages`."""
        return self._algorithm.advantages(batch, group_size=self._group_size)

    def close(self) -> None:
        """Do nothing: it holds no resources."""


def cut_of(config: RunConfig, training: TrainingConfig) -> TrainingConfig | None:
    """Return how to cut a model's forward passes: by tokens if rows may have several samples, otherwise None."""
    return training if config.rollout.is_own and training.max_tokens_per_micro_batch else None


def _combined(scored: ScoredResponse, model_score: float, config: RewardModelConfig) -> ScoredResponse:
    if scored.failure:  # no reward where the function failed; and only the function decides `correct`
        return scored
    reward = config.weight * model_score + config.function_weight * scored.reward
    if not abs(reward) <= LARGEST_REWARD:
        raise UserCodeFailed(
            f"reward.model: {config.path} scored the response {excerpt(scored.response)} with {model_score:g}, which "
            f"is not a reward; look at the model, or set reward.model.dtype to float32"
        )
    return replace(scored, reward=reward)
