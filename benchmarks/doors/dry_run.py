"""The quickstart's `--dry-run`, of this tree and of the first edition, which had no plug-ins or loggers."""

import io
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
BEFORE = "f2b101105f64"
"""The commit that this tree is compared with: the last of the first edition."""
PAIRS = 9


def measure(steps: int) -> dict[str, float]:
    """Return the figures of this part; `steps` is for the other parts."""
    with tempfile.TemporaryDirectory() as temporary:
        archive = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, capture_output=True, check=False)
        if archive.returncode:
            raise SystemExit(
                f"dry_run needs commit {BEFORE}: {archive.stderr.decode().strip()}; use a clone with history"
            )
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(temporary, filter="data")
        trees = (ROOT, Path(temporary))
        for tree in trees:
            _dry_run_s(tree)
        both = [[_dry_run_s(tree) for tree in trees] for _ in range(PAIRS)]  # by turns: what else runs slows both
    now, before = (statistics.median(each) for each in zip(*both, strict=True))
    return {"dry_run_s": now, "dry_run_before_s": before, "dry_run_ratio": now / before}


def _dry_run_s(tree: Path) -> float:
    """Return how long the command takes with the packages of a tree (s), which are compiled the first time."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["asyncflow-launch"].partition(":")
    program = f"from {module} import {function}; {function}()"
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-P", "-c", program, "quickstart", "--dry-run"],
        cwd=tree, env=os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": ""},
        stdout=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    return time.monotonic() - began
