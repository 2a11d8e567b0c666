"""Whether a process gets on with loading and compiling, seen from outside."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from asyncflow.process import ProcessWork

DEADLINE_S = 20.0


def becomes_true(look: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while not (seen := look()) and time.monotonic() < deadline:
        os.sched_yield()
    return seen


def test_bytes_of_a_process_and_of_its_descendants_are_progress(tmp_path: Path) -> None:
    work = ProcessWork(os.getpid())
    assert not work.advanced()
    (tmp_path / "weights").write_bytes(bytes(2**20))
    assert work.advanced()
    assert not work.advanced()
    # A child's child reads, and both stay.
    script = f"(read go; cat {tmp_path}/weights > /dev/null; read never); read never"
    child = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE)
    try:
        assert child.stdin is not None
        becomes_true(lambda: not work.advanced())
        child.stdin.write(b"go\n")
        child.stdin.flush()
        assert becomes_true(work.advanced)
    finally:
        child.kill()
        child.communicate()


def test_compiler_that_ended_is_progress_and_spinning_is_none() -> None:
    work = ProcessWork(os.getpid())
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    assert not work.advanced(), "its own processor time may be spent on waiting"
    subprocess.run(["sh", "-c", "i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done"], check=True)
    assert work.advanced()
