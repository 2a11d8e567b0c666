"""A process outside of a run that takes part in it: `asyncflow.connect`.

    with asyncflow.connect("runs/mine", name="judge") as run:      or connect("10.0.0.1:29400", key)
        for lease in run.stream("rewards", num_rows=32):           ends when the run does
            lease.put({"rewards": scores, "correct": [score == 1 for score in scores]})
        run.log({"score_ms": 12.5})                                -> metrics.jsonl: outside/judge/score_ms
        run.feed("math").put(rows)                                 of a run with data.source: feed

    job.json, or address and key -> job store -> what the lead controller announced -> the queue, like any worker

The run does not wait for it: when it leaves or dies, its leases return and others get the rows; it may come back at any
time. What it puts is checked here, before the run sees it: columns, element types, lengths, versions.
"""

import os
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec
from torch.distributed import DistError

from asyncflow.decoding import msgpack_decoder
from asyncflow.errors import ConfigError, SealBroken, TransportError
from asyncflow.job import Job, address_towards, choose_interface, endpoint, resolve
from asyncflow.sealed_store import connect_store
from asyncflow.transport.meeting import Credentials
from tq.client.lease import Lease, LeaseStream
from tq.client.queue_client import QueueClient
from tq.config import QueueConfig
from tq.messages import NoRows, NoRowsReason
from weightsync.export import WeightFeed
from weightsync.version import Version
from workers.outside.feed_client import PromptFeed
from workers.outside.lease import OutsideLease, OutsideTask
from workers.records.outside_metrics import report_metrics
from workers.settings.dataflow import TRAINERS, WEIGHTS
from workers.settings.run import RunConfig
from workers.tasks.graph import launched_tasks, task_specs

_KEY = "outside/run"
_NAME = re.compile(r"[\w.-]+")
_LOOK_S = 0.5
"""How often a client looks whether the run is over (s)."""
_END_S = 10.0
"""How long the launcher may outlive the run's services (s)."""


@dataclass(frozen=True)
class Announcement:
    """What a process outside must know of a run; the lead controller puts it into the job store.

    Attributes:
        tasks: by name, without those that train.
        queue: settings of its clients.
        staleness_bound: of the schedule.
        agents: weight agent -> its node's address; "" on the only node.
        takes_prompts: its prompts are fed.
    """

    tasks: dict[str, OutsideTask]
    queue: dict[str, Any]
    staleness_bound: int
    agents: dict[str, str]
    takes_prompts: bool

    @staticmethod
    def of(config: RunConfig, job: Job) -> "Announcement":
        """Return it for a run. It has no secrets: everybody who reaches the store can read it."""
        placed = [task for task in launched_tasks(config, job) if task.role not in TRAINERS]
        gated = {spec.name for spec in task_specs(placed, config) if spec.max_staleness is not None}
        addresses = {node.rank: node.address for node in job.nodes}
        return Announcement(
            {task.name: OutsideTask(task.inputs, task.outputs, task.name in gated) for task in placed},
            config.tq.model_dump(mode="json", exclude={"backend"}),
            config.schedule.staleness_bound,
            {gang.name: addresses.get(gang.nodes[0], "") for gang in job.of_role(WEIGHTS)},
            config.data.is_feed,
        )

    def publish(self, credentials: Credentials) -> None:
        """Make it known; again by each incarnation of the lead."""
        credentials.call_store("put", _KEY, msgspec.msgpack.encode(asdict(self)))


def connect(run: Path | str, key: str | None = None, *, name: str = "", timeout_s: float = 120.0) -> "RunClient":
    """Join a run that goes on.

    Args:
        run: its directory, or `HOST:PORT` of its job store (`store_host`, `store_port` of `job.json`); IPv6 as
            `[ADDRESS]:PORT`.
        key: with an address: the run's key (`secret` of `job.json`, 64 hex digits). It is proved, never sent.
        name: of this process, for messages and metrics; default: host and process id.
        timeout_s: for the run to start, and to answer.

    Raises:
        ConfigError: nothing runs there, the host is not known, or key, name or timeout cannot be.
        TransportError: the run is over, or does not answer.
    """
    name = _checked(name or f"{socket.gethostname()}-{os.getpid()}")
    if not 0 < timeout_s <= threading.TIMEOUT_MAX:
        raise ConfigError(f"timeout_s: {timeout_s} is no time to wait for; give seconds, more than 0")
    host, port, secret = _endpoint(run, key)
    try:
        host = resolve(host)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"run: host {host!r} cannot be resolved ({error}); give its address") from error
    choose_interface(host)
    if not _answers(host, port, timeout_s):
        raise TransportError(f"run {run}: nothing answers at {endpoint(host, port)}; is it over?")
    try:
        store = connect_store(host, port, timedelta(seconds=timeout_s))
        credentials = Credentials(store, secret, timeout_s)
        announced = credentials.call_store("get", _KEY)
    except SealBroken as error:
        raise ConfigError(
            f"key: the run at {endpoint(host, port)} has another one; take `secret` of its job.json"
        ) from error
    except (DistError, TransportError) as error:
        raise TransportError(f"run {run}: it let nobody in within {timeout_s:g} s; has it started?") from error
    alive = partial(_answers, host, port, timeout_s)
    return RunClient(credentials, name, msgpack_decoder(Announcement).decode(announced), alive=alive)


class RunClient:
    """A process's access to a run; a context manager. Thread-safe; its streams are used by one thread each.

    Attributes:
        tasks: what may be leased here, by name.
        queue: the queue itself, without checks.
    """

    def __init__(
        self, credentials: Credentials, name: str, announced: Announcement, *, alive: Callable[[], bool]
    ) -> None:
        """Args:
        credentials: store and secret.
        name: of this process.
        announced: by the run.
        alive: whether the run's store answers.
        """
        self.tasks = announced.tasks
        self.name = name
        self._credentials = credentials
        self._announced = announced
        self._alive = alive
        self._over, self._closed = threading.Event(), threading.Event()
        self.queue = QueueClient(
            credentials, f"outside-{name}", config=QueueConfig.model_validate(announced.queue), stop=self._over
        )
        self._feeds: list[WeightFeed | PromptFeed] = []
        self._num_reports = 0
        threading.Thread(target=self._watch, name="watch-run", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self._over.is_set()

    def stream(
        self,
        task: str,
        *,
        num_rows: int = 64,
        version: Version | None = None,
        columns: Sequence[str] | None = None,
        prefetch: int = 1,
    ) -> LeaseStream:
        """Iterate over a task's rows as they become ready, as `QueueClient.stream`; a put is checked first.

        It ends with the run, and, of a task with `needs_version`, when rows need newer weights (`ended_by`).

        Args:
            task: of `tasks`.
            num_rows: at most so many per lease.
            version: of the weights that this process computes with; of a reference that follows the policy, its step.
            columns: to read ahead; default: all inputs.
            prefetch: leases fetched ahead.

        Raises:
            ConfigError: no such task, or `version` is missing.
        """
        if task not in self.tasks:
            raise ConfigError(f"task {task!r}: none that is leased here; the run has {' '.join(self.tasks)}")
        spec = self.tasks[task]
        if spec.needs_version and version is None:
            raise ConfigError(f"task {task}: say with version=... which weights this process holds")
        held = version or Version(0, 0)
        return LeaseStream(
            partial(self._fetch, held),
            task,
            spec.inputs if columns is None else columns,
            num_rows=num_rows,
            token_budget=0,
            version=held.step,
            prefetch=prefetch,
            timeout_s=60.0,
            producers_timeout_s=0.0,
        )

    def weights(self) -> WeightFeed:
        """Return what tells of new weights, and loads them; from a host of the run, as the same user.

        Raises:
            ConfigError: no node of the run is on this host.
        """
        for agent, address in self._announced.agents.items():
            if not address or address_towards(address) == address:
                feed = WeightFeed(self._credentials, agent, self.name, over=self._over.is_set)
                self._feeds.append(feed)
                return feed
        raise ConfigError(
            f"weights: this host is none of the run's ({' '.join(self._announced.agents.values())}), and weights are "
            f"read from shared memory; start the process there, or have the run export them (weightsync.export)"
        )

    def feed(self, name: str) -> PromptFeed:
        """Return what puts prompts of a run with `data.source: feed`.

        Args:
            name: of the feeder: the run counts its rows, so that it may be killed, and come back under this name.

        Raises:
            ConfigError: the run has a source of its own, or the name cannot be.
            TransportError: the run is over, or does not answer.
        """
        if not self._announced.takes_prompts:
            raise ConfigError("data.source: the run has prompts of its own; start one with data.source: feed")
        feed = PromptFeed(self._credentials, _checked(name), over=self._over)
        self._feeds.append(feed)
        return feed

    def log(self, metrics: Mapping[str, float]) -> None:
        """Report numbers: the next step's line of `metrics.jsonl` has the newest as `outside/NAME/METRIC`.

        Raises:
            ConfigError: a value is no finite number.
            TransportError: the run is over.
        """
        self._num_reports += 1
        stamp = f"{self.queue.owner}/{self._num_reports}"
        with self._credentials.borrowed_store() as store:
            try:
                report_metrics(store, self.name, metrics, stamp=stamp)
            except DistError as error:
                raise TransportError("the run is over") from error

    def close(self) -> None:
        """Leave: leases return. Idempotent."""
        self._closed.set()
        for feed in self._feeds:
            feed.close()
        self.queue.close()

    def _fetch(self, held: Version, task: str, **how: Any) -> "Lease | NoRows":
        try:
            answer = self.queue.fetch(task, lineage=held.lineage, **how)
        except TransportError:
            if self._over.wait(_END_S):
                return NoRows(NoRowsReason.STOP, held.step)
            raise
        if isinstance(answer, NoRows):
            return answer
        return OutsideLease(self.queue.data, answer, self.tasks[task], held, bound=self._announced.staleness_bound)

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            if not self._alive() and not self._alive():
                self._over.set()
                return


def _checked(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"name: {name!r} is no text of letters, digits, '.', '_' and '-' alone")
    return name


def _endpoint(run: Path | str, key: str | None) -> tuple[str, int, bytes]:
    """Return host, port and secret of a run."""
    host, _, port = str(run).rpartition(":")
    if key is None:
        if host and port.isdigit() and not Path(run).exists():
            raise ConfigError(f"run: {run} is an address; give its key, too (`secret` of the run's job.json)")
        job = Job.load(Path(run))
        return job.store_host, job.store_port, bytes.fromhex(job.secret)
    if not host or not port.isdigit():
        raise ConfigError(f"run: {run!s} with a key is no HOST:PORT; give the job store's address, or no key")
    try:
        return host.removeprefix("[").removesuffix("]"), int(port), bytes.fromhex(key)
    except ValueError:
        raise ConfigError("key: that is no row of hex digits; take `secret` of the run's job.json") from None


def _answers(host: str, port: int, timeout_s: float) -> bool:
    """Whether a server listens there; a client of the store would try for long, and print traces."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except (OSError, OverflowError):  # a port above 65535
        return False
    return True
