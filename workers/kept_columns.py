"""Which columns of a checkpoint's finished samples still hold when a run goes on, maybe with other settings. Pure.

A column holds if the task that wrote it is the same, with the same settings, and all that it was computed from holds.
What depends on the newest weights (`actor_log_probs`) is computed again. The code of a user's function is not compared.
"""

from collections.abc import Callable, Mapping
from functools import cache

from workers.config import RunConfig, SamplingConfig
from workers.dataflow import PROMPT_COLUMNS
from workers.graph import graph_of
from workers.reference import reference_step

Usable = Callable[[int, int], frozenset[str]]
"""(partition that a row was saved in, step that it is admitted for) -> names of columns."""

_SAMPLING = set(SamplingConfig.model_fields) - {"batch_size", "on_swap"}
_REFERENCE = "ref_log_probs"
_SETTINGS: Mapping[str, Callable[[RunConfig], object]] = {
    "actor_rollout": lambda config: (config.rollout.model_dump(include=_SAMPLING), config.model.dtype, config.sim),
    "rewards": lambda config: config.reward,
    _REFERENCE: lambda config: (config.ref.engine, config.model.dtype, config.algorithm.ref_update_interval),
    "compute_advantages_and_returns": lambda config: config.algorithm,
}
"""Task -> what its outputs depend on beside its inputs. Tasks that are not here, nor users', are done again."""


def usable_columns(before: RunConfig, now: RunConfig, *, saved_step: int) -> Usable:
    """Return which columns hold.

    Args:
        before, now: the configurations that the checkpoint was saved, and is gone on from, with; data, seed, batch and
            group size are the same.
        saved_step: of the checkpoint.
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

    @cache
    def usable(partition: int, step: int) -> frozenset[str]:
        columns = set(PROMPT_COLUMNS)
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
    """Return what a task of a configuration depends on; None: nobody knows."""
    if task in _SETTINGS:
        return _SETTINGS[task](config)
    return next((user for user in config.tasks if user.name == task), None)
