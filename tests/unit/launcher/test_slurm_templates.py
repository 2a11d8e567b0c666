"""The batch scripts in `configs/slurm` that sites edit: they share what the generator writes, and are shipped."""

import shutil
import subprocess
from pathlib import Path

import pytest

import configs
from launcher.slurm.batch_job import EARLY_TRAP, RELAUNCH, BatchJob, script_text

TEMPLATES = sorted((Path(next(iter(configs.__path__))) / "slurm").glob("*.sbatch"))
SETTINGS = ("run_dir=", "max_requeues=", "gather_s=", "srun_options=(", "launch=(")


def directives(script: str) -> list[str]:
    """Return the names of the options in #SBATCH lines."""
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH ")]
    return [line.partition("=")[0] for line in lines]


def test_there_is_one_for_each_vendor() -> None:
    assert [path.name for path in TEMPLATES] == ["ascend.sbatch", "cuda.sbatch"]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_template_ends_as_every_batch_script_and_sets_what_that_part_needs(path: Path) -> None:
    own, shared = path.read_text().split("# --- From here on", 1)
    assert RELAUNCH.read_text() == "# --- From here on" + shared
    assert own.index(EARLY_TRAP) < own.index("# --- This site")
    for setting in SETTINGS:
        assert sum(line.startswith(setting) for line in own.splitlines()) == 1


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_template_asks_slurm_for_what_the_generator_asks(path: Path) -> None:
    job = BatchJob(
        name="run", nodes=2, time_limit="24:00:00", signal_s=120, max_requeues=20, gather_s=70, workdir=Path("/w"),
        run_dir=Path("/r"), launch=(("asyncflow-launch",),), partition="p", account="a", gres="gpu:8",
    )  # fmt: skip
    here = set(directives(script_text(job))) - {"chdir"}  # its paths are absolute
    assert set(directives(path.read_text())) == here
    assert "#SBATCH --signal=B:USR1@120\n" in path.read_text()


@pytest.mark.parametrize("path", [*TEMPLATES, RELAUNCH], ids=lambda path: path.stem)
def test_bash_can_read_it(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck: apt-get install shellcheck")
@pytest.mark.parametrize(
    "path", [*TEMPLATES, Path(__file__).parents[3] / "examples/local_slurm.sh"], ids=lambda path: path.stem
)
def test_shellcheck_finds_nothing(path: Path) -> None:
    """SC1090, SC1091: files that are sourced are the site's; SC2013: pid files hold one word."""
    done = subprocess.run(
        ["shellcheck", "--exclude=SC1090,SC1091,SC2013", path], capture_output=True, text=True, check=False
    )
    assert done.stdout == ""
