"""Which object computes which task of the graph: task name -> factory, for AsyncFlow's own; else a user's function."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from workers.columns.advantages import Advantages
from workers.columns.log_probs import ReferenceLogProbs, open_actor_log_probs
from workers.columns.rewards import Rewards
from workers.columns.task import ColumnTask
from workers.columns.user import UserTask
from workers.columns.values import Values
from workers.context import WorkerContext
from workers.engines.base import TrainEngine, ValueEngine
from workers.tokenizer import TextDecoder, load_tokenizer

Factory = Callable[[WorkerContext, TrainEngine | None], ColumnTask]
"""(this rank, the engine of the actor that hosts the task or None in a role of its own) -> the task."""

COLUMN_TASKS: Mapping[str, Factory] = MappingProxyType(
    {
        "rewards": Rewards,
        "ref_log_probs": ReferenceLogProbs,
        "actor_log_probs": open_actor_log_probs,
        "compute_advantages_and_returns": Advantages,
    }
)


VALUES = "values"


def open_task(
    name: str, context: WorkerContext, engine: TrainEngine | None, critic: ValueEngine | None = None
) -> ColumnTask:
    """Return the task `name` of this run's graph; `critic`: that the process trains."""
    config = context.config
    if name == VALUES:
        assert critic is not None, f"{name} is computed where the critic is trained"
        section = config.actor if context.gang.role == "actor" else config.critic
        num_rows = section.micro_batch_size
        if section.max_tokens_per_micro_batch:  # then that is a whole round, and says nothing of memory
            num_rows = min(num_rows, config.ref.micro_batch_size)
        return Values(critic, num_rows=num_rows)
    user = next((task for task in config.tasks if task.name == name), None)
    if user is None:
        return COLUMN_TASKS[name](context, engine)
    decoder = TextDecoder(load_tokenizer(Path(config.model.path)))
    return UserTask(user, decoder, num_rows=config.schedule.n_samples_per_prompt)
