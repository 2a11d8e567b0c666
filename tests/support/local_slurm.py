"""A real Slurm on this host (`examples/local_slurm.sh`), as tests and the chaos benchmark drive it."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.machine import obstacle
from tests.support.processes import DEADLINE_S, kill, wait_until

SCRIPT = Path(__file__).parents[2] / "examples" / "local_slurm.sh"
COMMAND = Path(sys.executable).parent / "asyncflow"
NEEDED = ("slurmctld", "slurmd", "sbatch", "munged")
_REMEDY = "apt-get install slurmctld slurmd slurm-client munge"
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"})


def slurm_obstacle() -> str:
    """Return why Slurm cannot run here, or ""."""
    tried = (obstacle(name, "-V", remedy=_REMEDY) for name in NEEDED)
    return next(filter(None, tried), "")


@contextmanager
def local_slurm(*, nodes: int) -> "Iterator[LocalSlurm]":
    """Start it in a directory of its own; afterwards none of its processes is left."""
    directory = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: munge's socket is in it
    slurm = LocalSlurm(directory)
    try:
        subprocess.run([SCRIPT, "up", directory, "--nodes", str(nodes)], check=True, stdout=subprocess.DEVNULL)
        yield slurm
    finally:
        subprocess.run([SCRIPT, "down", directory], check=True)
        shutil.rmtree(directory)


class LocalSlurm:
    """Its commands, and the harm that is done to it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}

    def submit(self, *arguments: str, cwd: Path) -> int:
        """Run `asyncflow sbatch ARGUMENTS --submit`; return the job's number."""
        said = self.call(str(COMMAND), "sbatch", *arguments, "--submit", cwd=cwd)
        submitted = re.fullmatch(r"submitted job (\d+); .*\n", said)
        assert submitted is not None, said
        return int(submitted[1])

    def call(self, *command: str, cwd: Path | None = None) -> str:
        """Run one of Slurm's commands; return what it says."""
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, cwd=cwd, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def facts(self, job: int) -> dict[str, str]:
        """Return what `scontrol show job` says."""
        words = self.call("scontrol", "--oneliner", "show", "job", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job: int, *states: str, deadline_s: float = DEADLINE_S) -> dict[str, str]:
        """Wait until the job is in one of the states; one that ended in another is an error at once."""
        found: dict[str, str] = {}

        def arrived() -> bool:
            found.update(self.facts(job))
            assert found["JobState"] in states or found["JobState"] not in ENDED, found
            return found["JobState"] in states

        wait_until(arrived, f"job {job} {' or '.join(states)}", deadline_s=deadline_s, every_s=0.2)
        return found

    def wait_for_restart(self, job: int, number: int) -> None:
        """Wait until the job was put back into the queue for the `number`-th time; start it without Slurm's delay."""
        wait_until(lambda: int(self.facts(job)["Restarts"]) >= number, f"restart {number} of job {job}", every_s=0.2)
        self.wait_for(job, "PENDING", "RUNNING")
        # Slurm lets a job that was requeued wait two minutes, until no node holds its revoked credential any more; the
        # credential of a start in the same second as the revocation would count as revoked.
        self.call("scontrol", "update", f"JobId={job}", "StartTime=now+2")
        self.wait_for(job, "RUNNING", "COMPLETED")

    def preempt(self, job: int) -> None:
        """Send what Slurm sends ahead of a time limit, to whom it sends it."""
        self.call("scancel", "--batch", "--signal=USR1", str(job))

    def cancel(self, job: int) -> None:
        """End it for good."""
        self.call("scancel", str(job))

    def cancel_all(self) -> None:
        """End every job that is left, and wait until their nodes are free."""
        for job in self.call("squeue", "--noheader", "--format=%A").split():
            self.cancel(int(job))
        wait_until(lambda: not self.call("squeue", "--noheader"), "an empty queue", every_s=0.2)

    def kill_node(self, name: str) -> None:
        """Kill a node's daemon and all steps that it runs, as a power cut does."""
        os.kill(int((self._directory / "run" / f"slurmd-{name}.pid").read_text()), signal.SIGKILL)
        for manager in self._step_managers(name):
            with contextlib.suppress(psutil.NoSuchProcess):
                family = [manager, *manager.children(recursive=True)]
                for process in family:
                    kill(process)

    def revive_node(self, name: str) -> None:
        """Start the daemon of a dead node again."""
        self.call("slurmd", "-f", self.environment["SLURM_CONF"], "-N", name)
        wait_until(lambda: "idle" in self.call("sinfo", "-h", "-n", name, "-o", "%t"), f"{name} idle", every_s=0.2)

    def has_srun(self, job: int) -> bool:
        """Return whether the job's script has come as far as its step."""
        return any(_name(process) == "srun" for process in self.processes(job))

    def processes(self, job: int) -> list[psutil.Process]:
        """Return every process of the job, whatever its parent is now."""
        return [process for process in psutil.process_iter() if _job_of(process) == (str(job), self._conf)]

    @property
    def _conf(self) -> str:
        return self.environment["SLURM_CONF"]

    def _step_managers(self, node: str) -> list[psutil.Process]:
        """Return the slurmstepds of a node: those that write into its log."""
        log = str(self._directory / "log" / f"slurmd-{node}.log")
        managers = [process for process in psutil.process_iter() if _name(process) == "slurmstepd"]
        return [process for process in managers if log in _open_files(process)]


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _open_files(process: psutil.Process) -> list[str]:
    try:
        return [str(entry.readlink()) for entry in Path(f"/proc/{process.pid}/fd").iterdir()]
    except OSError:
        return []


def _job_of(process: psutil.Process) -> tuple[str, str] | None:
    """Return the job's number and the Slurm that runs it; None for processes that are no job's."""
    try:
        variables = process.environ()
        if "SLURM_JOB_ID" not in variables or process.status() == psutil.STATUS_ZOMBIE:
            return None
    except (psutil.Error, OSError):
        return None
    return variables["SLURM_JOB_ID"], variables.get("SLURM_CONF", "")
