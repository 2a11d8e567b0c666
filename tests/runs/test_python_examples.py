"""The examples of Python programs: a loop written by hand learns, a notebook runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_loop_written_by_hand_learns_the_quickstart(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "hand_written_loop.py", "40"],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    accuracy = [float(found) for found in re.findall(r"accuracy (\S+)", done.stdout)]
    assert len(accuracy) == 40, done.stderr
    assert accuracy[0] < 0.5
    assert min(accuracy[-3:]) > 0.85


def test_the_notebook_runs(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert re.search(r"step 3/\d+", printed)
