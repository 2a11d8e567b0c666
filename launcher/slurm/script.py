"""The batch script of a run: what `asyncflow sbatch` prints. Pure.

    BatchJob --script_text--> #SBATCH lines, settings of this run, `relaunch.sh`

`relaunch.sh` is the part that all batch scripts share, the templates in `configs/slurm` too: it launches, passes
Slurm's signals on, and puts the job back into the queue.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

RELAUNCH = Path(__file__).with_name("relaunch.sh")
EARLY_TRAP = """\
# A signal that comes early would end bash; it is kept until there is something to stop.
stopping=
trap 'stopping=yes' USR1 TERM
"""
"""The first lines after Slurm's options; `relaunch.sh` needs them."""
_PLAIN = re.compile(r"[\w./:@%+=,-]+", re.ASCII)


@dataclass(frozen=True)
class BatchJob:
    """What a batch script asks of Slurm and starts on every node.

    Attributes:
        name: of the job in Slurm's lists.
        nodes: how many; each gets one launcher.
        time_limit: as sbatch takes it, e.g. `24:00:00`.
        signal_s: how long before the time limit the run is stopped (s).
        max_requeues: how often the script puts its job back into the queue.
        gather_s: how long the other launchers may take after the first one has gone (s).
        workdir: absolute; relative paths in `launch` start here.
        run_dir: absolute; the same for all restarts, and where Slurm's log goes.
        launch: the launcher's command without `--run-dir`, in lines as the script shows them.
        partition, account, gres: "" leaves the choice to the cluster.
        cpus_per_task: cores of each launcher and its workers; 0: nodes as a whole, with all their cores and memory.
        sbatch_args: further options of sbatch; they win over those above.
        setup: bash lines to run before the launch, e.g. `module load ...`.
    """

    name: str
    nodes: int
    time_limit: str
    signal_s: int
    max_requeues: int
    gather_s: int
    workdir: Path
    run_dir: Path
    launch: tuple[tuple[str, ...], ...]
    partition: str = ""
    account: str = ""
    gres: str = ""
    cpus_per_task: int = 0
    sbatch_args: tuple[str, ...] = ()
    setup: str = ""


def script_text(job: BatchJob) -> str:
    """Return the script, with a final newline."""
    parts = (_title(job), _resources(job), _restarts(job), _setup(job), _settings(job), RELAUNCH.read_text())
    return "\n".join(parts)


def _title(job: BatchJob) -> str:
    nodes = f"{job.nodes} nodes, one launcher on each" if job.nodes > 1 else "1 node"
    return f"""\
#!/bin/bash
# AsyncFlow run {job.name!r} on {nodes}. Written by `asyncflow sbatch`; change it as you like.
#
#   sbatch SCRIPT                    starts it; stopped ahead of its time limit or preempted, it goes on later by itself
#   sbatch SCRIPT --resume latest    goes on with it after it gave up, failed or was cancelled
#   scancel JOB                      ends it for good
"""


def _resources(job: BatchJob) -> str:
    lines = [_sbatch("job-name", job.name)]
    lines += [_sbatch(key, value) for key, value in (("partition", job.partition), ("account", job.account)) if value]
    lines += [_sbatch("nodes", job.nodes), _sbatch("ntasks-per-node", 1)]
    if job.cpus_per_task:
        lines.append(_sbatch("cpus-per-task", job.cpus_per_task))
    else:
        lines += [
            "# Whole nodes: without this the launcher and all its workers would share one core.",
            "#SBATCH --exclusive",
        ]
        lines.append(_sbatch("mem", 0))
    if job.gres:
        lines.append(_sbatch("gres", job.gres))
    lines.append(_sbatch("time", job.time_limit))
    return "\n".join((*lines, ""))


def _restarts(job: BatchJob) -> str:
    """Return the options that make the job stop in time and start again in its own directory and log."""
    output = str(job.run_dir).replace("%", "%%") + "/slurm-%j.out"
    lines = [
        f"# {job.signal_s} s before the time limit Slurm sends USR1, to this script alone (B:), which does the rest.",
        _sbatch("signal", f"B:USR1@{job.signal_s}"),
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        _sbatch("output", output),
        _sbatch("chdir", str(job.workdir)),
        *(f"#SBATCH {argument}" for argument in job.sbatch_args),
    ]
    return "\n".join((*lines, ""))


def _setup(job: BatchJob) -> str:
    lines = [
        EARLY_TRAP,
        "# Every channel between two processes takes file descriptors: as many as the site allows.",
        'ulimit -n "$(ulimit -Hn)"',
    ]
    if job.setup:
        lines += ["", job.setup.strip("\n")]
    return "\n".join((*lines, ""))


def _settings(job: BatchJob) -> str:
    srun_options = ["--cpu-bind=none"]
    if job.cpus_per_task:
        srun_options.append(f"--cpus-per-task={job.cpus_per_task}")
    if job.nodes > 1:
        srun_options.append("--label")
    lines = [
        f"run_dir={_word(str(job.run_dir))}",
        f"max_requeues={job.max_requeues}",
        f"gather_s={job.gather_s}",
        f"srun_options=({' '.join(srun_options)})",
        "launch=(",
        *(f"    {' '.join(_word(word) for word in words)}" for words in job.launch),
        '    --run-dir "$run_dir"',
        ")",
    ]
    return "\n".join((*lines, ""))


def _sbatch(option: str, value: str | int) -> str:
    text = str(value)
    return f"#SBATCH --{option}={text}" if _PLAIN.fullmatch(text) else f'#SBATCH --{option}="{text}"'


def _word(text: str) -> str:
    """Quote for bash; also commas, which in an array look like a mistake."""
    if _PLAIN.fullmatch(text):
        return f"'{text}'" if "," in text else text
    return shlex.quote(text)
