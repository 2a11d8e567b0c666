"""The programs of README and of the queue's page run as they stand there, and say nothing but what they print."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120


def programs() -> list[tuple[str, str]]:
    """Return (where, text) of every Python block that imports what it needs."""
    found = []
    for page in ("README.md", "docs/transferqueue.md"):
        blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
        found += [(page, block) for block in blocks if "import" in block]
    return found


def run(program: str, tmp_path: Path) -> "subprocess.CompletedProcess[str]":
    path = tmp_path / "program.py"
    path.write_text(program)
    return subprocess.run(
        [sys.executable, path], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def test_pages_show_how_to_write_read_and_put_again() -> None:
    shown = "".join(program for _, program in programs())
    assert all(
        f"{call}(" in shown
        for call in ("put_rows", "stream", "fetch", "put", "ack", "lost_rows", "close_writing", "StreamingDataLoader")
    )


@pytest.mark.parametrize(("page", "program"), programs())
def test_program_of_a_page_runs_silently(tmp_path: Path, page: str, program: str) -> None:
    done = run(program, tmp_path)
    printed = re.findall(r"print\(.*\)  # (.*)", program)
    assert (done.returncode, done.stderr, done.stdout.splitlines()) == (0, "", printed), page


PUTS = """
import logging
import tq

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    with tq.start({"train": ["prompt"]}, num_units=1) as queue:
        queue.client("me").put_rows({"prompt": ["1 + 1 ="]})
"""


def test_services_say_what_the_program_s_logging_lets_through(tmp_path: Path) -> None:
    done = run(PUTS, tmp_path)
    assert done.returncode == 0
    assert "storage-0 INFO storage-0: registered with controller-0" in done.stderr
