"""`asyncflow export`: writes the Hugging Face directory of a checkpoint from its shards, on any machine that sees them.

Needs neither devices nor other processes. In place, the directory becomes the checkpoint's `hf/`, as if its run had
written it; elsewhere, any directory. In both cases it has its name only once it is complete.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from asyncflow.checkpoint_files import (
    DCP,
    HF,
    CheckpointMeta,
    add_export,
    damages,
    describe,
    files_below,
    sync_tree,
)
from asyncflow.errors import ConfigError, one_line
from asyncflow.json_lines import sync
from asyncflow.run_files import CHECKPOINTS, checkpoint_path, list_checkpoints
from launcher.config.paths import user_path
from launcher.run.restore import Checkpoint, is_checkpoint, newest_checkpoint, resume_path, verified_checkpoint
from launcher.run.rundir import is_held, running_launcher
from launcher.run.status import is_live
from workers.data.model_files import model_fingerprint, weights_fingerprint
from workers.settings.lora import LoraConfig
from workers.settings.run import RunConfig

_WORK = f".{HF}-export-"
_SAVES_WEIGHTS = ("fsdp", "megatron")
"""Engines whose saved state has the model's weights by Hugging Face's names."""


def export_run(run: Path, checkpoint: str | None, output: str | None, *, say: Callable[[str], None]) -> Path:
    """Write the Hugging Face directory of a checkpoint and return its path. All that it reads is checked against
    `meta.json` first.

    Args:
        run: a run's directory, or one of its checkpoints.
        checkpoint: a step or a directory; None: the newest valid one.
        output: a directory to be made; None: `hf/` in the checkpoint.
        say: is called with a line for what is passed over.
    Raises:
        ConfigError: there is no such checkpoint, its engine saves no weights, its model directory is gone or another
            one, `output` exists, or the run is running and writes its exports itself.
        CheckpointError: the checkpoint is damaged.
    """
    if output is not None and (target := user_path(output, "--output")).exists():
        raise ConfigError(f"--output: {target} exists; name a directory that does not, or remove it")
    found = _find_checkpoint(run, checkpoint, say)
    if output is None and (where := _runs_where(found.run_dir)):
        raise ConfigError(f"{found.run_dir} is running ({where}) and writes its exports itself; give --output DIR")
    if output is None and _has_whole_export(found.path):
        raise ConfigError(f"{found.path / HF} is there already; to write another one, give --output DIR")
    model_dir, lora = _model_dir(found), RunConfig.load(found.path).lora
    place = found.path if output is None else target.parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        with _held(place) if output is None else contextlib.nullcontext():
            work = Path(tempfile.mkdtemp(prefix=_WORK, dir=place))
            try:
                write_export(found.path / DCP, work, model_dir, lora)
                work.chmod(0o777 & ~_umask())
                if output is None:
                    add_export(found.path, work, describe(work, files_below(work)))
                    return found.path / HF
                sync_tree(work)
                work.rename(target)
                sync(place)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"{'--output' if output is not None else found.path}: cannot be written ({one_line(error)}); make room or "
            f"name another directory with --output"
        ) from error
    return target


@contextlib.contextmanager
def _held(checkpoint: Path) -> Iterator[None]:
    """Keep other exports out of a checkpoint, and remove what those left that were killed."""
    descriptor = os.open(checkpoint, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(f"{checkpoint}: another `asyncflow export` writes it now; wait for that") from error
            for left in checkpoint.glob(f"{_WORK}*"):
                shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)


def _runs_where(run_dir: Path) -> str:
    """Return where a run is running; "": nowhere."""
    if (pid := running_launcher(run_dir)) is not None:
        return f"launcher process {pid}"
    if not is_live(run_dir):
        return ""
    return "it is starting" if is_held(run_dir) else "on another host"


def _has_whole_export(checkpoint: Path) -> bool:
    files = CheckpointMeta.read(checkpoint).files
    listed = {name: entry for name, entry in files.items() if name.startswith(f"{HF}/")}
    return bool(listed) and not damages(checkpoint, listed)


def write_export(saved: Path, target: Path, model_dir: Path, lora: LoraConfig | None = None) -> None:
    """Write a saved state of the model in `model_dir`, or of an adapter on it, as a Hugging Face directory."""
    import torch

    from workers.engines.hf.export import export_adapted, export_saved
    from workers.engines.hf.model import empty_causal_lm, stored_names

    names = stored_names(empty_causal_lm(model_dir, dtype=torch.float32, attention="eager"))
    if lora is None:
        export_saved(saved, target, model_dir, names)
    else:
        export_adapted(saved, target, model_dir, names, lora)


def _find_checkpoint(run: Path, named: str | None, say: Callable[[str], None]) -> Checkpoint:
    path = resume_path(str(run))
    if not path.is_dir():
        raise ConfigError(f"RUN: {str(run)!r} is not a directory; name a run or one of its checkpoints")
    if is_checkpoint(path) and named is None:
        return verified_checkpoint(path, say)
    if is_checkpoint(path):
        raise ConfigError(f"--checkpoint: {path} is a checkpoint already; name its run, or leave --checkpoint out")
    if named is None:
        checkpoint = newest_checkpoint(path, tell=say)
        if checkpoint is None:
            raise ConfigError(f"RUN: {path / CHECKPOINTS} has no checkpoint that can be read; name another run")
        return checkpoint
    wanted = checkpoint_path(path, int(named)) if named.isdecimal() else _named_directory(path, named)
    if not is_checkpoint(wanted) or not wanted.is_dir():
        steps = ", ".join(map(str, list_checkpoints(path))) or "none"
        raise ConfigError(f"--checkpoint: {named!r} is no checkpoint of {path}; it has those of steps {steps}")
    return verified_checkpoint(wanted, say)


def _named_directory(run_dir: Path, named: str) -> Path:
    inside = run_dir / CHECKPOINTS / named
    return inside if inside.is_dir() else resume_path(named)


def _model_dir(checkpoint: Checkpoint) -> Path:
    """Return the model directory that says names and element types of the weights."""
    config = RunConfig.load(checkpoint.path)
    if config.actor.engine not in _SAVES_WEIGHTS:
        raise ConfigError(
            f"actor.engine: the states of {config.actor.engine} are its own, so only a run can export them; resume it, "
            f"and it adds {HF}/ (checkpoint.export_hf)"
        )
    model_dir = Path(config.model.path)
    if not model_dir.is_dir():
        raise ConfigError(
            f"model.path: {model_dir}, which {checkpoint.path} was trained from, is not there; an export takes the "
            f"tokenizer and the element types of the weights from it, so restore it"
        )
    fingerprint, wanted = model_fingerprint(model_dir), checkpoint.fingerprint
    if config.lora is not None and fingerprint == wanted:  # the adapter belongs to the values, too
        fingerprint, wanted = weights_fingerprint(model_dir), checkpoint.weights_fingerprint
    if fingerprint != wanted:
        raise ConfigError(
            f"model.path: {model_dir} (fingerprint {fingerprint[:12]}) is not the model that {checkpoint.path} was "
            f"trained from ({wanted[:12]}); restore that one"
        )
    return model_dir


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
