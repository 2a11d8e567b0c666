"""The fork server and multiprocessing's tracker outlive what a scheduler sends to every process of a job."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys
from multiprocessing import get_context, resource_tracker
from pathlib import Path

from asyncflow.process import STOP_SIGNALS
from launcher.process import fork_server

for number in STOP_SIGNALS:  # as the launcher does, which obeys them
    signal.signal(number, lambda *_: None)
server = fork_server.start(Path(sys.argv[1]))
tracker = resource_tracker._resource_tracker._pid
for pid in (server, tracker):
    for number in STOP_SIGNALS:
        os.kill(pid, number)
with fork_server.hidden_main():
    child = get_context("forkserver").Process(target=os.kill, args=(tracker, 0))
    child.start()
    child.join()
print(child.exitcode, fork_server.is_running(), sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
fork_server.stop()
"""


@pytest.mark.gate
def test_signals_at_once_after_the_start_end_neither(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "log"], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("0 True []\n", "", 0)
