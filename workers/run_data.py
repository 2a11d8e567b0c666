"""The data that a run began with, whatever became of the file since."""

from pathlib import Path

from asyncflow.errors import ConfigError
from workers.checkpoint_files import CheckpointMeta
from workers.context import WorkerContext
from workers.data import data_hash


def first_data_hash(context: WorkerContext) -> str:
    """Return the hash of the prompts' file when the run began: from its checkpoint, else from whoever read it first."""
    resume_from = context.job.resume_from
    if resume_from:
        return CheckpointMeta.read(Path(resume_from)).data_hash
    return context.said_first("data_hash", data_hash(Path(context.config.data.path)))


def check_data(context: WorkerContext) -> None:
    """Refuse data that changed since the run began: groups would not be the prompts that they were.

    Raises:
        ConfigError: they did.
    """
    path = Path(context.config.data.path)
    if data_hash(path) != first_data_hash(context):
        raise ConfigError(f"data.path: the content of {path} is not what the run began with; restore the file")
