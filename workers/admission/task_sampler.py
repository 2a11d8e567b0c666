"""A user's curriculum (`data.sampler`): chooses the task of each new group, and is told the rewards.

    class Curriculum:
        class Config(Settings): ...                                       # data.sampler_options; may be left out
        def __init__(self, size: int | None, seed: int, **options): ...   # number of tasks; None: no end
        def next(self) -> int: ...                                        # index of the next group's task
        def told(self, index: int, rewards: list[float]) -> None: ...     # []: filtered out, or a dead letter
        def state(self) -> object: ...                                    # JSON types
        def load(self, state: object) -> None: ...

Its behavior is a function of the ledger: before the groups of a step are drawn, it is told of all steps up to the one
before the newest version that the step's gate asks for, step by step, in the order of group ids:

    version 7 is published   told: steps up to 6, whose ledger lines exist   drawn: step 8 + max_staleness

Each draw appends a line to `sampler.jsonl`, with the state after it, before any row is put: {"step": 7, "told": 6,
"indices": {"61": 3, ...}, "state": ...}. A run that goes back to the checkpoint of step 7 keeps the lines up to it, as
in the ledger: its groups keep their tasks, and the next ones are drawn as if nothing had happened. The class runs in a
child process; an exception in it ends the run. Owned by admission's thread.
"""

import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncflow.decoding import json_decoder
from asyncflow.errors import ConfigError, DeadlineExceeded, UserCodeFailed
from asyncflow.json_lines import DISK_FULL, JsonLines, LineReader
from asyncflow.run_files import LEDGER_FILE, SAMPLER_FILE
from workers.calls.user_object import UserObject
from workers.settings.data import DataConfig

_METHODS = {"next": (), "told": ("index", "rewards"), "state": (), "load": ("state",)}
# How long the lines of a finished step may take to become visible on this node (s).
_LEDGER_S = 60.0
_LOOK_S = 0.05


class TaskDraw(msgspec.Struct, frozen=True):
    step: int  # The weights that had to exist
    told: int  # Last step whose results were known
    indices: dict[int, int]  # Group -> its task
    state: Any  # The sampler's state after the draw


class UserSampler:
    """The user's class, in its child process. All methods raise UserCodeFailed if it raises, hangs, or returns no valid
    value; the constructor raises ConfigError if the object cannot be made, UserCodeNotStarted if its process did not
    start."""

    def __init__(self, config: DataConfig, *, size: int | None, seed: int) -> None:
        assert config.sampler is not None
        self._size = size
        self._made = UserObject(
            config.sampler,
            config.sampler_options,
            field="data.sampler",
            section="data.sampler_options",
            methods=_METHODS,
            timeout_s=config.timeout_s,
            named={"size": size, "seed": seed},
        )

    def next(self) -> int:
        index = self._made.call_method("next", on="next()")
        if type(index) is not int or index < 0 or (self._size is not None and index >= self._size):
            wanted = "0 or more" if self._size is None else f"0 to {self._size - 1}"
            raise UserCodeFailed(f"{self._made.what} returned {index!r} on next(); return a task's index, {wanted}")
        return index

    def told(self, index: int, rewards: Sequence[float]) -> None:
        self._made.call_method("told", index, list(rewards), on=f"told(index={index}, rewards={list(rewards)})")

    def state(self) -> Any:
        state = self._made.call_method("state", on="state()")
        try:
            # A round trip, so that the running sampler and a resumed one see the same state.
            return msgspec.json.decode(msgspec.json.encode(state))
        except (TypeError, msgspec.MsgspecError) as error:
            raise UserCodeFailed(f"{self._made.what} returned a state that JSON cannot hold: {error}") from error

    def load(self, state: Any) -> None:
        self._made.call_method("load", state, on="load(state)")

    def close(self) -> None:
        self._made.close()


def try_sampler(config: DataConfig, *, size: int | None, seed: int) -> None:
    """Call each method once, before a run starts; raises as `UserSampler` does."""
    sampler = UserSampler(config, size=size, seed=seed)
    try:
        index = sampler.next()
        sampler.told(index, [0.0, 1.0])
        sampler.told(index, [])
        sampler.load(sampler.state())
    finally:
        sampler.close()


class TaskSampler:
    """Draws the tasks of new groups and remembers them; continues where the run's file ends.

    The constructor raises ConfigError if the run was resumed and the file is missing or damaged, UserCodeFailed if its
    state cannot be loaded. `batch`: groups that a step trains; `progress` is called before each call of the sampler.
    """

    def __init__(
        self,
        sampler: UserSampler,
        run_dir: Path,
        *,
        batch: int,
        start_step: int,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        path = run_dir / SAMPLER_FILE
        draws = read_draws(path)
        if start_step and not draws:
            raise missing_state(path)
        _cut_torn_line(path)
        self._sampler = sampler
        self._batch = batch
        self._progress = progress
        self._indices = {group: index for draw in draws for group, index in draw.indices.items()}
        self._told = draws[-1].told if draws else 0
        self._file = JsonLines(path)
        self._results = StepResults(run_dir / LEDGER_FILE, batch=batch)
        if draws:
            sampler.load(draws[-1].state)

    def close(self) -> None:
        self._sampler.close()
        self._file.close()

    def index_of(self, group: int) -> int:
        return self._indices[group]

    def draw_tasks(self, groups: Sequence[int], version: int) -> None:
        """Draw tasks for those groups that have none, durably; waits while the disk is full. `version`, of the weights
        that had to exist, never decreases between calls.

        Raises UserCodeFailed if the sampler failed, DeadlineExceeded if the ledger's lines did not appear.
        """
        new = [group for group in groups if group not in self._indices]
        if not new:
            return
        self._progress()
        while self._told < version - 1:
            for group, rewards in self._results.results_of_step(self._told + 1):
                if group in self._indices:
                    self._progress()
                    self._sampler.told(self._indices[group], rewards)
            self._told += 1
        drawn = {}
        for group in new:
            self._progress()
            drawn[group] = self._sampler.next()
        line = TaskDraw(version, self._told, drawn, self._sampler.state())
        self._file.write([msgspec.to_builtins(line, str_keys=True)])
        self._sync_file()
        self._indices |= drawn

    def _sync_file(self) -> None:
        while True:
            try:
                self._file.sync()
                return
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
            self._progress()
            threading.Event().wait(_LOOK_S)


class StepResults:
    """Reads the results of each step's groups from the ledger, in order.

    A step with `batch` groups may take `timeout_s` to appear; while `is_full` says that the disk is full, its lines are
    still in the trainer's memory, and the wait continues.
    """

    def __init__(
        self,
        path: Path,
        *,
        batch: int,
        timeout_s: float = _LEDGER_S,
        clock: Callable[[], float] = time.monotonic,
        is_full: Callable[[Path], bool] | None = None,
    ) -> None:
        self._is_full = is_full or _is_full
        self._reader = LineReader(path)
        self._path = path
        self._batch = batch
        self._timeout_s = timeout_s
        self._clock = clock
        self._lines: dict[int, list[Mapping[str, Any]]] = {}

    def results_of_step(self, step: int) -> list[tuple[int, list[float]]]:
        """Return group and rewards of a finished step, by group; no rewards for a replaced group. Raises
        DeadlineExceeded."""
        deadline = self._clock() + self._timeout_s
        while not self._is_whole(step):
            if self._clock() >= deadline:
                if self._is_full(self._path.parent):
                    deadline = self._clock() + self._timeout_s
                    continue
                raise DeadlineExceeded(f"{self._path}: lacks lines of step {step} after {self._timeout_s:g} s")
            threading.Event().wait(_LOOK_S)
        found = [(int(line["group"]), _known(line)) for line in self._lines.pop(step)]
        return sorted(found)

    def _is_whole(self, step: int) -> bool:
        for line in self._reader.read():
            if line["step"] >= step:
                self._lines.setdefault(int(line["step"]), []).append(line)
        return sum("indices" in line for line in self._lines.get(step, ())) >= self._batch


def read_draws(path: Path) -> list[TaskDraw]:
    """Return the lines of `sampler.jsonl`; none if there is no file. Raises ConfigError if one is wrong."""
    return LineReader(path, json_decoder(TaskDraw).decode).read()


def missing_state(path: Path) -> ConfigError:
    """Return the error for a run that cannot resume without its `sampler.jsonl`."""
    return ConfigError(f"data.sampler: its state is missing, {path}; restore the file, or start a new run")


def _is_full(directory: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno in DISK_FULL
    return False


def _known(line: Mapping[str, Any]) -> list[float]:
    return [reward for reward in line.get("rewards", ()) if reward is not None and math.isfinite(reward)]


def _cut_torn_line(path: Path) -> None:
    """Remove an incomplete last line, left by a crash, so that the next line does not continue it."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
