"""Entry of one service process of a stand-alone queue.

    python -m tq.service_process ADDRESS_FILE SERVICE LOG_LEVEL

`tq.local.LocalQueue` starts it, and starts it again when it dies. The process ends with its parent.
"""

import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import torch

from asyncflow.errors import AsyncFlowError
from asyncflow.process import die_with_parent
from tq.control.controller import ControllerService
from tq.directory import QueueAddress
from tq.unit.storage import StorageUnit

logger = logging.getLogger(__name__)


def serve(address_file: Path, service: str, stop: threading.Event) -> None:
    """Run a controller or a storage unit until `stop` is set.

    Raises:
        AsyncFlowError: the queue's store or backend does not answer, the address file is gone, or a thread died.
    """
    address = QueueAddress.load(address_file)
    controllers = address.config.controllers
    credentials = address.connect_store()
    if service not in controllers:
        unit = StorageUnit(credentials, service, address.config, controllers=controllers)
        unit.threads.wait(stop)
        unit.close()
        return
    controller = ControllerService(credentials, service, tasks=address.list_specs(), config=address.config)
    controller.threads.wait(stop)
    controller.close()


def main() -> int:
    """Run until SIGTERM or SIGINT."""
    die_with_parent()
    faulthandler.enable()  # a crash in C++ leaves every thread's stack in the log
    serve_only()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    logging.basicConfig(level=int(sys.argv[3]), format=f"%(asctime)s {sys.argv[2]} %(levelname)s %(message)s")
    try:
        serve(Path(sys.argv[1]), sys.argv[2], stop)
    except AsyncFlowError as error:
        logger.error("%s", error)
        return 1
    except Exception:  # the process ends with `os._exit`, which reports nothing
        logger.exception("ended")
        return 1
    return 0


_ALLOCATIONS = 50_000
_ROUNDS = 20


def serve_only() -> None:
    """Tune the process for short answers."""
    # Copies of a message are short, and OpenMP's threads would spin on the clients' cores.
    torch.set_num_threads(1)
    # Rows are many small, long-lived objects without cycles. A collector that scans them every few puts takes a sixth
    # of a unit's time, so it runs rarely, and never scans what was imported.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS, _ROUNDS, _ROUNDS)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # threads that wait in C++ would otherwise end the process with an abort
