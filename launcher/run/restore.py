"""Finds the newest valid checkpoint of a run, and takes the run's files back to it.

A checkpoint is `checkpoints/step_000010/`, valid when its files are what `meta.json` says. Damaged ones are passed over
and stay where they are: a disk that could not be read may be readable again, and a look at a run changes nothing. When
a run goes on from an older one, `rewind_run` sets them aside with all that is newer. The run goes on in its own
directory with the next lineage. Workers restore their own state.

Called by `launcher.run.resume` for `--resume`, and by `launcher.run.job` when the trainer starts again.
"""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from asyncflow.errors import AsyncFlowError, CheckpointError, ConfigError
from asyncflow.job import Job
from asyncflow.run_files import (
    CHECKPOINTS,
    EVALUATION_FILE,
    HF,
    JOB_FILE,
    LEDGER_FILE,
    META_FILE,
    METRICS_FILE,
    SAMPLER_FILE,
    UPDATES_FILE,
    CheckpointMeta,
    checkpoint_step,
    damages,
    list_checkpoints,
)
from launcher.process.events import Restored, RestoreFailed

ABANDONED = "abandoned"
"""Inside `checkpoints/`: where checkpoints go that are newer than the one resumed from. They are kept, because only
the user knows whether they are worth their disk; `latest` never looks there."""
CUT_FILES = (LEDGER_FILE, METRICS_FILE, UPDATES_FILE, EVALUATION_FILE, SAMPLER_FILE)
"""Are cut to the step of the checkpoint."""
_SHOWN_DAMAGES = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A valid checkpoint.

    Attributes:
        path: its directory.
        step: the step that it was saved after.
        lineage: the lineage that wrote it.
        fingerprint: of the model that the run started from.
        data_hash: of the prompts that the run started with.
        tokenizer_files: of the model that it started with; none: it was saved by an earlier version.
    """

    path: Path
    step: int
    lineage: int
    fingerprint: str
    data_hash: str
    tokenizer_files: Mapping[str, str] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        """The run that it belongs to."""
        return self.path.parent.parent


def newest_checkpoint(run_dir: Path, *, tell: Callable[[str], None] = logger.warning) -> Checkpoint | None:
    """Return the newest valid checkpoint of a run; reads all of its files.

    Args:
        run_dir: of the run.
        tell: is given a line for each newer one that is passed over, which says what is wrong with it.

    Returns:
        None: there is none.
    """
    for path in reversed(list_checkpoints(run_dir).values()):
        try:
            return verified_checkpoint(path, tell)
        except CheckpointError as error:
            tell(f"checkpoint passed over: {error}")
    return None


def verified_checkpoint(path: Path, tell: Callable[[str], None]) -> Checkpoint:
    """Return the checkpoint in `path` once every file was found to be what it should be.

    Raises:
        CheckpointError: one is not, or it is not complete.
    """
    meta = CheckpointMeta.read(path)
    if checkpoint_step(path) not in (None, meta.step):
        raise CheckpointError(f"{path} is of step {meta.step}, as {META_FILE} says")
    found = {name: f"{path / name} {damage}" for name, damage in damages(path, meta.files).items()}
    export = [found.pop(name) for name in list(found) if name.startswith(f"{HF}/")]
    if export:
        tell(f"checkpoint {path} is used without its export: {_joined(export)}")
    if found:
        raise CheckpointError(_joined(list(found.values())))
    return Checkpoint(path, meta.step, meta.lineage, meta.model_fingerprint, meta.data_hash, meta.tokenizer_files)


def is_checkpoint(path: Path) -> bool:
    """Return whether a directory is a checkpoint, valid or not. It has the configuration of its run, too."""
    return (path / META_FILE).exists() or checkpoint_step(path) is not None


def next_lineage(run_dir: Path, checkpoint: Checkpoint | None) -> int:
    """Return the lineage of a run that goes on: newer than any that was, also if nothing of the last one was saved.

    A launcher that was killed leaves its lineage in `job.json`; one that ended itself, in the metrics. Call it before
    the run is cut back.

    Args:
        run_dir: of the run.
        checkpoint: from which it goes on; None: from its beginning.
    """
    left = [-1 if checkpoint is None else checkpoint.lineage]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        left.append(int(json.loads((run_dir / JOB_FILE).read_text())["lineage"]))
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
        left.append(int(json.loads((run_dir / METRICS_FILE).read_bytes().splitlines()[-1])["lineage"]))
    return max(left) + 1


def restore_run(run_dir: Path, job: Job) -> tuple[Job, Restored | RestoreFailed]:
    """Cut the run's files back and write `job.json` for the next lineage.

    The processes that write to the run's ledger, metrics and evaluations are gone meanwhile.

    Returns:
        The job as it goes on (the same one when that failed), and what became of it.
    """
    try:
        checkpoint = newest_checkpoint(run_dir)
        if checkpoint is not None:
            rewind_run(checkpoint)
        elif job.resume_from:
            return job, RestoreFailed(f"no checkpoint in {run_dir} can be read any more; see logs/launcher.log")
        else:
            rewind_to_start(run_dir)
        source = "" if checkpoint is None else str(checkpoint.path)
        job = job.changed(lineage=job.lineage + 1, resume_from=source)
        job.save(run_dir)
    except (AsyncFlowError, OSError) as error:
        logger.exception("the run cannot go back to a checkpoint")
        return job, RestoreFailed(f"the run cannot go back to a checkpoint: {error}")
    return job, Restored(0 if checkpoint is None else checkpoint.step, job.lineage)


def rewind_run(checkpoint: Checkpoint) -> None:
    """Cut the run back to the checkpoint's step: newer checkpoints aside, then ledger, metrics and evaluations, each
    atomically.

    In this order a crash in between leaves a run from which `--resume latest` does the rest.

    Raises:
        ConfigError: a line other than the last is not JSON.
    """
    _set_newer_aside(checkpoint.run_dir, checkpoint.step, suffix=f"before-lineage{checkpoint.lineage + 1}")
    for name in CUT_FILES:
        cut_lines(checkpoint.run_dir / name, checkpoint.step)


def rewind_to_start(run_dir: Path) -> None:
    """Cut a run without a valid checkpoint back to its beginning; damaged ones go aside.

    Raises:
        ConfigError: a line other than the last is not JSON.
    """
    _set_newer_aside(run_dir, 0, suffix="damaged")
    for name in CUT_FILES:
        cut_lines(run_dir / name, 0)


def cut_lines(path: Path, last_step: int) -> None:
    """Keep the lines of a JSONL file whose `step` is at most `last_step`; replace the file atomically.

    A last line that a crash tore is dropped. A missing file stays missing.

    Raises:
        ConfigError: another line is not a JSON object with a `step`, with file:line.
    """
    if not path.exists():
        return
    kept = lines_up_to(path, last_step)
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        file.writelines(line + b"\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def lines_up_to(path: Path, last_step: int) -> list[bytes]:
    """Return the lines up to `last_step`, without newlines; nothing for a missing file."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    kept = []
    for number, line in enumerate(lines, start=1):
        try:
            step = int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                continue
            raise ConfigError(f"{path}:{number}: not a JSON object with a step; repair or remove the line") from error
        if step <= last_step:
            kept.append(line)
    return kept


def _set_newer_aside(run_dir: Path, step: int, *, suffix: str) -> None:
    root = run_dir / CHECKPOINTS
    for number, path in list_checkpoints(run_dir).items():
        if number <= step:
            continue
        (root / ABANDONED).mkdir(exist_ok=True)
        target = root / ABANDONED / f"{path.name}-{suffix}"
        count = 1
        while target.exists():
            count += 1
            target = target.with_name(f"{path.name}-{suffix}-{count}")
        path.rename(target)


def _joined(found: list[str]) -> str:
    more = f"; and {len(found) - _SHOWN_DAMAGES} more" if len(found) > _SHOWN_DAMAGES else ""
    return "; ".join(found[:_SHOWN_DAMAGES]) + more
