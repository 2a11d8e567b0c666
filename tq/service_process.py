"""Entry of one service process of a queue that runs alone.

    python -m tq.service_process ADDRESS_FILE SERVICE LOG_LEVEL

`tq.local.LocalQueue` starts it, and again when it died. The process ends with its parent.
"""

import faulthandler
import logging
import signal
import sys
import threading
from pathlib import Path

from asyncflow.errors import AsyncFlowError
from asyncflow.lifeline import die_with_parent
from tq.address import QueueAddress
from tq.control.controller import ControllerService
from tq.process_settings import serve_only
from tq.unit.storage import StorageUnit

logger = logging.getLogger(__name__)


def serve(address_file: Path, service: str, stop: threading.Event) -> None:
    """Run a controller or a storage unit until `stop` is set.

    Raises:
        AsyncFlowError: the queue's store or backend does not answer, the address file is gone, or a thread died.
    """
    address = QueueAddress.load(address_file)
    controllers = address.config.controllers
    credentials = address.credentials()
    if service not in controllers:
        unit = StorageUnit(credentials, service, address.config, controllers=controllers)
        unit.threads.wait(stop)
        unit.close()
        return
    controller = ControllerService(credentials, service, tasks=address.specs(), config=address.config)
    controller.threads.wait(stop)
    controller.close()


def main() -> int:
    """Obey SIGTERM and SIGINT."""
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
