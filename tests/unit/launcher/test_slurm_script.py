import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.slurm.batch_job import RELAUNCH, BatchJob, script_text

GOLDEN = Path(__file__).with_name("two_nodes.sbatch")
JOB = BatchJob(
    name="smollm2",
    nodes=2,
    time_limit="24:00:00",
    signal_s=180,
    max_requeues=5,
    gather_s=70,
    workdir=Path("/home/me/work"),
    run_dir=Path("/scratch/me/runs/a"),
    launch=(
        ("/venv/bin/asyncflow-launch", "/home/me/work/recipe.yaml"),
        ("--roles", "rollout:8,actor:4"),
        ("--set", "data.prompt_template=It's {prompt}"),
    ),
    partition="gpu",
    account="project",
    gres="gpu:8",
    sbatch_args=("--qos=long", "--comment='two words'"),
    setup="module load cuda\n",
)


def test_script_is_what_a_user_should_read() -> None:
    """Look at the golden file when this fails; it is the page that users get."""
    assert script_text(JOB) == GOLDEN.read_text()


def test_small_job_shares_its_node() -> None:
    job = replace(JOB, nodes=1, cpus_per_task=4, partition="", account="", gres="", sbatch_args=(), setup="")
    text = script_text(job)
    assert "#SBATCH --cpus-per-task=4\n" in text
    # srun does not inherit it since Slurm 22.05
    assert "srun_options=(--cpu-bind=none --cpus-per-task=4)\n" in text
    for absent in ("--exclusive", "--mem", "--label", "partition", "account", "gres", "module"):
        assert absent not in text


def test_paths_with_blanks_and_percent_signs_are_kept(tmp_path: Path) -> None:
    """sbatch reads quotes and takes % for a pattern, bash reads quotes."""
    run_dir = tmp_path / "50% of it"
    run_dir.mkdir()
    text = script_text(replace(JOB, run_dir=run_dir, setup="", launch=(("echo", "$HOME", "a,b", "it's"),)))
    assert f'#SBATCH --output="{tmp_path}/50%% of it/slurm-%j.out"\n' in text
    settings = text.partition(RELAUNCH.read_text())[0]
    shown = subprocess.run(["bash", "-c", f'{settings}\n"${{launch[@]}}"'], capture_output=True, text=True, check=True)
    assert shown.stdout == f"$HOME a,b it's --run-dir {run_dir}\n"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck: apt-get install shellcheck")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(["shellcheck", "-"], input=script_text(JOB), capture_output=True, text=True, check=False)
    assert done.stdout == ""
