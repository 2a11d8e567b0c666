"""`--resume`: find the checkpoint, check that this command may continue from it, and cut the run back to it.

A checkpoint is `checkpoints/step_000010/`, valid when it has `dcp/` and `meta.json` (which is written last). The run
goes on in its own directory with the next lineage. Restoring state is the workers' part, not done here.

    find_checkpoint -> check_resume -> (everything else accepted) -> rewind_run -> start
"""

import filecmp
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncflow.errors import ConfigError
from asyncflow.job import FILE_NAME as JOB_FILE
from launcher.paths import user_path
from launcher.rundir import CHECKPOINTS, CONFIG_FILE, EVALUATION_FILE, METRICS_FILE, RUNS, UPDATES_FILE
from launcher.yaml_file import read_yaml
from workers.config import RunConfig
from workers.ledger_file import LEDGER_FILE
from workers.trained_groups import trained_groups

LATEST = "latest"
ABANDONED = "abandoned"
"""Inside `checkpoints/`: where checkpoints go that are newer than the one resumed from. They are kept, because only
the user knows whether they are worth their disk; `latest` never looks there."""
META_FILE = "meta.json"
_FIXED = ("data.", "seed", "schedule.rollout_batch_size", "schedule.n_samples_per_prompt", "schedule.fill")
"""Settings that decide which prompt, which rows and which step group g has."""
_REFERENCE = "algorithm.ref_update_interval"
"""Decides which weights are the reference of a step; checkpoints hold that one alone."""
_CUT_FILES = (LEDGER_FILE, METRICS_FILE, UPDATES_FILE, EVALUATION_FILE)
_STEP_DIR = re.compile(r"step_(\d+)(\..*)?")
_START_SLACK_S = 5.0


@dataclass(frozen=True)
class Checkpoint:
    """A valid checkpoint.

    Attributes:
        path: its directory.
        step: the step that it was saved after.
        lineage: the lineage that wrote it.
        fingerprint: of the model that the run started from.
    """

    path: Path
    step: int
    lineage: int
    fingerprint: str

    @property
    def run_dir(self) -> Path:
        """The run that it belongs to."""
        return self.path.parent.parent


def find_checkpoint(target: str, run_dir: Path | None) -> Checkpoint:
    """Return the checkpoint that `--resume TARGET` means.

    Args:
        target: `latest`, a run directory, or one checkpoint directory.
        run_dir: `--run-dir`, absolute, when given; for `latest` the run to look in, else it must be the target's run.
    Raises:
        ConfigError: nothing to resume, an incomplete checkpoint, or two different runs named.
    """
    if target == LATEST:
        return _newest_in(run_dir if run_dir is not None else newest_run())
    path = user_path(target, "--resume")
    if not path.is_dir():
        raise ConfigError(f"--resume: {target!r} is not a directory; give a run, one of its checkpoints, or 'latest'")
    is_checkpoint = (path / META_FILE).exists() or _STEP_DIR.fullmatch(path.name) is not None
    if is_checkpoint and path.parent.name != CHECKPOINTS:
        raise ConfigError(f"--resume: {path} is not in the {CHECKPOINTS}/ of a run; name a run or a checkpoint in it")
    checkpoint = _read_or_refuse(path) if is_checkpoint else _newest_in(path)
    if run_dir is not None and run_dir != checkpoint.run_dir:
        raise ConfigError(
            f"--run-dir: {run_dir} is not the run of --resume ({checkpoint.run_dir}), and a run continues in its own "
            f"directory; leave --run-dir out"
        )
    return checkpoint


def check_resume(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Check that `config` may continue from `checkpoint`; write nothing.

    Raises:
        ConfigError: its run is still running, the last step is reached already, a setting is another one that decides
            which prompt a group has, the model is another one, or ledger, metrics or evaluations cannot be read, or the
            ledger does not name the groups that were trained.
    """
    from workers.model_files import model_fingerprint

    pid = running_launcher(checkpoint.run_dir)
    if pid is not None:
        raise ConfigError(f"--resume: {checkpoint.run_dir} is still running (launcher process {pid}); stop it first")
    if config.steps <= checkpoint.step:
        raise ConfigError(
            f"steps: {config.steps} is reached already, {checkpoint.path.name} is of step {checkpoint.step}; "
            f"raise it with --steps N"
        )
    _check_same_prompts(checkpoint, config)
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
        if name == _REFERENCE:
            raise ConfigError(
                f"{name}: {now[name]!r} is not what the run began with ({before[name]!r}), and the checkpoint holds "
                f"no other reference; leave it out, or start a new run from {checkpoint.path / 'hf'} "
                f"(--set model.path=...)"
            )
        if name == "data.path" and _same_data(Path(str(before[name])), Path(str(now[name]))):
            continue
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


def _same_data(before: Path, now: Path) -> bool:
    """Return whether two files hold the same; a file that is gone may have been moved to the new place."""
    return not before.exists() or filecmp.cmp(before, now, shallow=False)


def running_launcher(run_dir: Path) -> int | None:
    """Return the process id of the launcher that runs `run_dir` now, or None.

    A launcher that was killed leaves `job.json` behind; its process id may since belong to somebody else, who then
    started later than the job did.
    """
    try:
        job = json.loads((run_dir / JOB_FILE).read_text())
        pid, started_at = int(job["launcher_pid"]), float(job["started_at"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    process_start = _process_start(pid)
    return pid if process_start is not None and process_start <= started_at + _START_SLACK_S else None


def rewind_run(checkpoint: Checkpoint) -> None:
    """Cut the run back to the checkpoint's step: newer checkpoints aside, then ledger, metrics and evaluations, each
    atomically.

    In this order a crash in between leaves a run from which `--resume latest` does the rest.

    Raises:
        ConfigError: a line other than the last is not JSON.
    """
    _set_newer_aside(checkpoint)
    for name in _CUT_FILES:
        cut_lines(checkpoint.run_dir / name, checkpoint.step)


def rewind_to_start(run_dir: Path) -> None:
    """Cut a run without a checkpoint back to its beginning.

    Raises:
        ConfigError: a line other than the last is not JSON.
    """
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


def _set_newer_aside(checkpoint: Checkpoint) -> None:
    root = checkpoint.path.parent
    for path, step in list(_step_dirs(root)):
        if step <= checkpoint.step:
            continue
        (root / ABANDONED).mkdir(exist_ok=True)
        target = root / ABANDONED / f"{path.name}-before-lineage{checkpoint.lineage + 1}"
        count = 1
        while target.exists():
            count += 1
            target = target.with_name(f"{path.name}-before-lineage{checkpoint.lineage + 1}-{count}")
        path.rename(target)


def newest_run(asked_by: str = "--resume", remedy: str = "name a run with --resume DIR or --run-dir DIR") -> Path:
    """Return the newest run directory in `runs/`; raises ConfigError when there is none."""
    runs = [file.parent for file in RUNS.glob(f"*/{CONFIG_FILE}")]
    if not runs:
        raise ConfigError(f"{asked_by}: there is no run in {RUNS.resolve()}; {remedy}")
    return max(runs, key=lambda run: (run / CONFIG_FILE).stat().st_mtime_ns).resolve()


def newest_checkpoint(run_dir: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run; None: there is none."""
    found = [checkpoint for path, _ in _step_dirs(run_dir / CHECKPOINTS) if (checkpoint := _read(path)) is not None]
    return max(found, key=lambda checkpoint: checkpoint.step, default=None)


def _newest_in(run_dir: Path) -> Checkpoint:
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


def _read(path: Path) -> Checkpoint | None:
    """Return the checkpoint in `path`, or None when it is not complete."""
    try:
        meta = json.loads((path / META_FILE).read_text())
        checkpoint = Checkpoint(path, int(meta["step"]), int(meta["lineage"]), str(meta["model_fingerprint"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return checkpoint if (path / "dcp").is_dir() else None


def _read_or_refuse(path: Path) -> Checkpoint:
    checkpoint = _read(path)
    if checkpoint is None:
        raise ConfigError(
            f"--resume: {path} is not a complete checkpoint (it needs dcp/ and a readable {META_FILE}); name another, "
            f"or the run {path.parent.parent}"
        )
    return checkpoint


def _process_start(pid: int) -> float | None:
    """Return when process `pid` started (unix time, s), or None when it is gone or a zombie."""
    try:
        # Field 2 of stat is the name in parentheses and may hold spaces: count from the last parenthesis.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot_s = next(
            int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line[:5] == "btime"
        )
    except (OSError, StopIteration):
        return None
    state, start_ticks = fields[0], int(fields[19])
    return None if state == "Z" else boot_s + start_ticks / os.sysconf("SC_CLK_TCK")
