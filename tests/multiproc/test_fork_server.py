"""The fork server and multiprocessing's tracker outlive what a scheduler sends to every process of a job."""

import os
import subprocess
import sys
from pathlib import Path

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


def test_signals_at_once_after_the_start_end_neither(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "log"], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("0 True []\n", "", 0)


PRELOADING = """
import sys
from multiprocessing import get_context
from pathlib import Path

from launcher.process import fork_server

fork_server.start(Path(sys.argv[1]))
with fork_server.hidden_main():
    child = get_context("forkserver").Process(target=sys.exit)
    child.start()
    child.join()
print(child.exitcode)
fork_server.stop()
"""


def preload(tmp_path: Path, **modules: str) -> "subprocess.CompletedProcess[str]":
    """Start a fork server beside modules of these texts, and fork from it."""
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-c", PRELOADING, tmp_path / "log"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_vllm_is_imported_by_no_role_but_its_own(tmp_path: Path) -> None:
    done = preload(tmp_path, vllm="")
    assert done.stdout == "0\n", done.stderr


def test_a_library_that_starts_a_thread_when_it_is_imported_is_told(tmp_path: Path) -> None:
    starts = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    done = preload(tmp_path, jinja2=starts)
    assert done.returncode != 0
    assert "cannot be forked from: 2 threads" in (tmp_path / "log").read_text()
