"""`--resume`: find the checkpoint, check that this command may continue from it, and cut the run back to it.

A checkpoint is `checkpoints/step_000010/`, valid when its files are what `meta.json` says. Damaged ones are passed over
and stay where they are: a disk that could not be read may be readable again, and a look at a run changes nothing. Once
a run goes on from an older one, `rewind_run` sets them aside with all that is newer. The run goes on in its own
directory with the next lineage. Restoring state is the workers' part, not done here.

    find_checkpoint -> check_resume -> (everything else accepted) -> rewind_run -> start

A run that was stopped or killed before it saved anything (`unsaved_run`) starts again from step 0: `rewind_to_start`.
"""

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncflow.errors import CheckpointError, ConfigError
from asyncflow.job import FILE_NAME as JOB_FILE
from launcher.paths import user_path
from launcher.rundir import (
    CHECKPOINTS,
    CONFIG_FILE,
    EVALUATION_FILE,
    METRICS_FILE,
    UPDATES_FILE,
    began_run,
    has_checkpoint,
    newest_run,
)
from launcher.running_launcher import check_not_running
from launcher.yaml_file import read_yaml
from workers.checkpoint_files import HF, META_FILE, CheckpointMeta, damages
from workers.config import RunConfig
from workers.ledger_file import LEDGER_FILE, trained_groups

LATEST = "latest"
ABANDONED = "abandoned"
"""Inside `checkpoints/`: where checkpoints go that are newer than the one resumed from. They are kept, because only
the user knows whether they are worth their disk; `latest` never looks there."""
_FIXED = ("data.", "seed", "schedule.rollout_batch_size", "schedule.n_samples_per_prompt", "schedule.fill")
"""Settings that decide which prompt, which rows and which step group g has."""
_REFERENCE = "algorithm.ref_update_interval"
"""Decides which weights are the reference of a step; checkpoints hold that one alone."""
_CUT_FILES = (LEDGER_FILE, METRICS_FILE, UPDATES_FILE, EVALUATION_FILE)
_STEP_DIR = re.compile(r"step_(\d+)(\..*)?")
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
    """

    path: Path
    step: int
    lineage: int
    fingerprint: str
    data_hash: str

    @property
    def run_dir(self) -> Path:
        """The run that it belongs to."""
        return self.path.parent.parent


def resume_path(target: str) -> Path:
    """Return the run or checkpoint that `--resume TARGET` names, absolute; nothing needs to exist there.

    A run's `checkpoints/` may be a link to another disk. It is not followed, or nobody would know whose checkpoint it
    is.

    Raises:
        ConfigError: the system cannot look at such a path.
    """
    path = user_path(target, "--resume")
    root = Path(target).expanduser().absolute().parent
    is_of_run = root.name == CHECKPOINTS and (root.parent / CONFIG_FILE).is_file() and root.resolve() == path.parent
    return root.parent.resolve() / CHECKPOINTS / path.name if is_of_run else path


def find_checkpoint(target: str, run_dir: Path | None) -> Checkpoint:
    """Return the checkpoint that `--resume TARGET` means.

    Args:
        target: `latest`, a run directory, or one checkpoint directory.
        run_dir: `--run-dir`, absolute, when given; for `latest` the run to look in, else it must be the target's run.
    Raises:
        ConfigError: nothing to resume, a damaged checkpoint, or two different runs named.
    """
    if target == LATEST:
        return _newest_in(run_dir if run_dir is not None else newest_run())
    path = resume_path(target)
    if not path.is_dir():
        raise ConfigError(f"--resume: {target!r} is not a directory; give a run, one of its checkpoints, or 'latest'")
    is_checkpoint = _is_checkpoint(path)
    if is_checkpoint and path.parent.name != CHECKPOINTS:
        raise ConfigError(f"--resume: {path} is not in the {CHECKPOINTS}/ of a run; name a run or a checkpoint in it")
    checkpoint = _verified_or_refused(path) if is_checkpoint else _newest_in(path)
    if run_dir is not None and run_dir != checkpoint.run_dir:
        raise ConfigError(
            f"--run-dir: {run_dir} is not the run of --resume ({checkpoint.run_dir}), and a run continues in its own "
            f"directory; leave --run-dir out"
        )
    return checkpoint


def unsaved_run(target: str, run_dir: Path | None) -> Path | None:
    """Return the run that `--resume TARGET` means if it never saved anything, else None.

    A run whose checkpoints cannot be read, or are gone, is not one: to start that again would throw away what they
    hold. Nor is a directory with another `config.yaml` than a run's, which would be overwritten.

    Args:
        target: as in `find_checkpoint`.
        run_dir: as in `find_checkpoint`.
    Raises:
        ConfigError: `latest` without any run, or a path that the system cannot look at.
    """
    path = resume_path(target) if target != LATEST else run_dir if run_dir is not None else newest_run()
    is_other = run_dir is not None and run_dir != path
    is_run = began_run(path) and not _is_checkpoint(path)
    return path if is_run and not is_other and not has_checkpoint(path) else None


def check_resume(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Check that `config` may continue from `checkpoint`; write nothing.

    Raises:
        ConfigError: its run is still running, the last step is reached already, a setting is another one that decides
            which prompt a group has, the data or the model are others, ledger, metrics or evaluations cannot be read,
            or the ledger does not name the groups that were trained.
    """
    from workers.data import data_hash
    from workers.model_files import model_fingerprint

    check_not_running(checkpoint.run_dir)
    if config.steps <= checkpoint.step:
        raise ConfigError(
            f"steps: {config.steps} is reached already, {checkpoint.path.name} is of step {checkpoint.step}; "
            f"raise it with --steps N"
        )
    _check_same_prompts(checkpoint, config)
    content = data_hash(Path(config.data.path))
    if content != checkpoint.data_hash:
        raise ConfigError(
            f"data.path: the content of {config.data.path} is not what the run began with (checksum {content}, not "
            f"{checkpoint.data_hash}), and prompts would be trained twice or never; restore the file, or start a new "
            f"run from {checkpoint.path / HF} (--set model.path=...)"
        )
    fingerprint = model_fingerprint(Path(config.model.path))
    if fingerprint != checkpoint.fingerprint:
        raise ConfigError(
            f"model.path: {config.model.path} (fingerprint {fingerprint[:12]}) is not the model that "
            f"{checkpoint.path} was trained from ({checkpoint.fingerprint[:12]}); resume with that model"
        )
    for name in _CUT_FILES:
        _kept_lines(checkpoint.run_dir / name, checkpoint.step)
    trained_groups(checkpoint.run_dir, config.schedule, completed=checkpoint.step)


def _check_same_prompts(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Check that group g still is the prompt, the rows and the step that it was: else some would be trained twice."""
    own = checkpoint.run_dir / CONFIG_FILE
    if not own.is_file():
        return
    before, now = _flat(read_yaml(own).values), _flat(config.model_dump(mode="json"))
    for name in now:
        if not name.startswith((*_FIXED, _REFERENCE)) or name not in before or before[name] == now[name]:
            continue
        if name == "data.path":
            continue  # its content is compared
        if name == _REFERENCE:
            raise ConfigError(
                f"{name}: {now[name]!r} is not what the run began with ({before[name]!r}), and the checkpoint holds "
                f"no other reference; leave it out, or start a new run from {checkpoint.path / 'hf'} "
                f"(--set model.path=...)"
            )
        raise ConfigError(
            f"{name}: {now[name]!r} is not what the run began with ({before[name]!r}), and prompts would be trained "
            f"twice or never; leave it out, or start a new run from {checkpoint.path / 'hf'} (--set model.path=...)"
        )


def _flat(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


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


def rewind_run(checkpoint: Checkpoint) -> None:
    """Cut the run back to the checkpoint's step: newer checkpoints aside, then ledger, metrics and evaluations, each
    atomically.

    In this order a crash in between leaves a run from which `--resume latest` does the rest.

    Raises:
        ConfigError: a line other than the last is not JSON.
    """
    _set_newer_aside(checkpoint.path.parent, checkpoint.step, suffix=f"before-lineage{checkpoint.lineage + 1}")
    for name in _CUT_FILES:
        cut_lines(checkpoint.run_dir / name, checkpoint.step)


def rewind_to_start(run_dir: Path) -> None:
    """Cut a run without a valid checkpoint back to its beginning; damaged ones go aside.

    Raises:
        ConfigError: a line other than the last is not JSON.
    """
    _set_newer_aside(run_dir / CHECKPOINTS, 0, suffix="damaged")
    for name in _CUT_FILES:
        cut_lines(run_dir / name, 0)


def cut_lines(path: Path, last_step: int) -> None:
    """Keep the lines of a JSONL file whose `step` is at most `last_step`; replace the file atomically.

    A last line that a crash tore is dropped. A missing file stays missing.

    Raises:
        ConfigError: another line is not a JSON object with a `step`, with file:line.
    """
    if not path.exists():
        return
    kept = _kept_lines(path, last_step)
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        file.writelines(line + b"\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _kept_lines(path: Path, last_step: int) -> list[bytes]:
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


def _set_newer_aside(root: Path, step: int, *, suffix: str) -> None:
    for path, number in list(_step_dirs(root)):
        if number <= step:
            continue
        (root / ABANDONED).mkdir(exist_ok=True)
        target = root / ABANDONED / f"{path.name}-{suffix}"
        count = 1
        while target.exists():
            count += 1
            target = target.with_name(f"{path.name}-{suffix}-{count}")
        path.rename(target)


def newest_checkpoint(run_dir: Path, *, tell: Callable[[str], None] = logger.warning) -> Checkpoint | None:
    """Return the newest valid checkpoint of a run; reads all of its files.

    Args:
        run_dir: of the run.
        tell: is given a line for each newer one that is passed over, which says what is wrong with it.

    Returns:
        None: there is none.
    """
    for path, _ in sorted(_step_dirs(run_dir / CHECKPOINTS), key=lambda found: found[1], reverse=True):
        try:
            return _verified(path, tell)
        except CheckpointError as error:
            tell(f"checkpoint passed over: {error}")
    return None


def _is_checkpoint(path: Path) -> bool:
    """Return whether a directory is a checkpoint, valid or not. It has the configuration of its run, too."""
    return (path / META_FILE).exists() or _STEP_DIR.fullmatch(path.name) is not None


def _newest_in(run_dir: Path) -> Checkpoint:
    if run_dir.name == CHECKPOINTS and not (run_dir / CONFIG_FILE).exists():
        raise ConfigError(f"--resume: {run_dir} holds a run's checkpoints; name one of them, or their run")
    newest = newest_checkpoint(run_dir)
    if newest is None:
        raise ConfigError(
            f"--resume: {run_dir} holds no complete checkpoint, so there is nothing to resume; name another run"
        )
    return newest


def _step_dirs(root: Path) -> Iterator[tuple[Path, int]]:
    for path in root.glob("step_*"):
        match = _STEP_DIR.fullmatch(path.name)
        if match:
            yield path, int(match[1])


def _verified(path: Path, tell: Callable[[str], None]) -> Checkpoint:
    """Return the checkpoint in `path` once every file was found to be what it should be.

    Raises:
        CheckpointError: one is not, or it is not complete.
    """
    meta = CheckpointMeta.read(path)
    if (named := _STEP_DIR.fullmatch(path.name)) is not None and int(named[1]) != meta.step:
        raise CheckpointError(f"{path} is of step {meta.step}, as {META_FILE} says")
    found = {name: f"{path / name} {damage}" for name, damage in damages(path, meta.files).items()}
    export = [found.pop(name) for name in list(found) if name.startswith(f"{HF}/")]
    if export:
        tell(f"checkpoint {path} is used without its export: {_joined(export)}")
    if found:
        raise CheckpointError(_joined(list(found.values())))
    return Checkpoint(path, meta.step, meta.lineage, meta.model_fingerprint, meta.data_hash)


def _joined(found: list[str]) -> str:
    more = f"; and {len(found) - _SHOWN_DAMAGES} more" if len(found) > _SHOWN_DAMAGES else ""
    return "; ".join(found[:_SHOWN_DAMAGES]) + more


def _verified_or_refused(path: Path) -> Checkpoint:
    try:
        return _verified(path, logger.warning)
    except CheckpointError as error:
        raise ConfigError(
            f"--resume: {path} is not a valid checkpoint: {error}; name another, or the run {path.parent.parent}"
        ) from error
