"""The first code of a worker, in a process of its own."""

import subprocess
import sys
from pathlib import Path


def redirected(log: Path) -> "subprocess.CompletedProcess[str]":
    """Redirect as a worker does, then print to both streams."""
    code = (
        "import sys; from launcher.process.worker_entry import _redirect; _redirect(sys.argv[1]); "
        "print('out'); print('err', file=sys.stderr)"
    )
    return subprocess.run([sys.executable, "-c", code, log], capture_output=True, text=True, check=True)


def test_both_streams_are_appended_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    log.write_text("before\n")
    done = redirected(log)
    assert (done.stdout, done.stderr) == ("", "")
    assert log.read_text() == "before\nout\nerr\n"


def test_worker_whose_log_cannot_be_opened_speaks_elsewhere(tmp_path: Path) -> None:
    done = redirected(tmp_path)
    assert done.stdout == "out\n"
    first, last = done.stderr.splitlines()
    assert first.startswith(f"{tmp_path}: Is a directory; output of process ")
    assert last == "err"
