"""Checks that misbehave, for the tests of the runner; the checking process imports them by name."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from launcher.doctor.findings import Facts, MachineCheck, Needs, Rule, error, warning

PLACE = "ASYNCFLOW_TEST_PLACE"
"""Environment variable: a directory where checks leave word of what they do."""


def place() -> Path:
    return Path(os.environ[PLACE])


def see(needs: Needs) -> Facts:
    return {"pid": os.getpid()}


def hang(needs: Needs) -> NoReturn:
    """Starts a process, makes a directory, then waits for ever."""
    helper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    (place() / "pids").write_text(f"{os.getpid()} {helper.pid}")
    with tempfile.TemporaryDirectory(dir=place()):
        (place() / "hanging").touch()
        while True:
            threading.Event().wait()


def stubborn(needs: Needs) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hang(needs)


def crash(needs: Needs) -> Facts:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def leave(needs: Needs) -> NoReturn:
    os._exit(7)


def fail(needs: Needs) -> NoReturn:
    raise ValueError("an odd machine\nindeed")


def lack(needs: Needs) -> NoReturn:
    raise ModuleNotFoundError("No module named 'left_pad'", name="left_pad")


def chatter(needs: Needs) -> Facts:
    os.write(1, b"a library prints\n")
    os.write(2, b"and warns\n")
    return {"printed": True}


_LONG_S, _SHORT_S = 60.0, 10.0


def _check(name: str, look: Callable[[Needs], Facts], if_hanging: str = "-", *rules: Rule) -> MachineCheck:
    return MachineCheck(name, look, rules, "seen by {pid}, for {num_nodes} nodes", _LONG_S, if_hanging)


FINE = _check("fine", see)
ALSO_FINE = _check("also fine", see)
HANG = MachineCheck("hang", hang, (), "-", _SHORT_S, "unplug it")
STUBBORN = MachineCheck("stubborn", stubborn, (), "-", _SHORT_S, "unplug it")
CRASH = _check("crash", crash, "another driver")
LEAVE = _check("leave", leave, "another library")
FAIL = _check("fail", fail)
LACK = _check("lack", lack)
CHATTER = _check("chatter", chatter, "-", warning("printed", "one", "do this"), error("printed", "two", "do that"))
CHECKS = (FINE, ALSO_FINE, HANG, STUBBORN, CRASH, LEAVE, FAIL, LACK, CHATTER)
