"""Engines and a queue in one process, driven by a researcher's own loop: `Trainer.init_engines`.

    with asyncflow.Trainer("quickstart").init_engines() as engines:
        engines.put_prompts_data(rows)                                       G rows each, in the queue
        lease = engines.get_experience_data("actor_rollout")                 lease and read
        engines.put_experience_data(lease, engines.generate_sequences(lease))
        ... rewards alike ...
        lease = engines.get_experience_data("actor_train")
        engines.update(lease)
        engines.put_experience_data(lease)                                   no columns: acknowledge
        engines.weight_sync_notify()                                         the generator gets the new weights

The calls are those of AsyncFlow (arXiv 2507.01663, section 5). Queue, engines, algorithms and settings are those of a
run; there is no launcher, admission, staleness gate, checkpoint or ledger. Leases are checked like those of an outside
process (`workers.outside.run_client`).
"""

import reprlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from asyncflow.device import group_backends
from asyncflow.errors import ConfigError, DeadlineExceeded, LeaseFenced
from asyncflow.job import LOOPBACK, choose_interface
from tq.client.lease import Lease
from tq.columns import Column, PackedBatch
from tq.config import TaskConfig
from tq.local import LocalQueue
from weightsync.version import Version
from workers.algorithms.load_algorithm import load_algorithm
from workers.data.prompt_dataset import PromptTokens
from workers.data.prompt_rows import as_row
from workers.data.tokenizer import load_tokenizer
from workers.engines.base import CopyingEngine, FrozenEngine, GenerateRequest, PipelinedEngine, PolicyCopy, generate
from workers.engines.load_engine import load_frozen_model, load_generate_engine, load_train_engine
from workers.outside.run_client import OutsideLease, OutsideTask
from workers.records.step_totals import UpdateTotals
from workers.rows.packed_rows import drawn_column, micro_batches, responses_of, samples_of, sequences_of
from workers.settings.dataflow import ACTOR_TRAIN, place_tasks
from workers.settings.run import RunConfig
from workers.tasks.graph import graph_of, prompt_columns
from workers.trainer.step_trainer import policy_learner

_FUSED = {"ref_log_probs", "actor_log_probs", "compute_advantages_and_returns"}  # tasks that `update` performs itself


class LocalEngines:
    """A generator, a trainer and a queue in this process; a context manager, for one thread.

    Subclasses may override `generate_sequences` and `update`. Raises ConfigError for settings that such a loop lacks.

    Args:
        config: resolved.
        device: of both engines; None: the CPU.

    Attributes:
        generator, trainer: the engines; the generator starts with the initial weights.
        queue: for clients in other threads.
        version: step of the trainer's weights; 0: the initial ones.
    """

    def __init__(self, config: RunConfig, device: torch.device | None = None) -> None:
        self.config, device = config, device or torch.device("cpu")
        self._tasks = {task.name: task for task in place_tasks(graph_of(config), ("rollout", "reward", "actor"))}
        _check(config, self._tasks[ACTOR_TRAIN].fused)
        model_dir, self._device, self.version = Path(config.model.path), device, 0
        told, now = config.data.templates, datetime.now().isoformat(timespec="seconds")
        self.tokenizer = load_tokenizer(model_dir, msgspec.structs.replace(told, time=told.time or now))
        self._tokens = PromptTokens(config.data, model_dir=model_dir, own_rollout=False, tokenizer=self.tokenizer)
        self._algorithm = load_algorithm(config.algorithm, config.rollout)
        self._draws = np.random.Generator(np.random.PCG64(config.seed))
        self._reference: FrozenEngine | PolicyCopy | None = None
        self._trained: set[int] = set()  # tokens of leases
        self._own = ExitStack()
        try:
            choose_interface(LOOPBACK)
            if not dist.is_initialized():
                dist.init_process_group(group_backends(device), store=dist.HashStore(), rank=0, world_size=1)
                self._own.callback(dist.destroy_process_group)
            self.trainer = load_train_engine(config, device=device)
            self.generator = load_generate_engine(config, config.rollout, device=device)
            self._own.callback(self.generator.close)
            self._learner = policy_learner(config, self.trainer)
            self.weight_sync_notify()
            if config.algorithm.kl_coef > 0 and config.reference_is_base:
                assert isinstance(self.trainer, CopyingEngine), "the rules of the run refuse other engines with lora"
                self._reference = self.trainer.open_copy(initial=True)
            elif config.algorithm.kl_coef > 0:
                self._reference = load_frozen_model(config, device=device, weights_dir=None)
            served = {
                name: TaskConfig(name=name, inputs=task.inputs, outputs=task.outputs, whole_groups=task.whole_groups)
                for name, task in self._tasks.items()
            }
            self.queue = self._own.enter_context(LocalQueue(served, config=config.tq))
            self._client = self.queue.client("loop")
        except BaseException:
            self._own.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._own.close()

    def put_prompts_data(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Put data rows, each as a group of `schedule.n_samples_per_prompt` rows, for task `actor_rollout`. Raises
        ConfigError if there are no rows, or one lacks its prompt or ground truth, or has too long a prompt."""
        data, size = self.config.data, self.config.schedule.n_samples_per_prompt
        if isinstance(rows, str | Mapping) or not rows or not all(isinstance(row, Mapping) for row in rows):
            raise ConfigError(f"rows: {reprlib.repr(rows)} is not a list of rows; give one dict or more, in a list")
        given = [
            as_row(dict(row), place, data, own_rollout=False, where=f"row {place}") for place, row in enumerate(rows)
        ]
        prompts = self._tokens.tokenize_rows(given)[1]
        for k, row in enumerate(given):
            if not self._tokens.row_fits(row, len(prompts[k])):
                raise ConfigError(
                    f"row {k}: the prompt has {len(prompts[k])} tokens, more than data.max_prompt_tokens = "
                    f"{data.max_prompt_tokens}; raise that, or leave the row out"
                )
        members = [k for k in range(len(given)) for _ in range(size)]
        columns = {
            "prompts": Column.of_rows([torch.tensor(prompts[k]) for k in members]),
            "ground_truth": Column.of_texts([given[k].ground_truth for k in members]),
            "epochs": Column.of_scalars(torch.zeros(len(members), dtype=torch.int32)),
            "tasks": Column.of_texts([given[k].task for k in members]),
            "sources": Column.of_texts([""] * len(members)),
        }
        self._client.put_rows({name: columns[name] for name in prompt_columns(self.config)}, group_size=size)

    def get_experience_data(self, task: str, *, num_rows: int | None = None, timeout_s: float = 60.0) -> OutsideLease:
        """Lease rows that are ready for a task, and read its inputs.

        Args:
            task: `actor_rollout`, `rewards` or `actor_train`.
            num_rows: at most; None: one step's rows.
            timeout_s: how long to wait for the first row.

        Raises:
            ConfigError: no such task.
            DeadlineExceeded: no row was ready in time.
        """
        if task not in self._tasks:
            raise ConfigError(f"task: {task!r} is not a task of the queue; name one of {' '.join(self._tasks)}")
        num_rows = self.config.schedule.step_rows if num_rows is None else num_rows
        fetched = self._client.fetch(task, num_rows=num_rows, timeout_s=timeout_s)
        if not isinstance(fetched, Lease):
            raise DeadlineExceeded(
                f"task {task}: no row was ready within {timeout_s:g} s ({fetched.reason}); its inputs are "
                f"{' '.join(self._tasks[task].inputs)}: put prompts, and the outputs of the tasks before it"
            )
        placed, held = self._tasks[task], Version(0, self.generator.version)
        checked = OutsideTask(placed.inputs, placed.outputs, needs_version=False)
        lease = OutsideLease(self._client.data, fetched, checked, held, allowed=self.config.schedule.staleness)
        lease.read(placed.inputs)
        return lease

    def put_experience_data(self, lease: Lease, columns: Mapping[str, Any] | None = None) -> None:
        """Write a task's outputs, one value per row of the lease, which completes its rows.

        `columns`: all outputs of the task, numbers or tensors; None: it has none.

        Raises:
            ConfigError: a column is missing, is not an output, or does not fit; nothing was put.
            LeaseFenced: the rows took longer than `tq.lease_timeout_s` and now belong to another lease; nothing was
                put.
        """
        if not (lease.ack() if columns is None else lease.put(columns)):
            raise LeaseFenced(
                f"task {lease.grant.task}: the lease is void, others may have its rows, and nothing was put; get rows "
                f"again, or raise tq.lease_timeout_s"
            )

    def responses(self, lease: Lease) -> list[str]:
        drawn = responses_of(lease.read(["tokens", "response_mask"]))
        return [str(text) for text in self.tokenizer.batch_decode(drawn, skip_special_tokens=True)]

    def generate_sequences(self, lease: Lease) -> Mapping[str, Any]:
        """Return the outputs of task `actor_rollout`: a response to each prompt, by the weights last published."""
        prompts = list(lease["prompts"].rows())
        seeds = self._draws.integers(2**63, size=len(prompts)).tolist()
        requests = [GenerateRequest(k, prompt, seeds[k], ticket=k) for k, prompt in enumerate(prompts)]
        made = sorted(generate(self.generator, requests), key=lambda one: one.index)
        tokens = [torch.cat([prompt, one.response_R]) for prompt, one in zip(prompts, made, strict=True)]
        return {
            "tokens": tokens,
            "sample_lengths": [[len(row)] for row in tokens],
            "response_mask": [
                torch.arange(len(row)) >= len(prompt) for row, prompt in zip(tokens, prompts, strict=True)
            ],
            "rollout_log_probs": [one.log_probs_R for one in made],
            "versions": [one.versions_R for one in made],
            "truncated": [one.truncated for one in made],
        }

    def update(self, lease: Lease) -> dict[str, float]:
        """Train on whole groups: one optimizer update. Returns `step`, `loss`, `grad_norm`, `lr`, `reward_mean` and
        `accuracy`. Raises ConfigError if the lease is of another task, or was trained on before."""
        if lease.grant.task != ACTOR_TRAIN or lease.grant.token in self._trained:
            what = "was trained on already" if lease.grant.task == ACTOR_TRAIN else f"is of task {lease.grant.task}"
            raise ConfigError(f"update: the lease {what}; get another one, get_experience_data({ACTOR_TRAIN!r})")
        self._trained.add(lease.grant.token)
        batch = self._with_columns(lease.read(self._tasks[ACTOR_TRAIN].inputs))
        samples, algorithm = samples_of(batch), self._algorithm
        if algorithm.whole_step:
            samples = algorithm.normalized(samples, algorithm.moments(samples))
        parts = [samples.select(positions) for positions in micro_batches(samples, self.config.actor)]
        losses = [self._learner.train(part, self._device) for part in parts]
        if isinstance(self.trainer, PipelinedEngine):
            self.trainer.finish_micro_batches()
        totals = UpdateTotals()
        for part, loss in zip(parts, losses, strict=True):
            assert loss is not None, "micro-batches of this rank's rows have some"
            totals.add_micro_batch(algorithm.counts(part), float(loss.stats["loss"]))
        scale = algorithm.scale(totals.counts)
        made = self.trainer.step(scale)
        self.version += 1
        return {
            "step": self.version,
            "loss": totals.loss * scale,
            "grad_norm": made.grad_norm,
            "lr": made.lr,
            "reward_mean": float(batch["rewards"].values.nanmean()),
            "accuracy": float(batch["correct"].values.float().mean()),
        }

    def weight_sync_notify(self) -> int:
        """Publish the trainer's weights to the generator; return their version."""
        self.generator.load_weights({shard.name: shard.values for shard in self.trainer.shards()})
        self.generator.version = self.version
        return self.version

    def _with_columns(self, batch: PackedBatch) -> PackedBatch:
        """Add the columns that a run's actor would compute before it trains."""

        sequences = sequences_of(batch)
        if self._reference is not None:
            log_probs_A = self._reference.log_probs(sequences)
            batch = batch.with_columns({"ref_log_probs": drawn_column(log_probs_A, batch)})
        if "actor_log_probs" in self._tasks[ACTOR_TRAIN].fused:
            batch = batch.with_columns({"old_log_probs": drawn_column(self.trainer.log_probs(sequences), batch)})
        group_size = self.config.schedule.n_samples_per_prompt
        return batch.with_columns(self._algorithm.advantages(batch, group_size=group_size))


def _check(config: RunConfig, fused: Sequence[str]) -> None:
    """Refuse settings that this loop lacks, before anything is started."""
    others = sorted(set(fused) - _FUSED)
    for what, there in (
        (f"algorithm.name: {config.algorithm.name} has tasks {' '.join(others)}, which", bool(others)),
        ("rollout: a function or an agent of your own", config.rollout.is_own),
        ("actor.num_mini_batches, actor.ppo_epochs: more than one update a step", config.actor.num_updates > 1),
        ("algorithm.group_filter: groups that are replaced", config.algorithm.filters_groups),
        ("algorithm.top_k: tokens that were not drawn", getattr(config.algorithm, "top_k", 0) > 0),
        ("algorithm.divergence_top_k: tokens that were not drawn", config.algorithm.num_top_log_probs > 0),
        ("rollout.keep_sampling_mask: kept tokens", config.rollout.keeps_mask),
        ("actor.tri_model: copies of the policy", config.actor.tri_model),
        ("weightsync.lora: adapter", config.sends_adapter),
        ("algorithm.ref_update_interval: a reference that follows", bool(config.algorithm.ref_update_interval)),
        ("reward.model: a reward model", config.reward.model is not None),
    ):
        if there:
            raise ConfigError(
                f"{what} is not supported in a loop of your own (init_engines); leave it out, or use fit()"
            )
