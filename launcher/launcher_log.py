"""The launcher's own log, so that the terminal stays the user's."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)


def launcher_log(run_dir: Path, node: int = 0) -> Path:
    """Return where the launcher of a node writes its log: `logs/launcher.log`, or `logs/launcher-K.log` on node K."""
    return run_dir / "logs" / (f"launcher-{node}.log" if node else "launcher.log")


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Send the launcher's log, Python warnings and errors of its threads to one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
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
    """Have torch's loggers, which write to stderr themselves, write to the launcher's log."""
    for name in ("torch", "torch.distributed"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    # It warns of every agent outside the main thread, where it cannot take over the signals: as it should be.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.ERROR)
