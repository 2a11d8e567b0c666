"""A stand-alone queue, without the rest of the system: controllers and storage units as child processes of this one.

    with tq.start({"score": ["prompt"], "train": ["prompt", "score"]}) as queue, queue.client("me") as client:
        client.put_rows({"prompt": ["1 + 1 =", "2 + 2 ="]})
        client.close_writing()  # so that the stream ends
        for lease in client.stream("score", ["prompt"]):
            lease.put({"score": [len(prompt) for prompt in lease["prompt"]]})

    other process:  client = tq.connect(queue.address, "scorer")

A service that dies is started again: a controller rebuilds itself from the units; a unit starts empty and its rows are
reported as lost. Everything ends with this process, and listens on loopback or, with `host`, where other hosts reach
it. They connect with a copy of the address file, which holds the queue's secret:

    with tq.start({"score": ["prompt"]}, host="10.0.0.1", address_file="queue.json"): ...
    other host:     client = tq.connect("queue.json", "scorer")
"""

import logging
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType

from torch.distributed import TCPStore

from asyncflow.errors import ConfigError, TransportError
from asyncflow.job import LOOPBACK, choose_interface, resolve
from asyncflow.process import ServiceThreads
from asyncflow.sealed_store import SealedStore, serve_store
from tq.backends.backend import backend_class
from tq.client.queue_client import QueueClient
from tq.config import BACKENDS, QueueConfig, TaskConfig
from tq.directory import Directory, QueueAddress
from tq.unit.row_journal import JournalMemory

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
_POLL_S = 0.05
_RESTART_DELAY_S = 0.2
_MAX_EARLY_ENDS = 3
_EARLY_S = 10.0


class LocalQueue:
    """Owns the service processes; a context manager. Its constructor starts the services and waits until they work.

    Args:
        tasks: name -> input columns, or a full `TaskConfig`; producers before consumers.
        num_units, num_controllers: processes; None: as many as `config` says.
        config: all other settings; None: the defaults.
        log_dir: where services write SERVICE.log, created if missing; None: they write to this process's stderr what
            the level of its logger `tq` lets through, only errors where logging is not set up.
        host: name or address of this host at which the queue is served; by default other hosts cannot reach it.
        address_file: where `address` is written (mode 0600) while the queue exists; None: in a temporary directory.

    Raises:
        ConfigError: invalid arguments; nothing was started.
        TransportError: the services did not start.
    """

    def __init__(
        self,
        tasks: Mapping[str, Sequence[str] | TaskConfig],
        *,
        num_units: int | None = None,
        num_controllers: int | None = None,
        config: QueueConfig | None = None,
        log_dir: Path | str | None = None,
        host: str = LOOPBACK,
        address_file: Path | str | None = None,
    ) -> None:
        numbers = {"num_storage_units": num_units, "num_controllers": num_controllers}
        update = {name: number for name, number in numbers.items() if number is not None}
        _check_counts(update)
        if config is not None and not isinstance(config, QueueConfig):
            raise ConfigError(f"queue: config is a {type(config).__name__}; make it a tq.QueueConfig(...)")
        config = (config or QueueConfig()).model_copy(update=update)
        declared = _declared(tasks, config)
        if config.backend.kind not in BACKENDS.built_in:
            backend_class(config.backend.kind)
        if log_dir is not None:
            _make_directory(Path(log_dir))
        host, server, port = _serve_store(host, config.request_timeout_s)
        self._config = config
        self._own = ExitStack()
        own = address_file or Path(self._own.enter_context(tempfile.TemporaryDirectory(prefix="tq-"))) / "queue.json"
        self.address = Path(own)
        """What another process needs to `tq.connect`; readable only by this user."""
        secret = secrets.token_bytes(32)
        self._store = SealedStore(server, secret)
        QueueAddress(host, port, secret, config, declared).save(self.address)
        choose_interface(host)
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._keepers = ServiceThreads("queue")
        self._services: dict[str, _Service] = {}
        self._clients: list[QueueClient] = []
        try:
            for name in config.controllers:
                self._start_service(name)
            for _ in range(config.num_storage_units):
                self._start_service(self._next_unit())
            self.wait_until_up(_START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def client(self, name: str) -> QueueClient:
        """Return a new client, which is closed with the queue; raises TransportError once a service has failed."""
        self._refuse_failed()
        client = connect(self.address, name, stop=self._keepers.failed)
        self._clients.append(client)
        return client

    def add_unit(self) -> str:
        """Start one more storage unit; returns its name. Clients find it with their next heartbeat."""
        name = self._next_unit()
        self._start_service(name)
        return name

    def pids(self) -> dict[str, int]:
        return {name: service.pid for name, service in self._services.items() if service.pid}

    def wait_until_up(self, timeout_s: float) -> None:
        """Wait until every controller knows every unit; raises TransportError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self._wait_until(lambda: Directory.is_published(self._store), deadline)
        client = connect(self.address, "starter", stop=self._keepers.failed)
        units = {name for name in self._services if name.startswith("storage-")}

        def known() -> bool:
            with suppress(TransportError):  # a controller may take longer to start than a request may take
                return all(units <= stats.units.keys() for stats in client.stats())
            return False

        try:
            self._wait_until(known, deadline)
        finally:
            client.close()

    def wait(self, stop: threading.Event) -> None:
        """Serve until `stop` is set; raises TransportError if a service ends and cannot be started again."""
        while not stop.wait(_POLL_S):
            self._refuse_failed()

    def close(self) -> None:
        """End everything; rows are gone. Idempotent."""
        self._keepers.close()
        for client in self._clients:
            client.close()
        self._clients.clear()
        for service in self._services.values():
            service.end()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        late = [service for service in self._services.values() if not service.wait_for_exit(deadline)]
        for service in late:
            service.kill()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for service in late:
            service.wait_for_exit(deadline)
        self.address.unlink(missing_ok=True)
        self._own.close()

    def __enter__(self) -> "LocalQueue":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait_until(self, condition: Callable[[], bool], deadline: float) -> None:
        while not condition():
            self._refuse_failed()
            if time.monotonic() > deadline:
                raise TransportError(f"queue: {' '.join(self._services)} were not all up in time")
            self._keepers.failed.wait(_POLL_S)

    def _refuse_failed(self) -> None:
        if self._keepers.failure is not None:
            raise TransportError(str(self._keepers.failure)) from self._keepers.failure

    def _next_unit(self) -> str:
        return f"storage-{sum(name.startswith('storage-') for name in self._services)}"

    def _start_service(self, name: str) -> None:
        if name not in self._config.controllers:
            self._own.enter_context(JournalMemory(self._store, name))
        log = None if self._log_dir is None else self._log_dir / f"{name}.log"
        self._services[name] = _Service(self.address, name, log, self._keepers)


def _serve_store(host: str, timeout_s: float) -> tuple[str, TCPStore, int]:
    try:
        address = resolve(host)
        return address, *serve_store(address, timedelta(seconds=timeout_s))
    except OSError as error:
        raise ConfigError(f"queue: host {host!r} is not a name or address of this host ({error.strerror})") from error


def _make_directory(log_dir: Path) -> None:
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"queue: log_dir {log_dir} cannot be made ({error.strerror}); name another one") from error


def _level_shown() -> int:
    """Return the level from which this program shows what `tq` logs; errors, where logging is not set up."""
    ours = logging.getLogger("tq")
    handlers = [*ours.handlers, *logging.getLogger().handlers]
    is_set_up = any(not isinstance(handler, logging.NullHandler) for handler in handlers)
    return ours.getEffectiveLevel() if is_set_up else logging.ERROR


def _check_counts(counts: Mapping[str, int]) -> None:
    for what, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise ConfigError(f"queue: {what} is {count!r}; give a whole number")
        if count < 1:
            raise ConfigError(f"queue: {what} is {count}, which is too few; give at least one")


def _declared(tasks: Mapping[str, Sequence[str] | TaskConfig], queue: QueueConfig) -> tuple[TaskConfig, ...]:
    if not isinstance(tasks, Mapping):
        raise ConfigError(f"queue: tasks are a {type(tasks).__name__}; give their inputs by name: {{'score': ['x']}}")
    declared = tuple(_declared_task(name, task, queue) for name, task in tasks.items())
    if not declared:
        raise ConfigError("queue: declare at least one task")
    writers: dict[str, str] = {}
    for task in declared:
        for column in task.outputs:
            if writers.setdefault(column, task.name) != task.name:
                raise ConfigError(f"queue: {writers[column]} and {task.name} both write column {column!r}")
    return declared


def _declared_task(name: str, task: Sequence[str] | TaskConfig, queue: QueueConfig) -> TaskConfig:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"queue: a task is named {name!r}; name it with a string")
    if isinstance(task, str):
        raise ConfigError(f"task {name}: the inputs are a list of columns; write [{task!r}]")
    if not isinstance(task, TaskConfig):
        if not isinstance(task, Collection) or isinstance(task, Mapping):
            raise ConfigError(f"task {name}: the inputs are a list of columns, not {task!r}")
        wrong = [column for column in task if not isinstance(column, str) or not column]
        if wrong:
            raise ConfigError(f"task {name}: an input is named {wrong[0]!r}; name it with a string")
        task = TaskConfig(name=name, inputs=tuple(task))
    if task.name != name:
        raise ConfigError(f"task {name}: its configuration is that of {task.name!r}")
    task.spec(queue)  # loads the policy
    return task


def connect(address: Path | str, name: str, *, stop: threading.Event | None = None) -> QueueClient:
    """Return a client of a running queue.

    `address` is `LocalQueue.address`; `name` is that of this process, for messages. Once `stop` is set, the client does
    not wait for services that are gone.

    Raises:
        ConfigError: there is no such file, or it is not a queue's.
        TransportError: the queue has been closed.
    """
    queue = QueueAddress.load(Path(address))
    choose_interface(queue.host)
    return QueueClient(queue.connect_store(), name, config=queue.config, stop=stop)


class _Service:
    """One service, started again whenever it dies."""

    def __init__(self, address: Path, name: str, log: Path | None, keepers: ServiceThreads) -> None:
        level = _level_shown() if log is None else logging.INFO
        self._command = [sys.executable, "-P", "-m", "tq.service_process", str(address), name, str(level)]
        self._name = name
        self._log = log
        self._ending = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        # The thread that starts the process must live as long as the process: see `die_with_parent`.
        self._thread = keepers.start(self._keep_running, name=f"keep-{name}")

    @property
    def pid(self) -> int:
        process = self._process
        return process.pid if process is not None and process.poll() is None else 0

    def end(self) -> None:
        self._ending.set()
        process = self._process
        if process is not None:
            process.terminate()

    def wait_for_exit(self, deadline: float) -> bool:
        """Wait until the process has left or `deadline` (`time.monotonic`) passes; returns whether it has left."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def kill(self) -> None:
        """End the process at once, even if it is stopped."""
        process = self._process
        if process is not None:
            process.kill()

    def _keep_running(self) -> None:
        early = 0
        while not self._ending.is_set():
            began = time.monotonic()
            why, failed = self._run_process()
            if not self._ending.is_set():
                early = early + 1 if failed and time.monotonic() - began < _EARLY_S else 0
                if early == _MAX_EARLY_ENDS:
                    raise TransportError(f"{self._name} failed {early} times in a row, the last time it {why}")
                logger.warning("%s %s; starting it again", self._name, why)
                self._ending.wait(_RESTART_DELAY_S)

    def _run_process(self) -> tuple[str, bool]:
        """Run the process once; returns how it ended, and whether it failed (being killed is no failure)."""
        try:
            with self._log.open("ab") if self._log else nullcontext() as log:
                self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        except OSError as error:  # out of processes or descriptors, or the log cannot be opened
            return f"could not be started: {error}", True
        if self._ending.is_set():
            self._process.terminate()
        code = self._process.wait()
        return f"ended with code {code} (see its log)", code > 0
