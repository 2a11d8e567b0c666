"""Whether a launcher of this host runs a run directory now. Looks only."""

import json
import os
from pathlib import Path

from asyncflow.clock import HostClock
from asyncflow.errors import ConfigError
from asyncflow.job import FILE_NAME as JOB_FILE

_START_SLACK_S = 5.0


def running_launcher(run_dir: Path) -> int | None:
    """Return the process id of the launcher that runs `run_dir` now, or None.

    A launcher that was killed leaves `job.json` behind; its process id may since belong to somebody else, who then
    started later than the job did. The process id of another host says nothing here: from there the lock of
    `held_run_dir` keeps a second launcher out, where the file system has locks.
    """
    try:
        job = json.loads((run_dir / JOB_FILE).read_text())
        host, pid, started_at = str(job["clock"]["host"]), int(job["launcher_pid"]), float(job["started_at"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if host != HostClock.measure().host:
        return None
    process_start = _process_start(pid)
    return pid if process_start is not None and process_start <= started_at + _START_SLACK_S else None


def check_not_running(run_dir: Path) -> None:
    """Check that no launcher of this host runs `run_dir` now; raises ConfigError."""
    pid = running_launcher(run_dir)
    if pid is not None:
        raise ConfigError(f"--resume: {run_dir} is still running (launcher process {pid}); stop it first")


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
