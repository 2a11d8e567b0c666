"""Tasks that a class of the user's makes (`data.source`): (seed, index) -> data row. Torch-free.

    class Sums:
        class Config(Settings): ...                       # data.options, pydantic's; leave it out: they are as given
        def __init__(self, digits: int = 2): ...          # the options by name
        def __len__(self) -> int: ...                     # optional: an epoch; without it tasks never end
        def task(self, seed: int, index: int) -> dict: ...

The same arguments must give the same row: a group that is put again, or goes on from a checkpoint, asks once more. The
class runs in a child process.
"""

from types import TracebackType

import msgspec

from asyncflow.errors import ConfigError, UserCodeFailed
from workers.calls.user_object import UserObject
from workers.data.prompt_rows import PromptRow, as_row, data_hash, kind_of, read_data
from workers.settings.data import DataConfig
from workers.settings.run import RunConfig

HELD_OUT_SEEDS = 2**31
"""Added to the run's seed for held-out tasks: above all seeds of training."""
_TRIED = 32
"""Tasks that are looked at before a run starts."""


class TaskSource:
    """The class, in its child; a context manager. Used by one thread.

    Attributes:
        size: tasks of an epoch; None: they never end.
    """

    def __init__(self, config: DataConfig, *, seed: int, own_rollout: bool, key: str = "data") -> None:
        """Make the object.

        Args:
            config: names the class.
            seed: of the tasks.
            own_rollout: a rollout of the user's gets the rows: they need no prompt.
            key: section that names the class.

        Raises:
            ConfigError, UserCodeFailed: it cannot be made, or has no tasks.
        """
        assert config.source is not None, "else there is a file"
        self._config, self._seed, self._own_rollout = config, seed, own_rollout
        self._source = UserObject(
            config.source,
            config.options,
            field=f"{key}.source",
            section=f"{key}.options",
            methods={"task": ("seed", "index")},
            timeout_s=config.timeout_s,
        )
        try:
            self.size = self._source.size()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "TaskSource":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def row(self, index: int) -> PromptRow:
        """Return a task.

        Raises:
            UserCodeFailed: the class raised, hung, or returned no object that JSON has.
            ConfigError: the row lacks its prompt or its ground truth.
        """
        on = f"task {index} of seed {self._seed}"
        fields = self._source.call("task", self._seed, index, on=on)
        if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
            what = "an object whose names are not text" if isinstance(fields, dict) else kind_of(fields)
            raise UserCodeFailed(f"{self._source.what} returned {what} for {on}; return a dict, as of a line of JSON")
        where = f"{self._source.what}: task {index}"
        return as_row(fields, index, self._config, own_rollout=self._own_rollout, where=where)

    def rows(self, most: int) -> list[PromptRow]:
        """Return the first tasks, `most` of them or all."""
        return [self.row(index) for index in range(most if self.size is None else min(most, self.size))]

    def tried(self) -> list[PromptRow]:
        """Return some tasks, before a run starts.

        Raises:
            ConfigError: one cannot be used, or is another one the second time.
            UserCodeFailed: see `row`.
        """
        rows = self.rows(_TRIED)
        again = self.row(0)
        if again.fields != rows[0].fields:
            raise ConfigError(
                f"{self._source.what}: task(seed={self._seed}, index=0) returned {rows[0].task[:80]}, then "
                f"{again.task[:80]}; draw with a generator of your own, made from (seed, index): then a run can go on "
                f"from a checkpoint"
            )
        return rows

    def close(self) -> None:
        """End the child; idempotent."""
        self._source.close()


def held_out_rows(config: RunConfig) -> list[PromptRow]:
    """Return the rows of one evaluation.

    Raises:
        ConfigError: they cannot be read, or the source has no end and no number is set.
        UserCodeFailed: see `TaskSource`.
    """
    most, own_rollout = config.evaluate.max_prompts, config.rollout.is_own
    data = config.evaluate.prompts(config.data)
    if data.source is None:
        try:
            return read_data(data, key="evaluate.path", own_rollout=own_rollout)[: most or None]
        except ConfigError as error:
            if str(error).startswith("evaluate."):
                raise
            # A recipe's own held-out file, say, beside training data of the user's.
            raise ConfigError(
                f"evaluate.path: {error}; held-out rows have the fields of data: name some that do (--set "
                f"evaluate.path=FILE), or leave the role evaluate out"
            ) from error
    seed = config.seed + HELD_OUT_SEEDS
    with TaskSource(data, seed=seed, own_rollout=own_rollout, key="evaluate") as source:
        if source.size is None and not most:
            raise ConfigError(
                f"evaluate.max_prompts: 0 takes all tasks, but evaluate.source {data.source} has no len(); set a number"
            )
        return source.rows(most or source.size or 0)


def changed_data(config: DataConfig) -> str:
    """Return what is wrong when the data are not those that the run began with."""
    if config.mixture:
        return "data.mixture: its sources, their weights, fields or contents are not what the run began with"
    if config.source is None:
        return f"data.path: the content of {config.path} is not what the run began with"
    return f"data.source: {config.source} with data.options {config.options} is not what the run began with"


def data_identity(config: DataConfig) -> str:
    """Return 16 hex digits that say which data these are: the content of the file, a mixture's contents, weights and
    fields, or the source and its options.

    Raises:
        ConfigError: the file cannot be read.
    """
    if config.path is not None:
        return data_hash(config.file)
    import xxhash

    parts = [
        [data_hash(one.file), one.prompt_field, one.ground_truth_field] for one in config.parts() if config.mixture
    ]
    facts = [parts, config.block] if parts else [config.source, config.options]
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(facts, order="sorted"))
