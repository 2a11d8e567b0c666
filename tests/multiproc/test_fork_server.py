"""The fork server outlives what a scheduler sends to every process of a job, and forks only where that is safe."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, signal, sys
from pathlib import Path

from asyncflow.process import STOP_SIGNALS
from launcher.process.fork_server import ForkServer

for number in STOP_SIGNALS:  # as the launcher does, which obeys them
    signal.signal(number, lambda *_: None)
server = ForkServer(sys.executable, Path(sys.argv[1]))
for number in STOP_SIGNALS:
    os.kill(server.pid, number)
child = server.start_worker(["os:getpid"], {"ASYNCFLOW_LOG": sys.argv[1]})
child.join(60)
print(child.exitcode, child.finished, server.is_running(), sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
server.stop()
"""


def test_signals_at_once_after_the_start_do_not_end_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "log"], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("0 True True []\n", "", 0)


PRELOADING = """
import sys
from pathlib import Path

from launcher.process.fork_server import ForkServer

server = ForkServer(sys.executable, Path(sys.argv[1]), print)
child = server.start_worker(["preloaded_here:tell"], {"ASYNCFLOW_LOG": sys.argv[1] + ".worker"})
child.join(60)
print(child.exitcode, child.finished)
server.stop()
"""
TELL = """
import os, sys
from pathlib import Path

def tell():
    opened = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if os.path.lexists(each)]
    left = any(each.endswith(".py") for each in opened)
    words = ("vllm" in sys.modules, "tq" in sys.modules, left, os.environ["ASYNCFLOW_LOG"])
    Path(__file__).with_name("told").write_text(" ".join(map(str, words)))
"""


def preload(tmp_path: Path, **modules: str) -> "subprocess.CompletedProcess[str]":
    """Start a fork server beside modules of these texts, and a worker of it."""
    for name, text in {"preloaded_here": TELL, **modules}.items():
        (tmp_path / f"{name}.py").write_text(text)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-c", PRELOADING, tmp_path / "log"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_vllm_is_imported_by_no_role_but_its_own(tmp_path: Path) -> None:
    done = preload(tmp_path, vllm="")
    assert done.stdout == "0 True\n", done.stderr
    assert (tmp_path / "told").read_text() == f"False True False {tmp_path / 'log'}.worker"


def test_workers_are_spawned_where_a_library_starts_a_thread_when_it_is_imported(tmp_path: Path) -> None:
    starts = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    starts += "import os\nos.set_inheritable(os.open(__file__, os.O_RDONLY), True)\n"  # as C libraries leave theirs
    done = preload(tmp_path, jinja2=starts)
    said, ended = done.stdout.splitlines()
    assert said.startswith(
        f"workers of {sys.executable} are spawned, not forked, because of 2 threads (Thread-1 (wait));"
    )
    assert ended == "0 True"
    assert (tmp_path / "told").read_text() == f"False False False {tmp_path / 'log'}.worker"


def test_an_extra_that_is_not_installed_leaves_no_stack_in_the_log(tmp_path: Path) -> None:
    missing = "raise ModuleNotFoundError('no', name='gymnasium')"
    done = preload(tmp_path, gymnasium=missing, reasoning_gym=missing)
    assert done.stdout == "0 True\n", done.stderr
    written = done.stderr + (tmp_path / "log").read_text()
    assert "Traceback" not in written, written
