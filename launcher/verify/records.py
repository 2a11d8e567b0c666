"""What `asyncflow verify` looks at: a run's lines and checkpoints, parsed, in one consistent look. Only reads.

Saved counts, saved responses and the data set need torch and the tokenizer: `Readers`.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed.checkpoint as dcp
from pydantic import ValidationError

from asyncflow.errors import AsyncFlowError, CheckpointError, ConfigError
from asyncflow.json_lines import Lines, read_lines
from asyncflow.run_files import (
    CHECKPOINTS,
    CONFIG_FILE,
    CRITIC,
    DCP,
    LEDGER_FILE,
    META_FILE,
    METRICS_FILE,
    QUEUE,
    SAMPLER_FILE,
    UPDATES_FILE,
    CheckpointMeta,
    damages,
    list_checkpoints,
)
from launcher.config.load import read_yaml
from launcher.run.rundir import began_run, running_launcher
from tq.columns import PackedBatch
from tq.snapshot import MANIFEST, SnapshotChunk, read_snapshot
from workers.admission.task_sampler import read_draws
from workers.calls.user_function import search_beside
from workers.data.prompt_dataset import open_prompts
from workers.data.tokenizer import changed_tokenizer
from workers.records.ledger import prompt_hash, token_hashes
from workers.records.ledger_file import Ledger, read_ledger
from workers.settings.dataflow import SAMPLE_COLUMNS
from workers.settings.run import RunConfig

_LOOKS = 5
"""How often a run that is just cut back is looked at again."""
_NO_GROUP = 2**40
"""A damaged ledger may name any number; no run admits so many groups."""


class StepLine(msgspec.Struct, frozen=True):
    """What is needed of a line of `metrics.jsonl`."""

    step: int
    lineage: int
    samples: int
    num_updates: int
    staleness_max: int
    staleness_bound: int
    grad_norm: float | None
    critic_num_updates: int = 0


class UpdateLine(msgspec.Struct, frozen=True):
    """A line of `updates.jsonl`.

    Attributes:
        lineage, step: that made it.
        update: its number in the step, from 1.
        optimizer_updates: that were in the engine's state after it.
    """

    lineage: int
    step: int
    update: int
    optimizer_updates: int


@dataclass(frozen=True)
class SavedCheckpoint:
    """A directory in `checkpoints/`.

    Attributes:
        path: of it.
        problem: why it is not complete; "": it is.
        step, lineage: of its `meta.json`.
        updates: number of optimizer updates in its state.
        critic_updates: the same of a critic; None: it has none.
        queue: group -> token hash, of the groups whose responses all were saved with it; as in the ledger.
    """

    path: Path
    problem: str = ""
    step: int = 0
    lineage: int = 0
    updates: int = 0
    queue: Mapping[int, str] | None = None
    critic_updates: int | None = None


@dataclass(frozen=True)
class Prompts:
    """Which prompt a group has, as data, seed and tokenizer say.

    Attributes:
        expected: group -> (epoch, prompt hash).
        unknown: why it cannot be told; "": `expected` has all groups of the ledger.
    """

    expected: Mapping[int, tuple[int, str]]
    unknown: str = ""


@dataclass(frozen=True)
class RunRecords:
    """One look at a run.

    Attributes:
        run_dir, config: of the run.
        live: a launcher runs it now; then lines of steps that were unfinished at the look are left out.
        ledger, metrics, updates: their lines.
        checkpoints: by step.
        prompts: of the groups in the ledger.
    """

    run_dir: Path
    config: RunConfig
    live: bool
    ledger: Ledger
    metrics: Lines[StepLine]
    updates: Lines[UpdateLine]
    checkpoints: tuple[SavedCheckpoint, ...]
    prompts: Prompts


@dataclass(frozen=True)
class Readers:
    """Those parts of the look that need torch or the tokenizer.

    Attributes:
        saved_updates: number of optimizer updates in a checkpoint's state; raises CheckpointError.
        saved_groups: group -> token hash of a checkpoint's queue; raises CheckpointError.
        prompts: of groups.
    """

    saved_updates: Callable[[Path], int]
    saved_groups: Callable[[Path], Mapping[int, str]]
    prompts: Callable[[RunConfig, Ledger], Prompts]


def readers() -> Readers:
    """Return what `read_records` needs."""
    return Readers(saved_updates=saved_updates, saved_groups=saved_groups, prompts=prompts_of)


def read_records(run_dir: Path, readers: Readers) -> RunRecords:
    """Look at a run.

    Raises:
        ConfigError: it is not a run, or a file of it cannot be read.
    """
    config = _config(run_dir)
    for _ in range(_LOOKS):
        before = _identities(run_dir)
        records = _look(run_dir, config, readers)
        if _identities(run_dir) == before:
            return records
    raise ConfigError(f"run directory: {run_dir} is cut back again and again; look when it runs steadily")


def saved_updates(directory: Path) -> int:
    """Return how many optimizer updates are in the state that a checkpoint's `dcp/` holds.

    Raises:
        CheckpointError: it cannot be read.
    """
    state = {"optimizer_updates": torch.tensor(0)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it is one process is no news
            dcp.load(state, checkpoint_id=directory, no_dist=True)
    except (OSError, ValueError, RuntimeError, dcp.CheckpointException) as error:
        reason = next(iter(error.failures.values()))[0] if isinstance(error, dcp.CheckpointException) else error
        raise CheckpointError(f"{directory} cannot be read ({type(reason).__name__}: {reason})") from error
    return int(state["optimizer_updates"])


def saved_groups(directory: Path) -> Mapping[int, str]:
    """Return the token hash of each group whose responses all are in a queue's snapshot; nothing without one.

    Raises:
        CheckpointError: it cannot be read.
    """
    if not (directory / MANIFEST).exists():
        return {}
    sizes: dict[int, int] = {}
    parts: list[PackedBatch] = []
    for chunk in read_snapshot(directory):
        if chunk.columns.keys() >= {*SAMPLE_COLUMNS}:
            sizes.update(dict.fromkeys(chunk.groups, chunk.group_size))
            parts.append(_batch(chunk))
    if not parts:
        return {}
    batch = PackedBatch.concatenate(parts)
    present = Counter(batch.groups)
    return {group: digest for group, digest in token_hashes(batch).items() if present[group] == sizes[group]}


def prompts_of(config: RunConfig, ledger: Ledger) -> Prompts:
    """Return the prompts of all groups that the ledger names as trained."""
    run_dir = ledger.file.path.parent
    try:
        search_beside(config.code_directory)
        if changed := changed_tokenizer(Path(config.model.path), _tokenizer_files(run_dir)):
            return Prompts({}, changed)
        dataset = open_prompts(config, run_dir)
    except (AsyncFlowError, OSError) as error:
        return Prompts({}, str(error))
    expected = {}
    groups = {line.group for _, line in ledger.trained}
    try:
        drawn = {group: index for draw in read_draws(run_dir / SAMPLER_FILE) for group, index in draw.indices.items()}
        for group in sorted(group for group in groups if 0 <= group < _NO_GROUP):
            if config.data.sampler is None:
                prompt = dataset.prompt(group)
            elif group in drawn:
                prompt = dataset.at(drawn[group])
            else:
                continue
            expected[group] = (prompt.epoch, prompt_hash(prompt.tokens))
    except AsyncFlowError as error:
        return Prompts({}, str(error))
    finally:
        dataset.close()
    return Prompts(expected)


def _tokenizer_files(run_dir: Path) -> Mapping[str, str]:
    """Return the tokenizer's files when the run began, as its newest readable checkpoint says; none: unknown."""
    for path in reversed(list_checkpoints(run_dir).values()):
        with suppress(CheckpointError):
            return CheckpointMeta.read(path).tokenizer_files
    return {}


def _batch(chunk: SnapshotChunk) -> PackedBatch:
    columns = {name: chunk.columns[name] for name in SAMPLE_COLUMNS}
    return PackedBatch(tuple(chunk.rows), columns, tuple(chunk.groups))


def _look(run_dir: Path, config: RunConfig, readers: Readers) -> RunRecords:
    """Read in the order opposite to that of writing, so that what a line builds on is there."""
    live = running_launcher(run_dir) is not None
    found = [_checkpoint(path, readers) for path in list_checkpoints(run_dir).values()]
    checkpoints = [one for one in found if one.path.is_dir()]  # else it was removed meanwhile
    metrics = read_lines(run_dir / METRICS_FILE, lambda _: StepLine)
    ledger = read_ledger(run_dir)
    updates = read_lines(run_dir / UPDATES_FILE, lambda _: UpdateLine)
    if live:
        last = max((line.step for _, line in metrics.lines), default=0)
        ledger = Ledger(ledger.file.only(lambda line: line.step <= last))
        updates = updates.only(lambda line: line.step <= last)
    prompts = readers.prompts(config, ledger)
    return RunRecords(run_dir, config, live, ledger, metrics, updates, tuple(checkpoints), prompts)


def _config(run_dir: Path) -> RunConfig:
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"run directory: {run_dir} is not a run, it has no {CONFIG_FILE}; name a run directory")
    if (run_dir / META_FILE).exists():
        run = run_dir.resolve().parent.parent
        raise ConfigError(f"run directory: {run_dir} is a checkpoint, which proves nothing; name its run, {run}")
    if not began_run(run_dir) and not any((run_dir / name).exists() for name in (LEDGER_FILE, METRICS_FILE)):
        raise ConfigError(
            f"run directory: {run_dir} is not a run, it has neither {CHECKPOINTS}/ nor {LEDGER_FILE}; name a run "
            f"directory"
        )
    try:
        return RunConfig.model_validate(read_yaml(path).values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(key) for key in first["loc"])
        raise ConfigError(f"{path}: {where}: {first['msg']}; it is not what a run writes, so restore it") from error


def _identities(run_dir: Path) -> list[tuple[int, int] | None]:
    """Return what changes when a file is replaced, as those are that a resume cuts."""
    found: list[tuple[int, int] | None] = []
    for name in (METRICS_FILE, LEDGER_FILE, UPDATES_FILE):
        try:
            facts = (run_dir / name).stat()
            found.append((facts.st_dev, facts.st_ino))
        except FileNotFoundError:
            found.append(None)
    return found


def _checkpoint(path: Path, readers: Readers) -> SavedCheckpoint:
    """Read one, all of its files; `problem` says why it cannot be."""
    try:
        meta = CheckpointMeta.read(path)
    except CheckpointError as error:
        return SavedCheckpoint(path, str(error))
    try:
        damaged = [f"{name} {damage}" for name, damage in damages(path, meta.files).items()]
        if damaged:
            return SavedCheckpoint(path, "; ".join(damaged), meta.step, meta.lineage)
        updates, queue = readers.saved_updates(path / DCP), readers.saved_groups(path / QUEUE)
        critic = readers.saved_updates(path / CRITIC) if (path / CRITIC).is_dir() else None
    except CheckpointError as error:
        return SavedCheckpoint(path, str(error), meta.step, meta.lineage)
    return SavedCheckpoint(path, "", meta.step, meta.lineage, updates, queue, critic)
