"""Tasks from a user's class (`data.source`): (seed, index) -> data row. Torch-free.

    class Sums:
        class Config(Settings): ...                       # pydantic, for data.options; optional
        def __init__(self, digits: int = 2): ...          # the options by name
        def __len__(self) -> int: ...                     # optional: tasks per epoch; without it tasks never end
        def task(self, seed: int, index: int) -> dict: ...

Equal arguments must give equal rows: a group that is put again, or resumed from a checkpoint, asks again. The class
runs in a child process.
"""

import msgspec

from asyncflow.errors import ConfigError, UserCodeFailed
from workers.calls.user_object import UserObject
from workers.data.prompt_rows import PromptRow, as_row, data_hash, kind_of, read_data
from workers.settings.data import DataConfig
from workers.settings.run import EvaluateConfig, RunConfig, key_of_set

HELD_OUT_SEEDS = 2**31
"""Added to the run's seed for held-out tasks: above all training seeds."""
_TRIED = 32  # tasks checked before a run starts


class TaskSource:
    """The user's class in its child process; a context manager, for one thread.

    Args:
        own_rollout: a user's rollout function gets the rows, so they need no prompt.
        key: the settings section that names the class.

    `size`: tasks per epoch; None: they never end.
    """

    def __init__(self, config: DataConfig, *, seed: int, own_rollout: bool, key: str = "data") -> None:
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_row(self, index: int) -> PromptRow:
        """Return a task. Raises UserCodeFailed if the class raised, hung, or returned something that is not a JSON
        object; ConfigError if the row lacks its prompt or ground truth."""
        on = f"task {index} of seed {self._seed}"
        fields = self._source.call_method("task", self._seed, index, on=on)
        if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
            what = "an object whose names are not text" if isinstance(fields, dict) else kind_of(fields)
            raise UserCodeFailed(
                f"{self._source.what} returned {what} for {on}; return a dict, like a line of JSON data"
            )
        where = f"{self._source.what}: task {index}"
        return as_row(fields, index, self._config, own_rollout=self._own_rollout, where=where)

    def rows(self, most: int) -> list[PromptRow]:
        """Return the first `most` tasks, or all if there are fewer."""
        return [self.read_row(index) for index in range(most if self.size is None else min(most, self.size))]

    def trial_rows(self) -> list[PromptRow]:
        """Return some tasks to check before a run starts; raises ConfigError if one differs when asked for again."""
        rows = self.rows(_TRIED)
        again = self.read_row(0)
        if again.fields != rows[0].fields:
            raise ConfigError(
                f"{self._source.what}: task(seed={self._seed}, index=0) returned {rows[0].task[:80]}, then "
                f"{again.task[:80]}; draw from a generator of your own, seeded with (seed, index), so that a run can "
                f"be resumed from a checkpoint"
            )
        return rows

    def close(self) -> None:
        self._source.close()


def held_out_sets(config: RunConfig) -> dict[str, list[PromptRow]]:
    """Return name -> rows of each set of one evaluation ("": the section's own); raises as `held_out_rows` does."""
    return {
        name: held_out_rows(config, own, key=key_of_set(name)) for name, own in config.evaluate.named_sets().items()
    }


def held_out_rows(config: RunConfig, own: EvaluateConfig | None = None, *, key: str = "evaluate") -> list[PromptRow]:
    """Return the rows of a set, by default of the section's own; raises ConfigError, which names settings under `key`,
    if they cannot be read, UserCodeFailed as `TaskSource` does."""
    own = own or config.evaluate
    most, own_rollout = own.max_prompts, config.rollout.is_own
    data = own.prompts(config.data, key=key)
    if data.source is None:
        try:
            return read_data(data, key=f"{key}.path", own_rollout=own_rollout)[: most or None]
        except ConfigError as error:
            if str(error).startswith("evaluate."):
                raise
            # For example a recipe's own held-out file next to the user's training data.
            raise ConfigError(
                f"{key}.path: {error}, or name another file (--set {key}.path=FILE), or leave the role evaluate out"
            ) from error
    seed = config.seed + HELD_OUT_SEEDS
    with TaskSource(data, seed=seed, own_rollout=own_rollout, key=key) as source:
        if source.size is None and not most:
            raise ConfigError(
                f"{key}.max_prompts: 0 takes all tasks, but {key}.source {data.source} has no len(); set a number"
            )
        return source.rows(most or source.size or 0)


def changed_data(config: DataConfig) -> str:
    """Return the message for data that differ from those of the run's start."""
    if config.mixture:
        return "data.mixture: its sources, their weights, fields or contents are not what the run began with"
    if config.source is None:
        return f"data.path: the content of {config.path} is not what the run began with"
    return f"data.source: {config.source} with data.options {config.options} is not what the run began with"


def data_identity(config: DataConfig) -> str:
    """Return 16 hex digits that identify the data: the file's content; a mixture's contents, weights and fields; or the
    source and its options."""
    if config.path is not None:
        return data_hash(config.file)
    import xxhash

    parts = [
        [data_hash(one.file), one.prompt_field, one.ground_truth_field] for one in config.parts() if config.mixture
    ]
    facts = [parts, config.block] if parts else [config.source, config.options]
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(facts, order="sorted"))
