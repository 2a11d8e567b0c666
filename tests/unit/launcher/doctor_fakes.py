"""Checks that misbehave, for the tests of the runner; the checking process imports them by name."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from launcher.doctor.doctor_child import Check
from launcher.doctor.findings import Finding, Needs

PLACE = "ASYNCFLOW_TEST_PLACE"
"""Environment variable: a directory where checks leave word of what they do."""


def place() -> Path:
    return Path(os.environ[PLACE])


def fine(needs: Needs) -> list[Finding]:
    return [Finding.ok("fine", f"seen by {os.getpid()}, for {needs.num_nodes} nodes")]


def hang(needs: Needs) -> list[Finding]:
    """Starts a process, makes a directory, then waits for ever."""
    helper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    (place() / "pids").write_text(f"{os.getpid()} {helper.pid}")
    with tempfile.TemporaryDirectory(dir=place()):
        (place() / "hanging").touch()
        threading.Event().wait()
    return []


def stubborn(needs: Needs) -> list[Finding]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return hang(needs)


def crash(needs: Needs) -> list[Finding]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return []


def leave(needs: Needs) -> list[Finding]:
    os._exit(7)


def fail(needs: Needs) -> list[Finding]:
    raise ValueError("an odd machine\nindeed")


def lack(needs: Needs) -> list[Finding]:
    raise ModuleNotFoundError("No module named 'left_pad'", name="left_pad")


def chatter(needs: Needs) -> list[Finding]:
    os.write(1, b"a library prints\n")
    os.write(2, b"and warns\n")
    return [Finding.warning("chatter", "one", "do this"), Finding.error("chatter", "two", "do that")]


_LONG_S, _SHORT_S = 60.0, 10.0
FINE = Check("fine", fine, _LONG_S, "-")
ALSO_FINE = Check("also fine", fine, _LONG_S, "-")
HANG = Check("hang", hang, _SHORT_S, "unplug it")
STUBBORN = Check("stubborn", stubborn, _SHORT_S, "unplug it")
CRASH = Check("crash", crash, _LONG_S, "another driver")
LEAVE = Check("leave", leave, _LONG_S, "another library")
FAIL = Check("fail", fail, _LONG_S, "-")
LACK = Check("lack", lack, _LONG_S, "-")
CHATTER = Check("chatter", chatter, _LONG_S, "-")
CHECKS = (FINE, ALSO_FINE, HANG, STUBBORN, CRASH, LEAVE, FAIL, LACK, CHATTER)
