"""The part that all batch scripts share, run by bash with fakes of Slurm's commands in its PATH."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.slurm.batch_job import EARLY_TRAP, RELAUNCH

SLEEP = shutil.which("sleep")
SETTINGS = f"""
{EARLY_TRAP}run_dir={{run_dir}}
max_requeues=3
gather_s=70
srun_options=(--cpu-bind=none)
launch=(asyncflow-launch recipe.yaml --run-dir "$run_dir")
"""
SRUN = """#!{python}
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
note = open({notes!r}, "a").write
note("srun " + " ".join(sys.argv[1:]) + "\\n")
open({started!r}, "w").close()
if {waits}:
    signal.sigwait([signal.SIGUSR1])
    note("srun got USR1\\n")
sys.exit({code})
"""


@dataclass
class Job:
    """One start of a batch script."""

    directory: Path
    code: int = 0
    waits: bool = False
    """Whether `srun` ends only when it gets a USR1."""
    states: tuple[str, ...] = ("RUNNING",)
    """What `squeue` says, call after call; the last one again and again."""
    restarts: int = 0
    requeue_works: bool = True

    def __post_init__(self) -> None:
        self.run_dir.mkdir()
        self.notes.touch()
        started = self.directory / "started"
        os.mkfifo(started)
        srun = SRUN.format(
            python=sys.executable, notes=str(self.notes), started=str(started), waits=self.waits, code=self.code
        )
        self._program("srun", srun)
        (self.directory / "states").write_text("".join(f"{state}\n" for state in self.states))
        self._program(
            "squeue",
            f"#!/bin/bash\nhead -n 1 {self.directory}/states\nif (($(wc -l < {self.directory}/states) > 1)); then "
            f"sed -i 1d {self.directory}/states; fi\n",
        )
        self._program(
            "scontrol", f'#!/bin/bash\necho "scontrol $*" >> {self.notes}\nexit {int(not self.requeue_works)}\n'
        )
        # A minute's sleeps are left out; the second for which srun may be deaf is slept.
        self._program(
            "sleep", f'#!/bin/bash\nif [[ $1 == 1 ]]; then exec {SLEEP} 1; fi\necho "sleep $*" >> {self.notes}\n'
        )
        script = self.directory / "script.sbatch"
        script.write_text(SETTINGS.format(run_dir=self.run_dir) + RELAUNCH.read_text())

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    @property
    def notes(self) -> Path:
        return self.directory / "notes"

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start the script; on return its `srun` runs."""
        environment = {**os.environ, "PATH": f"{self.directory / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
        if self.restarts:
            environment["SLURM_RESTART_COUNT"] = str(self.restarts)
        script = self.directory / "script.sbatch"
        process = subprocess.Popen(
            ["bash", script, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        (self.directory / "started").read_text()
        return process

    def run(self, *arguments: str) -> tuple[int, str]:
        """Run the script to its end; return its exit code and what it says."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=30)
        assert err == ""
        return process.returncode, out

    def noted(self) -> list[str]:
        return self.notes.read_text().splitlines()

    def _program(self, name: str, text: str) -> None:
        file = self.directory / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)


def launch_of(job: Job) -> str:
    """Return what srun was asked to run."""
    return job.noted()[0].partition("--cpu-bind=none ")[2]


@pytest.mark.parametrize("code", [0, 1, 2])
def test_run_that_is_done_or_failed_ends_the_job_with_its_code(tmp_path: Path, code: int) -> None:
    job = Job(tmp_path, code=code)
    assert job.run() == (code, "")
    assert len(job.noted()) == 1


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_signal_reaches_the_step_and_the_job_is_queued_again(tmp_path: Path, number: signal.Signals) -> None:
    job = Job(tmp_path, code=75, waits=True)
    process = job.start()
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert out == "asyncflow: stopped; queued again, restart 1 of at most 3\n"
    assert job.noted()[1:] == ["srun got USR1", "scontrol requeue 17"]


def test_run_that_ended_by_itself_while_a_signal_came_keeps_its_code(tmp_path: Path) -> None:
    """What `wait` says when a signal interrupts it must not be taken for the step's exit code."""
    job = Job(tmp_path, code=0, waits=True)
    process = job.start()
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 0
    assert job.noted()[1:] == ["srun got USR1"]


def test_signal_before_the_launch_stops_what_is_launched_then(tmp_path: Path) -> None:
    """While the site's lines run, e.g. `module load`."""
    job = Job(tmp_path, code=75, waits=True)
    script = tmp_path / "script.sbatch"
    script.write_text(script.read_text().replace("run_dir=", "kill -USR1 $$\nrun_dir=", 1))
    assert job.run()[0] == 0
    assert job.noted()[1:] == ["srun got USR1", "scontrol requeue 17"]


def test_step_that_was_stopped_before_it_began_is_queued_again(tmp_path: Path) -> None:
    """Then srun says "Cancelled pending job step" and ends with 1, as a failed run does."""
    job = Job(tmp_path, code=1, waits=True)
    process = job.start()
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=30)[1] == ""
    assert job.noted()[1:] == ["srun got USR1", "scontrol requeue 17"]


@pytest.mark.parametrize("code", [75, 137, 138])
def test_stopped_run_and_one_whose_launcher_was_killed_are_queued_again(tmp_path: Path, code: int) -> None:
    job = Job(tmp_path, code=code)
    assert job.run()[0] == 0
    assert job.noted()[1:] == ["scontrol requeue 17"]


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "TIMEOUT", "PENDING"])
def test_job_that_slurm_ends_itself_is_left_to_slurm(tmp_path: Path, state: str) -> None:
    """`scontrol requeue` would bring a cancelled job back."""
    for restarts in (0, 3):
        directory = tmp_path / str(restarts)
        directory.mkdir()
        job = Job(directory, code=75, states=(state,), restarts=restarts)
        assert job.run() == (75, "")
        assert len(job.noted()) == 1


def test_restarts_are_bounded_and_the_end_is_said(tmp_path: Path) -> None:
    job = Job(tmp_path, code=75, restarts=3)
    code, out = job.run()
    assert code == 1
    assert out.startswith("asyncflow: stopped; not queued again after 3 restarts (max_requeues=3). To continue, ")
    assert len(job.noted()) == 1


def test_restart_resumes_what_the_run_directory_holds(tmp_path: Path) -> None:
    job = Job(tmp_path, restarts=1)
    (job.run_dir / "config.yaml").touch()
    job.run("--steps", "7")
    assert launch_of(job) == f"asyncflow-launch recipe.yaml --run-dir {job.run_dir} --steps 7 --resume latest"


def test_restart_does_not_go_back_to_what_the_first_start_resumed_from(tmp_path: Path) -> None:
    """The launcher takes the last `--resume`; back to an old checkpoint at every restart, a run would never end."""
    job = Job(tmp_path, restarts=1)
    (job.run_dir / "config.yaml").touch()
    job.run("--resume", f"{job.run_dir}/checkpoints/step_000003")
    assert launch_of(job).endswith("/checkpoints/step_000003 --resume latest")


def test_restart_of_a_run_that_never_began_and_first_starts_resume_nothing(tmp_path: Path) -> None:
    for name, restarts in (("never began", 2), ("first", 0)):
        directory = tmp_path / name.replace(" ", "-")
        directory.mkdir()
        job = Job(directory, restarts=restarts)
        if not restarts:
            (job.run_dir / "config.yaml").touch()
        job.run()
        assert launch_of(job) == f"asyncflow-launch recipe.yaml --run-dir {job.run_dir}"


def test_controller_that_is_away_is_asked_again(tmp_path: Path) -> None:
    job = Job(tmp_path, code=75, states=("", "", "RUNNING"))
    assert job.run()[0] == 0
    assert job.noted()[1:] == ["sleep 10", "sleep 10", "scontrol requeue 17"]


def test_controller_that_stays_away_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    job = Job(tmp_path, code=75, requeue_works=False)
    code, out = job.run()
    assert code == 1
    assert "did not take the job back for a minute" in out.splitlines()[-1]
    assert job.noted()[1:] == ["scontrol requeue 17", "sleep 10"] * 6
