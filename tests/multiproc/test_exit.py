"""After every `close`, no thread is left inside Gloo, and the interpreter ends without an abort."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("queue_in_one_process.py")


@pytest.mark.parametrize("way", ["clean", pytest.param("cut", marks=pytest.mark.gate)])
def test_process_that_closed_everything_has_no_threads_left_and_exits_with_0(way: str) -> None:
    done = subprocess.run([sys.executable, SCRIPT, way], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "terminate called" not in done.stderr
    assert done.stdout.split("left:")[1].split() == []
