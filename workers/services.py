"""The services as workers: the queue's storage units and its controller with admission, and the weight agent."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from yaml import YAMLError

from tq.batch import Column
from tq.control.admission import AdmittedGroup
from tq.control.controller import ControllerService
from tq.control.saved_rows import KeepRule, SavedRows
from tq.service_process import serve_only
from tq.unit.storage import StorageUnit
from weightsync.agent.service import WeightAgent
from weightsync.export import WeightExporter
from weightsync.external import WeightFeed
from workers.checkpoint_files import QUEUE
from workers.config import RunConfig
from workers.context import WorkerContext
from workers.data import read_prompt_rows
from workers.dataflow import PROMPT_COLUMNS, WEIGHTS
from workers.engines.hf_weights import copy_without_weights, write_weights
from workers.kept_columns import usable_columns
from workers.prompt_dataset import PromptDataset
from workers.run_data import check_data
from workers.tasks import launched_tasks, task_of, task_specs
from workers.trained_groups import filtered_groups, trained_groups


class DatasetPrompts:
    """Admission's source of prompts: the data set, in its shuffled order."""

    def __init__(self, dataset: PromptDataset) -> None:
        self._dataset = dataset

    def columns(self, groups: Sequence[AdmittedGroup]) -> Mapping[str, Column]:
        """Return `prompts`, `answers`, `epochs` of every row, group after group."""
        prompts = [self._dataset.prompt(group.group) for group in groups for _ in group.rows]
        return {
            "prompts": Column.of_rows([prompt.tokens for prompt in prompts]),
            "answers": Column.of_texts([prompt.answer for prompt in prompts]),
            "epochs": Column.of_scalars(torch.tensor([prompt.epoch for prompt in prompts], dtype=torch.int32)),
        }


def run_storage(context: WorkerContext) -> None:
    """Serve one storage unit until the run is over.

    Raises:
        RoleFailed: a thread of it died.
    """
    serve_only()
    config = context.config.tq
    unit = StorageUnit(
        context.credentials(),
        context.gang.name,
        config,
        controllers=config.controllers,
        lineage=context.job.lineage,
    )
    context.report("serving")
    unit.threads.wait(context.exiting)
    unit.close()


def run_controller(context: WorkerContext) -> None:
    """Serve a part of the control plane until the run is over; the lead admits prompts. Pass a stop on to all who wait.

    Raises:
        ConfigError: the data are not those that the run began with.
        NothingToLearn: dynamic sampling finds too few prompts that teach something.
        RoleFailed: a thread of it died.
    """
    serve_only()
    config = context.config
    prompts = None
    if context.gang.name == config.tq.controllers[0]:
        check_data(context)
        rows = read_prompt_rows(Path(config.data.path), config.data)
        dataset = PromptDataset(rows, config.data, model_dir=Path(config.model.path), seed=config.seed)
        prompts = DatasetPrompts(dataset)
    service = ControllerService(
        context.credentials(),
        context.gang.name,
        tasks=task_specs(launched_tasks(context.config, context.job), config),
        config=config.tq,
        schedule=config.schedule,
        prompts=prompts,
        refill=True,
        version=context.start_step,
        trained=_trained(context),
        filtered=_filtered(context),
        max_filtered=config.algorithm.max_filtered(config.schedule.rollout_batch_size),
        saved=_saved_rows(context) if prompts is not None else None,
        last_step=context.job.last_step,
        lineage=context.job.lineage,
    )
    context.report("serving")
    service.threads.wait(context.stopping)
    service.stop()
    service.threads.wait(context.exiting)
    service.close()


def _trained(context: WorkerContext) -> frozenset[int]:
    """Return the groups that are in the weights that this run starts from."""
    if not context.start_step:
        return frozenset()
    return trained_groups(context.run_dir, context.config.schedule, completed=context.start_step)


def _filtered(context: WorkerContext) -> frozenset[int]:
    """Return the groups that were filtered out before this run goes on."""
    return filtered_groups(context.run_dir, completed=context.start_step) if context.start_step else frozenset()


def _saved_rows(context: WorkerContext) -> SavedRows | None:
    """Return the finished samples that the run goes on with; None: it starts anew, or generates them all again."""
    config, checkpoint = context.config, Path(context.job.resume_from)
    if not context.job.resume_from or config.deterministic:  # which answers share a batch would be another question
        return None
    try:
        before = RunConfig.load(checkpoint)
    except (OSError, ValueError, YAMLError) as error:
        context.warn(f"{checkpoint}: its configuration cannot be read ({error}); its samples are generated again")
        return None
    rule = KeepRule(
        saved_step=context.start_step,
        max_staleness=config.schedule.gate_staleness,
        tasks=task_specs(launched_tasks(config, context.job), config),
        generation=task_of("rollout", config, context.job).name,
        first=frozenset(PROMPT_COLUMNS),
        usable=usable_columns(before, config, saved_step=context.start_step),
    )
    return SavedRows(checkpoint / QUEUE, rule, warn=context.warn)


def run_weights(context: WorkerContext) -> None:
    """Serve this node's weight versions until the run is over.

    Raises:
        RoleFailed: a thread of it died.
    """
    serve_only()
    peers = [gang.name for gang in context.job.of_role(WEIGHTS) if gang.name != context.gang.name]
    config = context.config.weightsync
    agent = WeightAgent(context.credentials(), context.gang.name, config, peers=peers)
    exporter = None
    if config.export is not None and context.gang.index == 0:
        exporter = WeightExporter(
            WeightFeed(context.credentials(), context.gang.name, "export"),
            config.export,
            context.run_dir,
            copy_rest=functools.partial(copy_without_weights, Path(context.config.model.path)),
            write_weights=write_weights,
        )
    context.report("serving")
    agent.threads.wait(context.exiting)
    if exporter is not None:
        exporter.close(context.config.launcher.stop_timeout_s)
    agent.close()
