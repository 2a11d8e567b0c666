"""What ties vLLM's process to the rollout, without vLLM: processes that are spawned, and sockets."""

import multiprocessing.spawn
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest

from workers.engines.vllm.vllm_process import socket_directory, tied_children

HOLDER = """
import multiprocessing, sys, time
from workers.engines.vllm.vllm_process import tied_children

with tied_children():
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    child.start()
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_spawned_process_ends_with_its_parent_however_early_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        child = psutil.Process(int(holder.stdout.readline()))
        holder.kill()
    _, alive = psutil.wait_procs([child], timeout=60)
    for left in alive:
        left.kill()
    assert not alive


def test_other_processes_are_spawned_as_ever() -> None:
    before = multiprocessing.spawn.get_command_line(tracker_fd=1, pipe_handle=2)
    with tied_children():
        tied = multiprocessing.spawn.get_command_line(tracker_fd=1, pipe_handle=2)
    assert multiprocessing.spawn.get_command_line(tracker_fd=1, pipe_handle=2) == before
    program = before.index("-c") + 1
    assert tied[program].endswith(before[program]) and "prctl" in tied[program]
    assert tied[:program] == before[:program] and tied[program + 1 :] == before[program + 1 :]


@pytest.mark.parametrize("length", [1, 40, 60, 120])
def test_sockets_have_names_that_are_short_enough_whatever_the_directory_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    given = tmp_path / ("d" * length)
    given.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(given))
    with socket_directory() as directory, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{directory}/{uuid.uuid4()}")
    assert not Path(directory).exists()
