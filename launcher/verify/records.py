"""What `asyncflow verify` reads: a run's lines and checkpoints, parsed in one consistent look.

Saved counts, saved responses and the data set need torch and the tokenizer; they are behind `Readers`.
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

from asyncflow.checkpoint_files import CRITIC, DCP, QUEUE, CheckpointMeta, damages
from asyncflow.decoding import json_decoder
from asyncflow.errors import AsyncFlowError, CheckpointError, ConfigError
from asyncflow.json_lines import LineReader, Lines
from asyncflow.run_files import (
    CHECKPOINTS,
    CONFIG_FILE,
    LEDGER_FILE,
    META_FILE,
    METRICS_FILE,
    SAMPLER_FILE,
    UPDATES_FILE,
    list_checkpoints,
)
from launcher.config.load_config import read_yaml
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
"""Number of attempts to read a run whose files are being cut back by a resume."""
_NO_GROUP = 2**40
"""A damaged ledger may name any number, but no run admits this many groups."""


class StepLine(msgspec.Struct, frozen=True):
    """The fields of `metrics.jsonl` that the checks need."""

    step: int
    lineage: int
    samples: int
    num_updates: int
    staleness_max: int
    staleness_bound: int
    grad_norm: float | None
    critic_num_updates: int = 0


class UpdateLine(msgspec.Struct, frozen=True):
    """A line of `updates.jsonl`: `update` counts from 1 in each step, `optimizer_updates` over the engine's life."""

    lineage: int
    step: int
    update: int
    optimizer_updates: int


@dataclass(frozen=True)
class SavedCheckpoint:
    """A directory in `checkpoints/`.

    Attributes:
        problem: why it is incomplete; "": it is complete.
        step, lineage: from `meta.json`.
        updates: optimizer updates in its state.
        critic_updates: the same of a critic; None: no critic.
        queue: group -> token hash as in the ledger, for groups whose responses were all saved with it.
    """

    path: Path
    problem: str = ""
    step: int = 0
    lineage: int = 0
    updates: int = 0
    queue: Mapping[int, str] | None = None
    critic_updates: int | None = None


@dataclass(frozen=True)
class ExpectedPrompts:
    """The prompts that groups must have by data, seed and tokenizer.

    Attributes:
        expected: group -> (epoch, prompt hash).
        unknown: why they cannot be determined; "": `expected` has all groups of the ledger.
    """

    expected: Mapping[int, tuple[int, str]]
    unknown: str = ""


@dataclass(frozen=True)
class RunRecords:
    """One consistent look at a run. If it is `live`, lines of unfinished steps are left out."""

    run_dir: Path
    config: RunConfig
    live: bool
    ledger: Ledger
    metrics: Lines[StepLine]
    updates: Lines[UpdateLine]
    checkpoints: tuple[SavedCheckpoint, ...]
    prompts: ExpectedPrompts


@dataclass(frozen=True)
class Readers:
    """Functions that need torch or the tokenizer, see those of the same names; tests replace them."""

    saved_updates: Callable[[Path], int]
    saved_groups: Callable[[Path], Mapping[int, str]]
    prompts: Callable[[RunConfig, Ledger], ExpectedPrompts]


def readers() -> Readers:
    """Return the readers that use torch and the run's tokenizer."""
    return Readers(saved_updates=saved_updates, saved_groups=saved_groups, prompts=prompts_of)


def read_records(run_dir: Path, readers: Readers) -> RunRecords:
    """Read a run.

    Raises:
        ConfigError: the directory is not a run, or one of its files cannot be read.
    """
    config = _config(run_dir)
    for _ in range(_LOOKS):
        # A resume replaces the files that it cuts back, which shows in their identities: then look again.
        before = _identities(run_dir)
        records = _look(run_dir, config, readers)
        if _identities(run_dir) == before:
            return records
    raise ConfigError(f"run directory: {run_dir} is cut back again and again; try again when it runs steadily")


def saved_updates(directory: Path) -> int:
    """Return the number of optimizer updates in the state under a checkpoint's `dcp/`.

    Raises:
        CheckpointError: the state cannot be read.
    """
    state = {"optimizer_updates": torch.tensor(0)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it warns that a single process loads: intended here
            dcp.load(state, checkpoint_id=directory, no_dist=True)
    except (OSError, ValueError, RuntimeError, dcp.CheckpointException) as error:
        reason = next(iter(error.failures.values()))[0] if isinstance(error, dcp.CheckpointException) else error
        raise CheckpointError(f"{directory} cannot be read ({type(reason).__name__}: {reason})") from error
    return int(state["optimizer_updates"])


def saved_groups(directory: Path) -> Mapping[int, str]:
    """Return the token hash of each group whose responses are all in a queue's snapshot; empty without a snapshot.

    Raises:
        CheckpointError: the snapshot cannot be read.
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


def prompts_of(config: RunConfig, ledger: Ledger) -> ExpectedPrompts:
    """Return the expected prompts of all groups that the ledger names as trained."""
    run_dir = ledger.file.path.parent
    try:
        search_beside(config.code_directory)
        if changed := changed_tokenizer(Path(config.model.path), _tokenizer_files(run_dir)):
            return ExpectedPrompts({}, changed)
        dataset = open_prompts(config, run_dir)
    except (AsyncFlowError, OSError) as error:
        return ExpectedPrompts({}, str(error))
    expected = {}
    groups = {line.group for _, line in ledger.trained}
    try:
        drawn = {group: index for draw in read_draws(run_dir / SAMPLER_FILE) for group, index in draw.indices.items()}
        for group in sorted(group for group in groups if 0 <= group < _NO_GROUP):
            if config.data.sampler is None:
                prompt = dataset.prompt_of_group(group)
            elif group in drawn:
                prompt = dataset.prompt_at(drawn[group])
            else:
                continue
            expected[group] = (prompt.epoch, prompt_hash(prompt.tokens))
    except AsyncFlowError as error:
        return ExpectedPrompts({}, str(error))
    finally:
        dataset.close()
    return ExpectedPrompts(expected)


def _tokenizer_files(run_dir: Path) -> Mapping[str, str]:
    """Return the tokenizer's files at the start of the run, from its newest readable checkpoint; empty: unknown."""
    for path in reversed(list_checkpoints(run_dir).values()):
        with suppress(CheckpointError):
            return CheckpointMeta.read(path).tokenizer_files
    return {}


def _batch(chunk: SnapshotChunk) -> PackedBatch:
    columns = {name: chunk.columns[name] for name in SAMPLE_COLUMNS}
    return PackedBatch(tuple(chunk.rows), columns, tuple(chunk.groups))


def _look(run_dir: Path, config: RunConfig, readers: Readers) -> RunRecords:
    # In the opposite order of writing, so that whatever a line builds on has been written by the time it is read.
    live = running_launcher(run_dir) is not None
    found = [_checkpoint(path, readers) for path in list_checkpoints(run_dir).values()]
    checkpoints = [one for one in found if one.path.is_dir()]  # others were removed meanwhile
    metrics = LineReader(run_dir / METRICS_FILE, json_decoder(StepLine).decode).read_lines()
    ledger = read_ledger(run_dir)
    updates = LineReader(run_dir / UPDATES_FILE, json_decoder(UpdateLine).decode).read_lines()
    if live:
        # Lines of a step that the run is still training are no errors.
        last = max((line.step for _, line in metrics.lines), default=0)
        ledger = Ledger(ledger.file.filter_lines(lambda line: line.step <= last))
        updates = updates.filter_lines(lambda line: line.step <= last)
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
    """Return the identities (device, inode) of the files that a resume replaces when it cuts them."""
    found: list[tuple[int, int] | None] = []
    for name in (METRICS_FILE, LEDGER_FILE, UPDATES_FILE):
        try:
            facts = (run_dir / name).stat()
            found.append((facts.st_dev, facts.st_ino))
        except FileNotFoundError:
            found.append(None)
    return found


def _checkpoint(path: Path, readers: Readers) -> SavedCheckpoint:
    """Read a checkpoint with all of its files; `problem` says why it cannot be read."""
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
