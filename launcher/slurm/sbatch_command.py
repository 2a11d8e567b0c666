"""`asyncflow sbatch`: prints the batch script of a run, or submits it. Most imports happen when the command runs."""

import shutil
import subprocess
from pathlib import Path

import click

from asyncflow.errors import ConfigError
from launcher.request.exits import OneLineCommand, errors_as_exits

SCRIPT_FILE = "run.sbatch"
"""Name in the run directory of the script that was submitted."""


@click.command("sbatch", cls=OneLineCommand)
@click.argument("config", required=False)
@click.option("--roles", metavar="R:N,...", help="Ranks per role over all nodes, e.g. rollout:8,actor:4,ref:2.")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Nodes; one launcher runs on each.")
@click.option("--time", "time_limit", required=True, metavar="T", help="Time limit of one start, e.g. 24:00:00.")
@click.option("--partition", default="", metavar="P", help="Partition of the cluster.")
@click.option("--account", default="", metavar="A", help="Account to charge.")
@click.option("--gres", default="", metavar="G", help="Devices of each node, e.g. gpu:8 or npu:8.")
@click.option(
    "--device",
    default="",
    metavar="KIND",
    help="The nodes' devices: cuda, npu, cpu.  [default: as in CONFIG, or --gres]",
)
@click.option(
    "--cpus-per-task", type=click.IntRange(1), metavar="N", help="Cores of each node.  [default: whole nodes]"
)
@click.option("--set", "overrides", metavar="A.B=VALUE", multiple=True, help="Override one value (YAML). Repeatable.")
@click.option("--steps", type=int, metavar="N", help="Number of the last step.")
@click.option("--run-dir", metavar="DIR", help="Run directory, seen by all nodes.  [default: runs/NAME-TIMESTAMP]")
@click.option("--resume", metavar="latest|DIR", help="Continue a run; also with other --roles and --nodes.")
@click.option(
    "--max-requeues", type=click.IntRange(0), default=20, show_default=True, help="Restarts until the job gives up."
)
@click.option(
    "--signal-s",
    type=click.IntRange(1, 65535),
    default=120,
    show_default=True,
    help="Stop and save so long before the time limit (s).",
)
@click.option("--setup", metavar="FILE", help="Bash lines to run first: module load, conda activate, set_env.sh.")
@click.option("--container-image", default="", metavar="IMAGE", help="Run the launchers in a container (pyxis).")
@click.option(
    "--container-mounts", default="", metavar="SRC:DST,...", help="What it sees of the node, e.g. /home:/home (pyxis)."
)
@click.option(
    "--sbatch-arg", "sbatch_args", metavar="ARG", multiple=True, help="A further option of sbatch. Repeatable."
)
@click.option("--submit", is_flag=True, help="Submit the script instead of printing it.")
def sbatch_command(
    config: str | None,
    *,
    roles: str | None,
    nodes: int,
    time_limit: str,
    partition: str,
    account: str,
    gres: str,
    device: str,
    cpus_per_task: int | None,
    overrides: tuple[str, ...],
    steps: int | None,
    run_dir: str | None,
    resume: str | None,
    max_requeues: int,
    signal_s: int,
    setup: str | None,
    container_image: str,
    container_mounts: str,
    sbatch_args: tuple[str, ...],
    submit: bool,
) -> None:
    """Print (or submit) a Slurm script that runs CONFIG.

    Use it on a Slurm cluster. The job survives time limits and preemptions, and ends when the run is done. CONFIG is
    checked here as at a start, for the devices of the nodes. The run directory is created, since Slurm's log goes
    there.
    """
    with errors_as_exits():
        from launcher.request.request import Request
        from launcher.slurm.batch_job import BatchRequest, script_text

        job = BatchRequest(
            Request(config=config, roles=roles, overrides=overrides, run_dir=run_dir, resume=resume, steps=steps),
            nodes=nodes,
            time_limit=time_limit,
            partition=partition,
            account=account,
            gres=gres,
            device=device,
            cpus_per_task=cpus_per_task or 0,
            signal_s=signal_s,
            max_requeues=max_requeues,
            sbatch_args=sbatch_args,
            container_image=container_image,
            container_mounts=container_mounts,
            setup=setup,
        ).accept_job()
        script = script_text(job)
        for note in job.notes:
            click.echo(f"note: {note}", err=True)
        if submit:
            number = submit_script(script, job.run_dir)
            click.echo(f"submitted job {number}; its log: {job.run_dir / f'slurm-{number}.out'}")
            return
        click.echo(script, nl=False)
        if make_run_dir(job.run_dir):
            click.echo(f"made {job.run_dir}, where Slurm will write its log", err=True)


def make_run_dir(run_dir: Path) -> bool:
    """Create the run directory, where Slurm's log goes; return whether it was missing.

    Raises:
        ConfigError: the file system refuses.
    """
    if run_dir.is_dir():
        return False
    try:
        run_dir.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"run directory: {run_dir} cannot be made: {error.strerror}; choose another") from error
    return True


def submit_script(script: str, run_dir: Path) -> str:
    """Write the script into the run directory, which is created if missing, and submit it. Return the job's id.

    Raises:
        ConfigError: sbatch is missing here, or refused the script; then the message quotes it.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "--submit: there is no sbatch on this machine; leave --submit out, and submit the script where one is"
        )
    make_run_dir(run_dir)
    file = run_dir / SCRIPT_FILE
    file.write_text(script)
    answer = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        said = answer.stderr.strip().removeprefix("sbatch: error: ") or f"exit code {answer.returncode}"
        raise ConfigError(f"--submit: sbatch refused {file}: {said}; correct the options, or edit and submit the file")
    return answer.stdout.strip().partition(";")[0]
