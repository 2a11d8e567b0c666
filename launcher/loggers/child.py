"""The process of one logger: `python -m launcher.loggers.child NAME RUN_DIR LAUNCHER_PID`, a socket as stdin.

The launcher's end of the socket closes when the run has ended: then the logger gets what is left. When the logger fails
this process says why in one line, to the socket, and ends. `launcher.loggers.processes` starts it.
"""

import logging
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

from asyncflow.errors import one_line
from asyncflow.process import STOP_SIGNALS, die_with_parent
from launcher.loggers.backends import make_logger
from launcher.loggers.base import LoggedRun
from launcher.loggers.feed import Feed, Progress
from workers.config import RunConfig

POLL_S = 2.0

logger = logging.getLogger(__name__)


def main() -> None:
    """Run until the launcher closes its end."""
    name, run_dir, launcher_pid = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    die_with_parent(launcher_pid)
    for number in STOP_SIGNALS:  # the run is stopped by the launcher, and only then its loggers
        signal.signal(number, signal.SIG_IGN)
    launcher = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a library may ask for a password
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        _feed(name, run_dir, launcher)
    except Exception as error:  # the boundary of a process: libraries, and users' classes, raise anything
        logger.exception("the logger failed")
        launcher.sendall(one_line(error).encode())
        sys.exit(1)


def _feed(name: str, run_dir: Path, launcher: socket.socket) -> None:
    config = RunConfig.load(run_dir)
    own = next(each for each in config.loggers if each.name == name)
    progress = Progress.load(run_dir, name)
    run = LoggedRun(run_dir, run_dir.name, config.name, config.model_dump(mode="json"), progress.id)
    made = make_logger(own, run)
    progress.id = made.id
    progress.save(run_dir, name)
    feed = Feed(run_dir, name, made, progress)
    while not select.select([launcher], [], [], POLL_S)[0]:
        feed.read(time.monotonic())
    feed.read(time.monotonic(), last=True)
    made.close()


if __name__ == "__main__":
    main()
