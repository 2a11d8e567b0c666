"""The run directory: its default name, whether a new run may use it, and whether a launcher runs it now.

`asyncflow.run_files` has the names in it. Nothing is written before the whole configuration has been accepted. Checks
and writers raise ConfigError for a directory that cannot be used.
"""

import fcntl
import itertools
import json
import logging
import os
import reprlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncflow.checkpoint_files import HF
from asyncflow.clock import HostClock
from asyncflow.errors import ConfigError
from asyncflow.json_lines import replace_text
from asyncflow.run_files import (
    CHECKPOINTS,
    CONFIG_FILE,
    DIRECTORIES,
    INPUTS,
    JOB_FILE,
    LINE_FILES,
    LOGS,
    PLAN_FILE,
    list_checkpoints,
)
from launcher.config.paths import why_not_writable

if TYPE_CHECKING:
    from workers.settings.run import RunConfig

logger = logging.getLogger(__name__)

RUNS = Path("runs")
_OF_BATCH_JOBS = (".sbatch", ".sh", ".out", ".err", ".log")
_LONGEST_NAME = 200
"""In bytes; a timestamp follows the name, and file systems allow 255."""
_START_SLACK_S = 5.0
_LOCK_S = 0.2


def default_run_dir(name: str, now: datetime) -> Path:
    """Return `runs/NAME-TIMESTAMP` in the working directory, with a counter if that exists."""
    if not name.strip() or name.startswith(".") or "/" in name or not name.isprintable():
        raise ConfigError(f"name: {name!r} cannot name a run directory; use letters, digits, '-' and '_'")
    if len(os.fsencode(name)) > _LONGEST_NAME:
        raise ConfigError(f"name: {reprlib.repr(name)} is longer than {_LONGEST_NAME} bytes; shorten it")
    return next(path for path in _numbered((RUNS / f"{name}-{now:%Y%m%d-%H%M%S}").resolve()) if not path.exists())


def check_new_run_dir(path: Path, *, resumes: bool = True) -> None:
    """Check that a new run may be created at `path`: writable, no run in it, no files but a batch job's.

    `resumes`: what is there may be continued.
    """
    held = [name for name in (CONFIG_FILE, *LINE_FILES, *DIRECTORIES) if (path / name).exists()]
    if held == [CONFIG_FILE] and not began_run(path):
        raise ConfigError(f"run directory: {path} has a {CONFIG_FILE} that no run wrote; choose another --run-dir")
    if held:
        resumable = has_checkpoint(path) or began_run(path)
        advice = f"continue it with --resume {path}" if resumable else "remove it (it has no checkpoint)"
        advice = f"{advice}, or choose another --run-dir" if resumes else "choose another --run-dir"
        raise ConfigError(f"run directory: {path} already holds a run ({held[0]}); {advice}")
    others = sorted(entry.name for entry in path.iterdir() if not _may_be_beside(entry)) if path.is_dir() else []
    if others:
        shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise ConfigError(
            f"run directory: {path} holds files that no run wrote ({shown}), and a run's would mix with them; choose a "
            f"new or empty --run-dir"
        )
    check_writable(path)


def _may_be_beside(entry: Path) -> bool:
    # A batch job's script and output are often in the run's directory.
    return entry.name == INPUTS or entry.name.startswith(".") or (entry.is_file() and entry.suffix in _OF_BATCH_JOBS)


def newest_run(asked_by: str = "--resume", remedy: str = "name a run with --resume DIR or --run-dir DIR") -> Path:
    """Return the newest run directory in `runs/`."""
    runs = [file.parent for file in RUNS.glob(f"*/{CONFIG_FILE}")]
    if not runs:
        raise ConfigError(f"{asked_by}: there is no run in {RUNS.resolve()}; {remedy}")
    return max(runs, key=lambda run: (run / CONFIG_FILE).stat().st_mtime_ns).resolve()


def check_run_dir(path: Path) -> Path:
    """Return a directory that a command looks at. Raises ConfigError if it is no run's."""
    if not (path / CONFIG_FILE).is_file():
        why = f"it has no {CONFIG_FILE}" if path.is_dir() else "it is a file" if path.exists() else "it does not exist"
        raise ConfigError(f"RUN: {path} is not a run directory ({why}); name one, e.g. of `asyncflow ls`")
    return path


def has_checkpoint(path: Path) -> bool:
    """Return whether a run has saved anything."""
    return bool(list_checkpoints(path))


def newest_model(path: Path) -> Path | None:
    """Return the directory that `transformers` loads in a run's newest checkpoint; None: there is none."""
    newest = next(reversed(list_checkpoints(path).values()), None)
    return newest / HF if newest is not None and (newest / HF / "config.json").is_file() else None


def began_run(path: Path) -> bool:
    """Return whether a run began in `path`."""
    # A run creates checkpoints/ before it writes its configuration. Projects and checkpoints have a config.yaml too. A
    # run whose checkpoints/ is gone, such as a symlink to an absent disk, does not count: what it saved is unknown.
    config = path / CONFIG_FILE
    return config.is_file() and ((path / CHECKPOINTS).is_dir() or not config.stat().st_size)


def check_writable(path: Path) -> None:
    """Check that a run may write into `path`, or into its nearest existing parent; nothing is left behind."""
    nearest = path
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ConfigError(f"run directory: {path} cannot be created, {nearest} is a file; choose another --run-dir")
    if nearest != path and (reason := why_not_writable(nearest)):
        raise ConfigError(
            f"run directory: {path} cannot be created, nothing can be written to {nearest} ({reason}); choose another "
            f"--run-dir or its permissions"
        )
    for directory in (path, *(path / name for name in DIRECTORIES)) if nearest == path else ():
        if directory.is_dir() and (reason := why_not_writable(directory)):
            raise ConfigError(
                f"run directory: {directory} cannot be written ({reason}); choose another --run-dir or its permissions"
            )


def create_run_dir(path: Path, config: "RunConfig", *, or_beside: bool = False) -> Path:
    """Create a new run's directory and write the resolved configuration; return the path.

    If two commands choose the same free directory, the second is refused or, with `or_beside`, takes the next free
    number.
    """
    for candidate in _numbered(path):
        try:
            candidate.mkdir(parents=True, exist_ok=True)
            # Exclusive creation claims the directory: only one process can succeed.
            (candidate / CONFIG_FILE).open("x").close()
        except FileExistsError as error:
            if not or_beside:
                raise ConfigError(
                    f"run directory: {path} was taken by another run just now; choose another --run-dir"
                ) from error
        except OSError as error:
            raise _cannot_write(path, error) from error
        else:
            return rewrite_run_dir(candidate, config)
    raise AssertionError("the numbers have no end")


def rewrite_run_dir(path: Path, config: "RunConfig") -> Path:
    """Create missing directories of the layout and overwrite the resolved configuration; return `path`."""
    try:
        for name in DIRECTORIES:
            (path / name).mkdir(parents=True, exist_ok=True)
        config.save(path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    return path


def write_plan(path: Path, plan: Mapping[str, Any]) -> None:
    """Write the planner's choice next to the configuration, for `asyncflow status` to compare with."""
    try:
        replace_text(path / PLAN_FILE, json.dumps(plan, indent=1))
    except OSError as error:
        raise _cannot_write(path, error) from error


def read_plan(path: Path, roles: Mapping[str, int], colocated: Sequence[str]) -> dict[str, Any]:
    """Return the planner's choice; {} if there is no plan, a damaged one, a link out of the run's directory, or one for
    other roles than these, which a run has that was resumed with others."""
    if not is_inside(path / PLAN_FILE, path):
        return {}
    try:
        plan = dict(json.loads((path / PLAN_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return {}
    same = plan.get("roles") == dict(roles) and plan.get("colocated", []) == list(colocated)
    return plan if same else {}


def discard_run_dir(path: Path) -> None:
    """Remove what a run that never began created: configuration, plan, launcher logs, and empty directories."""
    for name in (CONFIG_FILE, PLAN_FILE):
        (path / name).unlink(missing_ok=True)
    for log in (path / LOGS).glob("launcher*.log"):
        log.unlink(missing_ok=True)
    for directory in (*(path / name for name in DIRECTORIES), path):
        with suppress(OSError):  # it holds files of the user
            directory.rmdir()


@contextmanager
def held_run_dir(path: Path) -> Iterator[None]:
    """Keep other launchers out of a run's directory; the system releases the lock however this process ends."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() < deadline:  # `is_held` may be looking
                time.sleep(_LOCK_S / 20)
                continue
            os.close(descriptor)
            raise ConfigError(f"run directory: another launcher runs {path} now; stop it first") from error
        except OSError as error:  # a file system without locks
            logger.warning("%s is not locked against a second launcher: %s", path, error)
        break
    try:
        yield
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Return whether a launcher holds a run's directory, perhaps one that is still starting; False also where
    the file system has no locks."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def is_inside(path: Path, run_dir: Path) -> bool:
    """Return whether a file is in the run's directory and not behind a link that leads out of it.

    A run may come from somebody else, and what is shown of it may go to somebody else.
    """
    try:
        return path.resolve(strict=True).is_relative_to(run_dir.resolve())
    except OSError:
        return False


def write_inside(run_dir: Path, name: str, text: str) -> Path:
    """Write a file of a run that may be somebody else's, and return its path: a link there is replaced, not followed.

    Raises ConfigError if its directory is a link out of the run's, OSError if it cannot be written.
    """
    path = run_dir / name
    if not is_inside(path.parent, run_dir):
        raise ConfigError(f"RUN: {path.parent} is not in the run's directory; remove that link")
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def running_launcher(run_dir: Path) -> int | None:
    """Return the process id of the launcher that runs `run_dir` on this host now, or None."""
    try:
        job = json.loads((run_dir / JOB_FILE).read_text())
        host, pid, started_at = str(job["clock"]["host"]), int(job["launcher_pid"]), float(job["started_at"])
        here = run_dir.stat().st_ino
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # Another host's process id means nothing here; there, the lock of `held_run_dir` keeps a second launcher out, if
    # the file system has locks.
    if host != HostClock.from_wall_clock().host:
        return None
    if job.get("directory", here) != here:  # a copy of that launcher's
        return None
    # A killed launcher leaves job.json behind. Its process id may since belong to another process, which started later
    # than the job.
    process_start = _process_start(pid)
    return pid if process_start is not None and process_start <= started_at + _START_SLACK_S else None


def check_not_running(run_dir: Path) -> None:
    """Refuse a directory that a launcher of this host runs now."""
    pid = running_launcher(run_dir)
    if pid is not None:
        raise ConfigError(f"--resume: {run_dir} is still running (launcher process {pid}); stop it first")


def _numbered(path: Path) -> Iterator[Path]:
    """Yield `path`, then `path-2`, `path-3`, ..."""
    yield path
    for count in itertools.count(2):
        yield path.with_name(f"{path.name}-{count}")


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"run directory: {path} cannot be written: {error.strerror}; choose another --run-dir")


def _process_start(pid: int) -> float | None:
    """Return when process `pid` started (unix time, s), or None if it is gone or a zombie."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except (psutil.Error, ValueError):
        return None
