"""Finds the newest valid checkpoint of a run, and takes the run's files back to it.

A checkpoint is `checkpoints/step_000010/`; it is valid when its files match `meta.json`. Damaged ones are skipped but
stay in place: an unreadable disk may become readable again, and inspecting a run must not change it. When a run
continues from an older checkpoint, `rewind_run` sets all newer ones aside, damaged ones included. The run continues in
its own directory with the next lineage. Workers restore their own state.

Called for `--resume`, and by `launcher.run.run_job` when the trainer starts again.
"""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from asyncflow.checkpoint_files import HF, CheckpointMeta, damages, how_to_load
from asyncflow.decoding import json_decoder
from asyncflow.errors import AsyncFlowError, CheckpointError, ConfigError
from asyncflow.job import Job
from asyncflow.json_lines import LineReader
from asyncflow.run_files import (
    CHECKPOINTS,
    CONFIG_FILE,
    EVALUATION_FILE,
    FEED_FILE,
    JOB_FILE,
    LEDGER_FILE,
    META_FILE,
    METRICS_FILE,
    SAMPLER_FILE,
    UPDATES_FILE,
    checkpoint_step,
    list_checkpoints,
)
from launcher.config.load_config import read_yaml
from launcher.config.paths import user_path
from launcher.process.run_events import Restored, RestoreFailed
from launcher.run.rundir import began_run, check_not_running, has_checkpoint, newest_run
from workers.admission.task_sampler import missing_state
from workers.data.model_files import changed_weights, model_fingerprint, weights_fingerprint
from workers.data.task_source import changed_data, data_identity
from workers.data.tokenizer import changed_tokenizer
from workers.records.ledger_file import trained_groups
from workers.settings.lora import LoraConfig
from workers.settings.run import RunConfig

ABANDONED = "abandoned"
"""Inside `checkpoints/`: where checkpoints newer than the one resumed from go. They are kept, because only the user
knows whether they are worth their disk space; `latest` never looks there."""
CUT_FILES = (LEDGER_FILE, METRICS_FILE, UPDATES_FILE, EVALUATION_FILE, SAMPLER_FILE)
"""Cut to the checkpoint's step."""
_SHOWN_DAMAGES = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A valid checkpoint.

    Attributes:
        step: the step after which it was saved.
        lineage: the lineage that wrote it.
        fingerprint: of the model that the run started from.
        data_hash: of the prompts that the run started with.
        tokenizer_files: of the model that the run started with; empty: an earlier version saved it.
        weights_fingerprint: with `lora`, of the values of the base.
        scoring_weights: directory -> fingerprint of each model that scores; empty: an earlier version saved it.
    """

    path: Path
    step: int
    lineage: int
    fingerprint: str
    data_hash: str
    tokenizer_files: Mapping[str, str] = field(default_factory=dict)
    weights_fingerprint: str = ""
    scoring_weights: Mapping[str, str] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.path.parent.parent


def newest_checkpoint(run_dir: Path, *, tell: Callable[[str], None] = logger.warning) -> Checkpoint | None:
    """Return the newest valid checkpoint of a run, or None; reads all of its files.

    `tell` is called with one line for each newer checkpoint that is skipped, saying what is wrong with it.
    """
    for path in reversed(list_checkpoints(run_dir).values()):
        try:
            return verified_checkpoint(path, tell)
        except CheckpointError as error:
            tell(f"checkpoint passed over: {error}")
    return None


def verified_checkpoint(path: Path, tell: Callable[[str], None]) -> Checkpoint:
    """Return the checkpoint in `path`; CheckpointError: it is incomplete, or a file does not match `meta.json`."""
    meta = CheckpointMeta.read(path)
    if checkpoint_step(path) not in (None, meta.step):
        raise CheckpointError(f"{path} is of step {meta.step}, as {META_FILE} says")
    found = {name: f"{path / name} {damage}" for name, damage in damages(path, meta.files).items()}
    # The export is for other programs; a resume does not read it, so damage there is only reported.
    export = [found.pop(name) for name in list(found) if name.startswith(f"{HF}/")]
    if export:
        tell(f"checkpoint {path} is used without its export: {_joined(export)}")
    if found:
        raise CheckpointError(_joined(list(found.values())))
    return Checkpoint(
        path,
        meta.step,
        meta.lineage,
        meta.model_fingerprint,
        meta.data_hash,
        meta.tokenizer_files,
        meta.weights_fingerprint,
        meta.scoring_weights,
    )


def is_checkpoint(path: Path) -> bool:
    """Return whether a directory is a checkpoint, valid or not. Like a run, a checkpoint has a `config.yaml`."""
    return (path / META_FILE).exists() or checkpoint_step(path) is not None


def next_lineage(run_dir: Path, checkpoint: Checkpoint | None) -> int:
    """Return a lineage newer than any that the run had, even if the last one saved nothing.

    Call it before the run is cut back. `checkpoint` is where the run continues; None: at its beginning.
    """
    # A launcher that was killed leaves its lineage in job.json; one that ended by itself, in the metrics.
    left = [-1 if checkpoint is None else checkpoint.lineage]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        left.append(int(json.loads((run_dir / JOB_FILE).read_text())["lineage"]))
    left += [int(line.get("lineage", -1)) for line in LineReader(run_dir / METRICS_FILE).read()]
    return max(left) + 1


def restore_run(run_dir: Path, job: Job) -> tuple[Job, Restored | RestoreFailed]:
    """Cut the run's files back and write `job.json` for the next lineage.

    Call it only once the processes that write the run's ledger, metrics and evaluations are gone. On failure the job
    is returned unchanged, with a `RestoreFailed`.
    """
    try:
        checkpoint = newest_checkpoint(run_dir)
        if checkpoint is not None:
            rewind_run(checkpoint)
        # The run continued from a checkpoint that is no longer readable: starting over would discard its progress.
        elif job.resume_from:
            return job, RestoreFailed(f"no checkpoint in {run_dir} can be read any more; see logs/launcher.log")
        else:
            rewind_to_start(run_dir)
        source = "" if checkpoint is None else str(checkpoint.path)
        job = job.with_changes(lineage=job.lineage + 1, resume_from=source)
        job.save(run_dir)
    except (AsyncFlowError, OSError) as error:
        logger.exception("the run cannot go back to a checkpoint")
        return job, RestoreFailed(f"the run cannot go back to a checkpoint: {error}")
    return job, Restored(0 if checkpoint is None else checkpoint.step, job.lineage)


def rewind_run(checkpoint: Checkpoint) -> None:
    """Cut the run back to the checkpoint's step; see `cut_lines`."""
    # The order matters: after a crash in between, `--resume latest` still does the rest. Each cut is atomic.
    _set_newer_aside(checkpoint.run_dir, checkpoint.step, suffix=f"before-lineage{checkpoint.lineage + 1}")
    for name in CUT_FILES:
        cut_lines(checkpoint.run_dir / name, checkpoint.step)


def rewind_to_start(run_dir: Path) -> None:
    """Cut a run without a valid checkpoint back to its beginning; damaged checkpoints go aside. See `cut_lines`."""
    _set_newer_aside(run_dir, 0, suffix="damaged")
    for name in CUT_FILES:
        cut_lines(run_dir / name, 0)


def cut_lines(path: Path, last_step: int) -> None:
    """Keep the lines of a JSONL file whose `step` is at most `last_step`; the file is replaced atomically.

    An incomplete last line, left by a crash, is dropped. A missing file stays missing.

    Raises:
        ConfigError: another line is not a JSON object with a `step`; names file:line.
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
    """Return the lines up to `last_step`, without newlines; none for a missing file."""
    reader = LineReader(path, lambda line: (json_decoder(_LineOfStep).decode(line).step, line.rstrip(b"\n")))
    return [line for step, line in reader.read() if step <= last_step]


class _LineOfStep(msgspec.Struct):
    step: int


def _set_newer_aside(run_dir: Path, step: int, *, suffix: str) -> None:
    root = run_dir / CHECKPOINTS
    for number, path in list_checkpoints(run_dir).items():
        if number <= step:
            continue
        (root / ABANDONED).mkdir(exist_ok=True)
        target = root / ABANDONED / f"{path.name}-{suffix}"
        count = 1
        # An earlier resume may have set the same step aside.
        while target.exists():
            count += 1
            target = target.with_name(f"{path.name}-{suffix}-{count}")
        path.rename(target)


def _joined(found: list[str]) -> str:
    more = f"; and {len(found) - _SHOWN_DAMAGES} more" if len(found) > _SHOWN_DAMAGES else ""
    return "; ".join(found[:_SHOWN_DAMAGES]) + more


# `--resume`: find the checkpoint that the user means, and check that this command may continue from it.
#
#     find_checkpoint -> check_resume -> (everything else accepted) -> rewind_run -> start
#
# A run that was stopped or killed before it saved anything (`unsaved_run`) starts again from step 0, with
# `rewind_to_start`.

LATEST = "latest"
_FIXED = ("data.", "seed", "schedule.rollout_batch_size", "schedule.n_samples_per_prompt", "schedule.fill")
"""Settings that decide which prompt, rows and step group g has."""
_COMPARED_OTHERWISE = ("data.path", "data.mixture", "data.timeout_s")
"""The contents of files are compared (`data_identity`), not their paths."""
_REVISION = "model.revision"
"""Of a model from the Hub; null: a directory, whose fingerprint is compared."""
_TIME = "data.template_time"
"""Of the run's start; null: templates were not given a time."""
_REFERENCE = "algorithm.ref_update_interval"
"""Decides which weights are the reference of a step; a checkpoint holds only that one."""


def resume_path(target: str) -> Path:
    """Return the run or checkpoint that `--resume TARGET` names, absolute; it need not exist."""
    path = user_path(target, "--resume")
    root = Path(target).expanduser().absolute().parent
    # `checkpoints/` may be a symlink to another disk. Do not follow it: its target does not lead back to the run.
    is_of_run = root.name == CHECKPOINTS and (root.parent / CONFIG_FILE).is_file() and root.resolve() == path.parent
    return root.parent.resolve() / CHECKPOINTS / path.name if is_of_run else path


def find_checkpoint(target: str, run_dir: Path | None, *, argument: str = "--resume") -> Checkpoint:
    """Return the checkpoint that `--resume TARGET` means.

    Args:
        target: `latest`, a run directory, or a checkpoint directory.
        run_dir: `--run-dir`, absolute, if given: for `latest` the run to look in; else it must be the target's run.
        argument: what the user gave the target as.

    Raises:
        ConfigError: nothing to resume, a damaged checkpoint, or two different runs named.
    """
    if target == LATEST:
        return _newest_in(run_dir if run_dir is not None else newest_run(), argument)
    path = resume_path(target)
    if not path.is_dir():
        raise ConfigError(f"{argument}: {target!r} is not a directory; give a run, one of its checkpoints, or 'latest'")
    names_one = is_checkpoint(path)
    if names_one and path.parent.name != CHECKPOINTS:
        raise ConfigError(f"{argument}: {path} is not in the {CHECKPOINTS}/ of a run; name a run or a checkpoint in it")
    checkpoint = _verified_or_refused(path, argument) if names_one else _newest_in(path, argument)
    if run_dir is not None and run_dir != checkpoint.run_dir:
        raise ConfigError(
            f"--run-dir: {run_dir} is not the run of --resume ({checkpoint.run_dir}), and a run continues in its own "
            f"directory; leave --run-dir out"
        )
    return checkpoint


def unsaved_run(target: str, run_dir: Path | None) -> Path | None:
    """Return the run that `--resume TARGET` means if it never saved anything, else None; see `find_checkpoint`.

    A run whose checkpoints are unreadable or gone does not count: restarting it would discard what they hold. Nor does
    a directory whose `config.yaml` is not a run's, since it would be overwritten.

    Raises:
        ConfigError: `latest` without any run, or a path that the system cannot look at.
    """
    path = resume_path(target) if target != LATEST else run_dir if run_dir is not None else newest_run()
    is_other = run_dir is not None and run_dir != path
    is_run = began_run(path) and not is_checkpoint(path)
    return path if is_run and not is_other and not has_checkpoint(path) else None


def check_resume(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Check that `config` may continue from `checkpoint`; write nothing.

    Raises:
        ConfigError: the run is still running; its last step is already reached; a setting that decides which prompt
            a group has, the data, the model, its tokenizer or a model that scores has changed; ledger, metrics or
            evaluations are unreadable; the sampler's state is missing; or the ledger does not name the groups that were
            trained.
    """
    check_not_running(checkpoint.run_dir)
    if config.steps <= checkpoint.step:
        raise ConfigError(
            f"steps: {config.steps} is already reached, {checkpoint.path.name} is of step {checkpoint.step}; "
            f"raise it with --steps N"
        )
    _check_same_prompts(checkpoint, config)
    content = data_identity(config.data)
    if content != checkpoint.data_hash:
        raise ConfigError(
            f"{changed_data(config.data)} (checksum {content}, not {checkpoint.data_hash}), and prompts would be "
            f"trained twice or never; restore {'it' if config.data.source else 'the file'}, or start a new run from "
            f"{how_to_load(checkpoint.path)} (--set model.path=...)"
        )
    fingerprint = model_fingerprint(Path(config.model.path))
    if fingerprint != checkpoint.fingerprint:
        raise ConfigError(
            f"model.path: {config.model.path} (fingerprint {fingerprint[:12]}) is not the model that "
            f"{checkpoint.path} was trained from ({checkpoint.fingerprint[:12]}); resume with that model"
        )
    _check_same_lora(checkpoint, config)
    for key, path in config.scoring_models.items():
        began = checkpoint.scoring_weights.get(path)  # none: an earlier version saved it, or that is another model
        if began is not None and (what := changed_weights(Path(path), began, key=key)):
            raise ConfigError(what)
    if what := changed_tokenizer(Path(config.model.path), checkpoint.tokenizer_files):
        restore = "" if ";" in what else "; restore it"
        raise ConfigError(
            f"{what}{restore}, or start a new run from {how_to_load(checkpoint.path)} (--set model.path=...)"
        )
    left = {name: lines_up_to(checkpoint.run_dir / name, checkpoint.step) for name in CUT_FILES}
    if config.data.sampler is not None and not left[SAMPLER_FILE]:
        raise missing_state(checkpoint.run_dir / SAMPLER_FILE)
    if config.data.is_feed and not (checkpoint.run_dir / FEED_FILE).is_file():
        raise ConfigError(f"data.source: {checkpoint.run_dir / FEED_FILE} is missing, and with it the rows; restore it")
    trained_groups(checkpoint.run_dir, config.schedule, completed=checkpoint.step)


def _check_same_prompts(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Check that group g still has its prompt, rows and step; otherwise some prompts would be trained twice."""
    # The checkpoint's own copy: it is covered by a checksum, while the run's file may have been edited.
    own = checkpoint.path / CONFIG_FILE
    before, now = _flat(read_yaml(own).values), _flat(config.model_dump(mode="json"))
    for name in now:
        if not name.startswith((*_FIXED, _REFERENCE, _REVISION)) or name not in before or before[name] == now[name]:
            continue
        if name in _COMPARED_OTHERWISE or (name == _REVISION and None in (before[name], now[name])):
            continue
        if name == _TIME and before[name] is None:
            continue
        if name in (_REFERENCE, _REVISION):
            raise ConfigError(
                f"{name}: {now[name]!r} is not what the run began with ({before[name]!r}), and the checkpoint holds "
                f"no other reference; leave it out, or start a new run from {how_to_load(checkpoint.path)} "
                f"(--set model.path=...)"
            )
        raise ConfigError(
            f"{name}: {now[name]!r} is not what the run began with ({before[name]!r}), and prompts would be trained "
            f"twice or never; leave it out, or start a new run from {how_to_load(checkpoint.path)} "
            f"(--set model.path=...)"
        )


def _check_same_lora(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Check that the run trains the adapter that the checkpoint holds, on the base that it was trained on."""
    before = read_yaml(checkpoint.path / CONFIG_FILE).values.get("lora")
    was = LoraConfig.model_validate(before) if before else None
    instead = f"start a new run from {how_to_load(checkpoint.path)} (--set model.path=...)"
    if was is None or config.lora is None:
        if (was is None) != (config.lora is None):
            held = "all weights" if was is None else "an adapter alone"
            raise ConfigError(f"lora: {checkpoint.path} holds {held}; resume with lora as it was, or {instead}")
        return
    for name in ("rank", "scaling", "targets", "modules_to_save"):
        if (own := getattr(config.lora, name)) != (theirs := getattr(was, name)):
            key = "alpha" if name == "scaling" else name
            raise ConfigError(
                f"lora.{key}: {name} {own!r} is not what {checkpoint.path} was trained with ({theirs!r}); leave it as "
                f"it was, or {instead}"
            )
    if config.lora.path not in (None, was.path):
        raise ConfigError(
            f"lora.path: {config.lora.path} would not be read, since {checkpoint.path} holds the adapter as it was "
            f"trained; leave it out, or {instead}"
        )
    found = weights_fingerprint(Path(config.model.path))
    if found != checkpoint.weights_fingerprint:
        raise ConfigError(
            f"model.path: {config.model.path} has other weights (fingerprint {found[:12]}) than the base of the "
            f"adapter in {checkpoint.path} ({checkpoint.weights_fingerprint[:12]}); resume with that model"
        )


def recorded_time(run_dir: Path) -> str | None:
    """Return the run's `data.template_time`; None: a version that did not record it wrote the run."""
    own = run_dir / CONFIG_FILE
    data = read_yaml(own).values.get("data") if own.is_file() and own.stat().st_size else None
    told = data.get("template_time") if isinstance(data, dict) else None
    return None if told is None else str(told)


def _flat(values: Mapping[Any, Any]) -> dict[str, Any]:
    # One level only: options that the user passes through stay whole.
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _newest_in(run_dir: Path, argument: str) -> Checkpoint:
    if run_dir.name == CHECKPOINTS and not (run_dir / CONFIG_FILE).exists():
        raise ConfigError(f"{argument}: {run_dir} holds a run's checkpoints; name one of them, or their run")
    newest = newest_checkpoint(run_dir)
    if newest is None:
        raise ConfigError(
            f"{argument}: {run_dir} holds no complete checkpoint, so there is nothing to go on from; name another run"
        )
    return newest


def _verified_or_refused(path: Path, argument: str) -> Checkpoint:
    try:
        return verified_checkpoint(path, logger.warning)
    except CheckpointError as error:
        raise ConfigError(
            f"{argument}: {path} is not a valid checkpoint: {error}; name another, or the run {path.parent.parent}"
        ) from error
