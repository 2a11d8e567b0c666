"""Hands a batch script to Slurm. Called by `asyncflow sbatch --submit`."""

import shutil
import subprocess
from pathlib import Path

from asyncflow.errors import ConfigError

SCRIPT_FILE = "run.sbatch"
"""In the run directory: what was submitted."""


def make_run_dir(run_dir: Path) -> bool:
    """Make the directory, whose place for Slurm's log must exist when the job starts; return whether it was missing.

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


def submit(script: str, run_dir: Path) -> str:
    """Write the script into the run directory, which is made, and submit it; return the job's id.

    Raises:
        ConfigError: there is no sbatch here, or it refused; its own words.
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
