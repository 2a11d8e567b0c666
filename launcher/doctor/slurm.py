"""Inside a Slurm job: are the tools there by which a run that is preempted puts itself back into the queue."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.doctor.finding import Finding, reason
from launcher.doctor.needs import Needs

CHECK = "slurm"
_ANSWER_S = 8.0
_TOOLS = ("sbatch", "srun", "scontrol")


@dataclass(frozen=True)
class SlurmFacts:
    """What is there.

    Attributes:
        job: its number; empty: this is no job.
        tools: those of `_TOOLS` that are on PATH.
        job_text: what `scontrol show job` says; empty: it was not asked.
        error: why it said nothing.
    """

    job: str
    tools: tuple[str, ...]
    job_text: str = ""
    error: str = ""


def nodes_of_job(env: Mapping[str, str] = os.environ) -> int:
    """Return the number of nodes of the Slurm job that this is part of; 1 outside of one."""
    text = env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES") or "1"
    return max(1, int(text)) if text.isdigit() else 1


def check(needs: Needs) -> list[Finding]:
    """Look and judge."""
    return judge(gather(), needs)


def gather(env: Mapping[str, str] = os.environ) -> SlurmFacts:
    """Look for the tools; inside a job ask for it."""
    job = env.get("SLURM_JOB_ID", "")
    paths = {name: path for name in _TOOLS if (path := shutil.which(name, path=env.get("PATH")))}
    tools = tuple(paths)
    if not job or "scontrol" not in paths:
        return SlurmFacts(job, tools)
    command = [paths["scontrol"], "show", "job", "--oneliner", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return SlurmFacts(job, tools, error=reason(error))
    return SlurmFacts(job, tools, done.stdout.strip(), "" if done.returncode == 0 else done.stderr.strip())


def judge(facts: SlurmFacts, needs: Needs) -> list[Finding]:
    """Say what would keep the job from being requeued."""
    if not facts.job:
        there = f"not inside a job, {' '.join(facts.tools)} are there" if facts.tools else "not inside a job"
        return [Finding.ok(CHECK, there)]
    job = f"job {facts.job}"
    if "scontrol" not in facts.tools:
        text = f"{job}: scontrol is not on PATH, so a run that is preempted cannot requeue itself"
        return [
            Finding.warning(
                CHECK, text, "add Slurm's bin directory to PATH; in a container, mount it and its munge socket"
            )
        ]
    if facts.error or not facts.job_text:
        text = f"{job}: scontrol says nothing of it ({' '.join(facts.error.split()) or 'no such job'})"
        return [Finding.warning(CHECK, text, f"scontrol show job {facts.job}; does munge run on this node?")]
    if "Requeue=0" in facts.job_text.split():
        text = f"{job} was submitted without --requeue, so Slurm does not start it again when a node fails"
        return [
            Finding.warning(CHECK, text, f"scontrol update JobId={facts.job} Requeue=1; next time #SBATCH --requeue")
        ]
    return [Finding.ok(CHECK, f"{job} can be requeued")]
