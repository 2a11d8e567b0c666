"""The launcher's own process: its log, which keeps the terminal for the user, and the signals that ask it to stop."""

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import FrameType

from asyncflow.log_format import LogFormat, log_formatter
from asyncflow.process import PAUSE_SIGNAL, RESUME_SIGNAL, SAVE_SIGNAL, STOP_SIGNALS
from asyncflow.run_files import LOGS

SAME_PRESS_S = 0.5
"""Wrappers such as `timeout` deliver one Ctrl-C twice; a second one counts only after this long (s)."""

logger = logging.getLogger(__name__)


def launcher_log(run_dir: Path, node: int = 0) -> Path:
    """Return the log of a node's launcher: `logs/launcher.log`, or `logs/launcher-K.log` on node K."""
    return run_dir / LOGS / (f"launcher-{node}.log" if node else "launcher.log")


@contextlib.contextmanager
def logging_to(path: Path, form: LogFormat = "text", node: int = 0) -> Iterator[None]:
    """Send the launcher's log, and errors of its threads, to one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(log_formatter(form, role="launcher", gang="launcher", rank=node))
    root = logging.getLogger()
    level, hook = root.level, threading.excepthook
    root.addHandler(handler)
    root.setLevel(logging.INFO)

    def log_thread_error(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else "?"
        error = args.exc_value
        logger.error("thread %s died", name, exc_info=error if error is not None else True)

    threading.excepthook = log_thread_error
    try:
        yield
    finally:
        threading.excepthook = hook
        root.setLevel(level)
        root.removeHandler(handler)
        handler.close()


def keep_torch_off_the_terminal() -> None:
    """Redirect torch's loggers, which write to stderr themselves, to the launcher's log."""
    for name in ("torch", "torch.distributed"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    # It warns about every agent outside the main thread, where it cannot install signal handlers: that is intended.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.ERROR)


class UserRequest(Enum):
    """What a user may ask of a run that goes on; the values are signals."""

    SAVE = SAVE_SIGNAL
    PAUSE = PAUSE_SIGNAL
    RESUME = RESUME_SIGNAL


@contextlib.contextmanager
def user_requests(handle: Callable[[UserRequest], None]) -> Iterator[None]:
    """Call `handle` for each `UserRequest`, inside a signal handler. Outside the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {one: signal.signal(one.value, lambda number, _: handle(UserRequest(number))) for one in UserRequest}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one.value, handler)


@contextlib.contextmanager
def stop_signals(request: Callable[[int], None]) -> Iterator[None]:
    """Call `request(count)` for SIGINT, SIGTERM, SIGUSR1 and SIGHUP; only a repeated Ctrl-C counts beyond the first.

    `request` runs inside a signal handler, so it must be safe there. Outside the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    count = 0
    last_at = 0.0

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal count, last_at
        now = time.monotonic()
        if count == 0 or (number == signal.SIGINT and now - last_at > SAME_PRESS_S):
            count += 1
            last_at = now
            request(count)

    # SIGHUP comes when the terminal closes; under `nohup` it must stay ignored.
    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [number for number in STOP_SIGNALS if not (under_nohup and number is signal.SIGHUP)]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
