"""The services as workers: the queue's storage units, its controllers with admission, and the weight agent."""

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from yaml import YAMLError

from asyncflow.checkpoint_files import QUEUE
from asyncflow.errors import ConfigError
from asyncflow.job import PAUSED, PAUSING
from asyncflow.run_files import FEED_FILE
from tq.columns import Column
from tq.control.controller import ControllerService
from tq.service_process import serve_only
from tq.unit.storage import StorageUnit
from weightsync.agent.agent_service import WeightAgent
from weightsync.config import ExportConfig
from weightsync.export import WeightExporter, WeightFeed
from workers.admission.admission_state import AdmissionState, AdmittedGroup
from workers.admission.admitter import KeepRule, Pause, SavedRows, prompt_admission
from workers.admission.feed_service import FeedService
from workers.admission.task_sampler import TaskSampler, UserSampler
from workers.data.feed_file import FeedFile
from workers.data.prompt_dataset import FedPrompts, Prompt, PromptDataset, Prompts, PromptTokens, open_prompts
from workers.data.prompt_rows import long_rows_text
from workers.data.task_source import changed_data, data_identity
from workers.data.tokenizer import changed_tokenizer
from workers.engines.hf.weights import copy_without_weights, write_weights
from workers.engines.lora import adapted_modules, write_adapter
from workers.outside.run_client import Announcement
from workers.rank.context import ROLLOUT, STARTING, WorkerContext
from workers.records.ledger_file import filtered_groups, trained_groups
from workers.records.samples import LeaseLog, kept_groups
from workers.rows.packed_rows import supervised_columns
from workers.settings.dataflow import PROMPT_COLUMNS, SOURCES, TEACHER, WEIGHTS
from workers.settings.rollout import SamplingConfig
from workers.settings.run import RunConfig
from workers.tasks.graph import graph_of, launched_tasks, prompt_columns, task_of, task_specs
from workers.tasks.reference import reference_step

# (partition that a row was saved in, step that it is admitted for) -> names of columns.
Usable = Callable[[int, int], frozenset[str]]

_SAMPLING = set(SamplingConfig.model_fields) - {"batch_size", "on_swap"}
_SERVING = "serving"
_OWN = {
    *("function", "agent", "agent_command", "tools", "models", "stop", "keep_sampling_mask"),
    *("timeout_s", "max_turns", "max_drawn_tokens", "max_context_tokens", "max_attempts", "on_failure"),
}
_REFERENCE = "ref_log_probs"
# Task -> settings that its outputs depend on, beside its inputs. Tasks that are neither here nor the user's are redone.
_SETTINGS: Mapping[str, Callable[[RunConfig], object]] = {
    "actor_rollout": lambda config: (
        *(config.rollout.model_dump(include=_SAMPLING), config.model.dtype, config.sim),
        *(config.rollout.model_dump(include=_OWN), config.model.renderer, config.algorithm.num_top_log_probs),
    ),
    "rewards": lambda config: config.reward,
    _REFERENCE: lambda config: (
        config.ref.engine,
        config.ref.engine_options,
        config.model.dtype,
        config.algorithm.ref_update_interval,
        config.ref.path,
        getattr(config.algorithm, "top_k", 0),
    ),
    TEACHER: lambda config: (config.teacher.models, config.model.dtype, getattr(config.algorithm, "top_k", 0)),
    "compute_advantages_and_returns": lambda config: config.algorithm,
}


class DatasetPrompts:
    """Admission's source of prompts: the data set in its order, or in that of a user's sampler; closes both.

    `names`: of the columns to write. `report` receives this process's state before each task is made, and when all are.
    """

    def __init__(
        self,
        dataset: Prompts,
        names: Sequence[str] = PROMPT_COLUMNS,
        sampler: TaskSampler | None = None,
        report: Callable[[str], None] = lambda state: None,
    ) -> None:
        self._report = report
        self._dataset = dataset
        self._names = names
        self._sampler = sampler

    def columns(self, groups: Sequence[AdmittedGroup]) -> Mapping[str, Column]:
        made = [(self._find_prompt(group.group), len(group.rows)) for group in groups]
        self._report(_SERVING)
        prompts = [prompt for prompt, number in made for _ in range(number)]
        columns = {
            "prompts": Column.of_rows([prompt.tokens for prompt in prompts]),
            "ground_truth": Column.of_texts([prompt.ground_truth for prompt in prompts]),
            "epochs": Column.of_scalars(torch.tensor([prompt.epoch for prompt in prompts], dtype=torch.int32)),
            "tasks": Column.of_texts([prompt.task for prompt in prompts]),
            "sources": Column.of_texts([prompt.source for prompt in prompts]),
        }
        if prompts and prompts[0].mask is not None:
            rows = [(prompt.tokens, prompt.mask) for prompt in prompts if prompt.mask is not None]
            columns |= supervised_columns(rows)
        return {name: columns[name] for name in self._names}

    def draw_tasks(self, groups: Sequence[int], version: int) -> None:
        if self._sampler is not None:
            self._sampler.draw_tasks(groups, version)
            self._report(_SERVING)

    def close(self) -> None:
        self._dataset.close()
        if self._sampler is not None:
            self._sampler.close()

    def _find_prompt(self, group: int) -> Prompt:
        self._report("making tasks")
        if self._sampler is None:
            return self._dataset.prompt_of_group(group)
        return self._dataset.prompt_at(self._sampler.index_of(group))


def run_storage(context: WorkerContext) -> None:
    """Serve one storage unit until the run is over. Raises RoleFailed if one of its threads died."""
    serve_only()
    config = context.config.tq
    unit = StorageUnit(
        context.job_credentials(),
        context.gang.name,
        config,
        controllers=config.controllers,
        lineage=context.job.lineage,
    )
    context.report_state(_SERVING)
    unit.threads.wait(context.exiting)
    unit.close()


def run_controller(context: WorkerContext) -> None:
    """Serve a part of the control plane until the run is over; the lead admits prompts.

    Raises ConfigError if the data are not those that the run began with, UserCodeFailed for their source or sampler,
    TooManyFailures for too many dead letters, NothingToLearn if dynamic sampling finds too few prompts that teach
    something.
    """
    serve_only()
    config = context.config
    admission = prompts = fed = feed = None
    if context.gang.name == config.tq.controllers[0]:
        check_data(context)
        Announcement.from_run(config, context.job).publish(context.job_credentials())
        fed = _open_feed(context) if config.data.is_feed else None
        prompts = _open_prompts(context) if fed is None else DatasetPrompts(fed, prompt_columns(config))
        admission = prompt_admission(
            context.job_credentials(),
            context.gang.name,
            prompts,
            _first_state(context),
            config=config.tq,
            saved=_saved_rows(context),
            draw=prompts.draw_tasks,
            feed=None if fed is None else fed.rows,
            feed_ended=functools.partial(_end_with_feed, context),
            last_failure=functools.partial(context.last_failure, ROLLOUT),
            pause=Pause(context.pausing.is_set, functools.partial(_report_pause, context), context.on_pause),
        )
    leases = None
    if config.rollout.samples_per_step:
        leases = LeaseLog(
            context.run_dir,
            context.gang.name,
            kept=kept_groups(config),
            now=lambda: context.elapsed_s,
            lineage=context.job.lineage,
        )
    service = ControllerService(
        context.job_credentials(),
        context.gang.name,
        tasks=task_specs(launched_tasks(context.config, context.job), config),
        config=config.tq,
        admission=admission,
        refill=True,
        version=context.start_step,
        row_limit=config.schedule.live_rows,
        lineage=context.job.lineage,
        observer=leases,
    )
    if fed is not None:
        feed = FeedService(context.job_credentials(), fed, threads=service.threads)
    context.report_state(_SERVING)
    service.threads.wait(context.stopping)
    service.stop()  # passes the stop on to all clients that wait
    service.threads.wait(context.exiting)
    service.close()
    if leases is not None:
        leases.close()
    if feed is not None:
        feed.close()
    if prompts is not None:
        prompts.close()


def _open_prompts(context: WorkerContext) -> DatasetPrompts:
    config, sampler = context.config, None
    told = functools.partial(context.report_state, STARTING)
    dataset = open_prompts(config, context.run_dir, context.load_tokenizer(), progress=told)
    if isinstance(dataset, PromptDataset) and dataset.num_skipped and context.gang.index == 0:
        num_rows = dataset.num_skipped + len(dataset)
        context.warn_user(long_rows_text(dataset.num_skipped, f"{num_rows} rows", config.data))
    if config.data.sampler is not None:
        sampler = TaskSampler(
            UserSampler(config.data, size=dataset.size, seed=config.seed),
            context.run_dir,
            batch=config.schedule.rollout_batch_size,
            start_step=context.start_step,
            progress=lambda: context.report_state("drawing tasks"),
        )
    return DatasetPrompts(dataset, prompt_columns(config), sampler, context.report_state)


def _open_feed(context: WorkerContext) -> FedPrompts:
    config = context.config
    tokens = PromptTokens(
        config.data,
        model_dir=Path(config.model.path),
        own_rollout=config.rollout.is_own,
        tokenizer=context.load_tokenizer(),
    )
    return FedPrompts(FeedFile(context.run_dir / FEED_FILE, appends=True), tokens)


def _end_with_feed(context: WorkerContext, last_step: int, num_left: int) -> None:
    context.end_at(last_step)
    if num_left:
        context.warn_user(f"the feed ended: its last {num_left} rows fill no step, and are not trained")


def _report_pause(context: WorkerContext, steps: tuple[int, int] | None) -> None:
    """Report how far a pause is; the launcher shows it (`launcher.process.progress.pause_text`)."""
    if steps is None:
        context.report_pause("")
    elif steps[0] > steps[1]:
        context.report_pause(f"{PAUSING} until step {steps[0]} is trained, which was given out before")
    else:
        context.report_pause(f"{PAUSED} after step {steps[1]}" if steps[1] else f"{PAUSED} before step 1")


def check_data(context: WorkerContext) -> None:
    """Raise ConfigError if data or tokenizer changed since the run began: groups would not have the same prompts."""
    data = context.config.data
    if data_identity(data) != context.first_data_hash():
        raise ConfigError(f"{changed_data(data)}; restore {'it' if data.source else 'the file'}")
    if what := changed_tokenizer(Path(context.config.model.path), context.first_tokenizer_files()):
        raise ConfigError(what if ";" in what else f"{what}; restore it")


def _first_state(context: WorkerContext) -> AdmissionState:
    schedule, start = context.config.schedule, context.start_step
    return AdmissionState(
        schedule,
        version=start,
        last_step=context.job.last_step,
        trained=trained_groups(context.run_dir, schedule, completed=start) if start else (),
        filtered=filtered_groups(context.run_dir, completed=start) if start else (),
        max_filtered=context.config.algorithm.max_filtered(schedule.rollout_batch_size),
        max_dead_letters=context.config.rollout.max_dead_letters(schedule.rollout_batch_size),
        num_fed=0 if context.config.data.is_feed else None,
    )


def _saved_rows(context: WorkerContext) -> SavedRows | None:
    """Return the finished samples that a resumed run reuses; None: a fresh run, or all samples are generated again."""
    config, checkpoint = context.config, Path(context.job.resume_from)
    # Reuse would change which responses share a batch; and where nothing is generated, nothing can be reused.
    if not context.job.resume_from or config.deterministic or config.algorithm.is_supervised:
        return None
    try:
        before = RunConfig.load(checkpoint)
    except (OSError, ValueError, YAMLError) as error:
        context.warn_user(f"{checkpoint}: its configuration cannot be read ({error}); its samples are generated again")
        return None
    rule = KeepRule(
        saved_step=context.start_step,
        gate=config.schedule.gate,
        tasks=task_specs(launched_tasks(config, context.job), config),
        generation=task_of("rollout", config, context.job).name,
        first=frozenset(prompt_columns(config)),
        usable=usable_columns(before, config, saved_step=context.start_step),
    )
    return SavedRows(checkpoint / QUEUE, rule, warn=context.warn_user)


def usable_columns(before: RunConfig, now: RunConfig, *, saved_step: int) -> Usable:
    """Return which columns of a checkpoint's finished samples still hold in a resumed run, perhaps with other settings.

    A column holds if the task that wrote it is the same, with the same settings, and all its inputs hold. What depends
    on the newest weights (`actor_log_probs`) is computed again. The code of user functions is not compared.
    """
    known = {task.name: task for task in graph_of(before)}
    same = [
        task
        for task in graph_of(now)
        if task.name in known
        and (known[task.name].inputs, known[task.name].outputs) == (task.inputs, task.outputs)
        and _same_settings(task.name, before, now)
    ]
    interval = now.algorithm.ref_update_interval
    # Rows hold the names of their sources, which say whose teacher they have.
    renamed = {SOURCES} if before.data.source_names != now.data.source_names else set[str]()

    @cache
    def usable(partition: int, step: int) -> frozenset[str]:
        columns = set(prompt_columns(now)) - renamed
        reference = reference_step(step, interval)
        other = reference > saved_step or reference != reference_step(partition, interval)
        for task in same:
            if columns.issuperset(task.inputs) and not (task.name == _REFERENCE and other):
                columns.update(task.outputs)
        return frozenset(columns)

    return usable


def _same_settings(task: str, before: RunConfig, now: RunConfig) -> bool:
    settings = _settings(task, now)
    return settings is not None and settings == _settings(task, before)


def _settings(task: str, config: RunConfig) -> object:
    if task in _SETTINGS:
        return _SETTINGS[task](config)
    return next((user for user in config.tasks if user.name == task), None)


def _open_exporter(context: WorkerContext, export: ExportConfig) -> WeightExporter:
    run = context.config
    feed = WeightFeed(context.job_credentials(), context.gang.name, "export")
    if not run.sends_adapter:
        copy_rest = functools.partial(copy_without_weights, Path(run.model.path))
        return WeightExporter(feed, export, context.run_dir, copy_rest=copy_rest, write_weights=write_weights)
    lora = run.lora
    assert lora is not None, "versions are its adapters"

    def write(target: Path, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> None:
        tensors = {name: read(name).contiguous() for name in shapes}
        write_adapter(target, tensors, lora, adapted_modules(shapes), base=run.model.path)

    return WeightExporter(feed, export, context.run_dir, copy_rest=Path.mkdir, write_weights=write)


def run_weights(context: WorkerContext) -> None:
    """Serve this node's weight versions until the run is over. Raises RoleFailed if one of its threads died."""
    serve_only()
    peers = [gang.name for gang in context.job.of_role(WEIGHTS) if gang.name != context.gang.name]
    config = context.config.weightsync
    agent = WeightAgent(context.job_credentials(), context.gang.name, config, peers=peers)
    exporter = None
    if config.export is not None and context.gang.index == 0:
        exporter = _open_exporter(context, config.export)
    context.report_state(_SERVING)
    agent.threads.wait(context.exiting)
    if exporter is not None:
        exporter.close(context.config.launcher.stop_timeout_s)
    agent.close()
