"""`asyncflow sbatch` on a real Slurm: a job ends, is stopped, cancelled, loses its node, and goes on where it was."""

import contextlib
import shutil
from pathlib import Path

import psutil
import pytest

from tests.support.local_slurm import COMMAND, LocalSlurm
from tests.support.processes import kill, wait_until
from tests.support.run_files import LedgerFaults, last_step, ledger_faults, lines

GROUPS = 8
SMALL = (
    "--time", "20", "--cpus-per-task", "1", "--set", f"schedule.rollout_batch_size={GROUPS}",
    "--set", "checkpoint.interval=0",
)  # fmt: skip
EXACT = LedgerFaults(skipped=0, twice=0)
SAVED_OFTEN = ("--set", "checkpoint.interval=4", "--set", "checkpoint.export_hf=false")
ENDLESS = ("--steps", "100000")
TWO_NODES = ("--nodes", "2", "--roles", "rollout:2,actor:2,ref:1")
LAST = 80
MANY = ("--steps", str(LAST))
"""More than are finished before a signal arrives, few enough to wait for."""

pytestmark = pytest.mark.timeout(600)


def said(run_dir: Path, job: int) -> str:
    """Return the job's log."""
    return (run_dir / f"slurm-{job}.out").read_text()


def check_ledger(slurm: LocalSlurm, run_dir: Path, *, last: int) -> None:
    """Every group of steps 1 to `last` was trained once, by our own count and by that of `asyncflow verify`."""
    assert ledger_faults(run_dir, groups_per_step=GROUPS, last=last) == EXACT
    slurm.call(str(COMMAND), "verify", str(run_dir))


def wait_for_step(run_dir: Path, step: int) -> None:
    wait_until(lambda: last_step(run_dir) >= step, f"step {step} of {run_dir.name}")


def test_finished_run_ends_the_job_with_0(slurm: LocalSlurm, tmp_path: Path) -> None:
    run_dir = tmp_path / "50% of it"
    job = slurm.submit("--run-dir", run_dir.name, "--steps", "4", *SMALL, cwd=tmp_path)
    facts = slurm.wait_for(job, "COMPLETED")
    assert (facts["ExitCode"], facts["Restarts"]) == ("0:0", "0")
    assert "done (step 4/4" in said(run_dir, job).splitlines()[-1]
    check_ledger(slurm, run_dir, last=4)


# What pyxis makes of its options, on a machine without it: an image is a directory whose `bin` is the container's PATH.
PYXIS = """#!/bin/bash
options=()
while [[ $1 == --* ]]; do
    case $1 in
        --container-*) echo "$1" >> {asked}; ;;&
        --container-image=*) image=${{1#*=}} ;;
        --container-workdir=*) options+=("--chdir=${{1#*=}}") ;;
        --container-mounts=*) ;;
        *) options+=("$1") ;;
    esac
    shift
done
PATH=$image/bin:/usr/bin:/bin exec {srun} "${{options[@]}}" "$@"
"""


def test_job_whose_launcher_is_in_a_container_is_stopped_and_goes_on(slurm: LocalSlurm, tmp_path: Path) -> None:
    """Slurm and the signals are real, the container is not."""
    image, run_dir, asked = tmp_path / "image", tmp_path / "run", tmp_path / "asked"
    for program, text in (("bin/srun", PYXIS.format(asked=asked, srun=shutil.which("srun"))), ("setup.sh", "")):
        (tmp_path / program).parent.mkdir(exist_ok=True)
        (tmp_path / program).write_text(text or f"PATH={tmp_path}/bin:$PATH\n")
    (tmp_path / "bin/srun").chmod(0o755)
    (image / "bin").mkdir(parents=True)
    (image / "bin/asyncflow-launch").symlink_to(COMMAND.with_name("asyncflow-launch"))
    container = ("--container-image", str(image), "--container-mounts", f"{tmp_path}:{tmp_path}")
    job = slurm.submit("--run-dir", "run", *MANY, *SMALL, *container, "--setup", "setup.sh", cwd=tmp_path)
    wait_for_step(run_dir, 2)
    slurm.preempt(job)
    slurm.wait_for_restart(job, 1)
    facts = slurm.wait_for(job, "COMPLETED")
    assert (facts["ExitCode"], facts["Restarts"]) == ("0:0", "1")
    mounts, workdir = f"--container-mounts={tmp_path}:{tmp_path}", f"--container-workdir={tmp_path}"
    assert asked.read_text().splitlines() == [f"--container-image={image}", mounts, workdir] * 2
    check_ledger(slurm, run_dir, last=LAST)


def test_failed_run_ends_the_job_with_its_code(slurm: LocalSlurm, tmp_path: Path) -> None:
    fragile = ("--set", "launcher.max_restarts=0", "--set", "launcher.max_global_restarts=0")
    job = slurm.submit("--run-dir", "run", *ENDLESS, *SMALL, *fragile, cwd=tmp_path)
    wait_for_step(tmp_path / "run", 1)
    workers = [one for one in slurm.processes(job) if holds(one, tmp_path / "run/timeline/actor-0.jsonl")]
    kill(workers[0])
    facts = slurm.wait_for(job, "FAILED")
    assert (facts["ExitCode"], facts["Restarts"]) == ("1:0", "0")


def holds(process: psutil.Process, file: Path) -> bool:
    """Return whether a process has this file open."""
    try:
        return any(entry.path == str(file) for entry in process.open_files())
    except psutil.Error:
        return False


def test_signal_ahead_of_the_limit_saves_and_the_job_goes_on_by_itself(slurm: LocalSlurm, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    job = slurm.submit("--run-dir", "run", *MANY, *SMALL, cwd=tmp_path)
    wait_for_step(run_dir, 2)
    slurm.preempt(job)
    slurm.wait_for_restart(job, 1)
    assert "asyncflow: stopped; queued again, restart 1 of at most 20" in said(run_dir, job)
    stopped_at = int(next(path.name for path in (run_dir / "checkpoints").iterdir())[len("step_") :])
    facts = slurm.wait_for(job, "COMPLETED")
    assert (facts["ExitCode"], facts["Restarts"]) == ("0:0", "1")
    lineages = [line["lineage"] for line in lines(run_dir / "metrics.jsonl")]
    assert lineages == [0] * stopped_at + [1] * (LAST - stopped_at)
    check_ledger(slurm, run_dir, last=LAST)


def test_signal_while_the_launcher_starts_costs_nothing(slurm: LocalSlurm, tmp_path: Path) -> None:
    """Nothing was saved, so the restart begins the run again, in the directory that is there already."""
    run_dir = tmp_path / "run"
    job = slurm.submit("--run-dir", "run", "--steps", "4", *SMALL, cwd=tmp_path)
    wait_until((run_dir / "config.yaml").is_file, "the run's directory")
    slurm.preempt(job)
    slurm.wait_for_restart(job, 1)
    slurm.wait_for(job, "COMPLETED")
    assert not (run_dir / "checkpoints/abandoned").exists()
    check_ledger(slurm, run_dir, last=4)


def test_cancelled_job_leaves_nothing_and_does_not_come_back(slurm: LocalSlurm, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    job = slurm.submit("--run-dir", "run", *ENDLESS, *SMALL, cwd=tmp_path)
    wait_for_step(run_dir, 2)
    assert len(slurm.processes(job)) > 8
    slurm.cancel(job)
    wait_until(lambda: not slurm.processes(job), "the end of all processes")
    assert slurm.wait_for(job, "CANCELLED")["Restarts"] == "0"
    assert "queued again" not in said(run_dir, job)
    # The script can be submitted again, with further options for the launcher.
    last = last_step(run_dir) + 2
    again = int(
        slurm.call("sbatch", "--parsable", "run/run.sbatch", "--resume", "latest", "--steps", str(last), cwd=tmp_path)
    )
    slurm.wait_for(again, "COMPLETED")
    check_ledger(slurm, run_dir, last=last)


def test_job_that_is_preempted_by_a_better_one_goes_on_after_it(slurm: LocalSlurm, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    job = slurm.submit("--run-dir", "run", "--partition", "spot", *MANY, *SMALL, cwd=tmp_path)
    wait_for_step(run_dir, 2)
    slurm.call("srun", "--partition=main", "--nodes=3", "--exclusive", "true")
    slurm.wait_for_restart(job, 1)
    slurm.wait_for(job, "COMPLETED")
    check_ledger(slurm, run_dir, last=LAST)


def test_two_jobs_on_one_node_do_not_meet(slurm: LocalSlurm, tmp_path: Path) -> None:
    on_n1 = ("--sbatch-arg", "--nodelist=n1")
    jobs = [slurm.submit("--run-dir", name, *ENDLESS, *SMALL, *on_n1, cwd=tmp_path) for name in ("a", "b")]
    for name in ("a", "b"):
        wait_for_step(tmp_path / name, 3)
    assert all(slurm.facts(job)["NodeList"] == "n1" for job in jobs)
    slurm.cancel(jobs[0])
    wait_until(lambda: not slurm.processes(jobs[0]), "the end of the first job")
    wait_for_step(tmp_path / "b", last_step(tmp_path / "b") + 3)
    slurm.cancel(jobs[1])
    slurm.wait_for(jobs[1], "CANCELLED")


def test_job_whose_node_dies_goes_on_elsewhere(slurm: LocalSlurm, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    job = slurm.submit("--run-dir", "run", *MANY, *SMALL, *SAVED_OFTEN, cwd=tmp_path)
    wait_for_step(run_dir, 5)
    node = slurm.facts(job)["NodeList"]
    slurm.kill_node(node)
    slurm.wait_for_restart(job, 1)
    facts = slurm.wait_for(job, "COMPLETED")
    assert facts["NodeList"] != node
    check_ledger(slurm, run_dir, last=LAST)
    slurm.revive_node(node)


def test_job_gives_up_after_its_last_restart(slurm: LocalSlurm, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    job = slurm.submit("--run-dir", "run", "--max-requeues", "0", *ENDLESS, *SMALL, cwd=tmp_path)
    wait_for_step(run_dir, 1)
    slurm.preempt(job)
    facts = slurm.wait_for(job, "FAILED")
    assert (facts["ExitCode"], facts["Restarts"]) == ("1:0", "0")
    assert "not queued again after 0 restarts (max_requeues=0)" in said(run_dir, job).splitlines()[-1]
    assert any((run_dir / "checkpoints").iterdir())


def launcher(slurm: LocalSlurm, job: int, node: str) -> psutil.Process:
    """Return the launcher on a node, the first process of the job's step there; the batch script is in no step."""
    of_step = []
    for process in slurm.processes(job):
        with contextlib.suppress(psutil.Error):
            variables = process.environ()
            if "SLURM_STEP_ID" in variables and variables["SLURM_NODEID"] == node:
                of_step.append(process)
    return min(of_step, key=lambda process: process.create_time())


def test_run_over_two_nodes_is_stopped_on_both_and_goes_on(slurm: LocalSlurm, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    job = slurm.submit("--run-dir", "run", *TWO_NODES, *MANY, *SMALL, cwd=tmp_path)
    wait_for_step(run_dir, 2)
    slurm.preempt(job)
    slurm.wait_for_restart(job, 1)
    assert said(run_dir, job).count("Exited with exit code 75") == 2
    slurm.wait_for(job, "COMPLETED")
    check_ledger(slurm, run_dir, last=LAST)


def test_run_over_two_nodes_survives_the_death_of_a_launcher(slurm: LocalSlurm, tmp_path: Path) -> None:
    """A launcher that is killed ends the job resumably, on whichever node it was; nobody waits for ever."""
    run_dir = tmp_path / "run"
    job = slurm.submit("--run-dir", "run", *TWO_NODES, *MANY, *SMALL, *SAVED_OFTEN, cwd=tmp_path)
    for restart, node in ((1, "0"), (2, "1")):
        wait_for_step(run_dir, last_step(run_dir) + 3)
        kill(launcher(slurm, job, node))
        slurm.wait_for_restart(job, restart)
    slurm.wait_for(job, "COMPLETED")
    check_ledger(slurm, run_dir, last=LAST)


def test_run_over_two_nodes_goes_on_when_one_of_them_dies(slurm: LocalSlurm, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    job = slurm.submit("--run-dir", "run", *TWO_NODES, *MANY, *SMALL, *SAVED_OFTEN, cwd=tmp_path)
    wait_for_step(run_dir, 5)
    node = slurm.facts(job)["BatchHost"]
    slurm.kill_node(node)
    slurm.wait_for_restart(job, 1)
    slurm.wait_for(job, "COMPLETED")
    check_ledger(slurm, run_dir, last=LAST)
    slurm.revive_node(node)


def test_two_jobs_over_the_same_two_nodes_do_not_meet(slurm: LocalSlurm, tmp_path: Path) -> None:
    on_both = ("--sbatch-arg", "--nodelist=n1,n2")
    jobs = [
        slurm.submit("--run-dir", name, *TWO_NODES, *ENDLESS, *SMALL, *on_both, cwd=tmp_path) for name in ("a", "b")
    ]
    for name in ("a", "b"):
        wait_for_step(tmp_path / name, 3)
    for job in jobs:
        slurm.cancel(job)
        wait_until(lambda job=job: not slurm.processes(job), "the end of the job")
