"""An outside process that takes part in a run: `asyncflow.connect`.

    with asyncflow.connect("runs/mine", name="judge") as run:      or connect("10.0.0.1:29400", key)
        for lease in run.stream("rewards", num_rows=32):           ends when the run does
            lease.put({"rewards": scores, "correct": [score == 1 for score in scores]})
        run.log({"score_ms": 12.5})                                -> metrics.jsonl: outside/judge/score_ms
        run.feed("math").put(rows)                                 for a run with data.source: feed

    job.json, or address and key -> job store -> what the lead controller announced -> the queue, like any worker

The run does not wait for it: if it leaves or dies, its leases return and others get the rows; it may come back at any
time. Its puts are checked here before the run sees them: columns, element types, lengths, versions.
"""

import contextlib
import math
import os
import re
import reprlib
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
from torch import Tensor
from torch.distributed import DistError

from asyncflow.decoding import msgpack_decoder
from asyncflow.errors import ConfigError, LeaseFenced, SealBroken, TransportError
from asyncflow.job import Job, address_towards, choose_interface, endpoint, resolve
from asyncflow.sealed_store import connect_store
from asyncflow.transport.meeting import Credentials
from tq.client.arguments import check_rows_of
from tq.client.lease import Lease, LeaseCalls, LeaseStream
from tq.client.queue_client import QueueClient
from tq.columns import Column
from tq.config import QueueConfig
from tq.messages import NoRows, NoRowsReason
from tq.policies import StalenessRule
from weightsync.export import WeightFeed
from weightsync.version import Version
from workers.outside.feed_client import PromptFeed
from workers.records.outside_metrics import report_metrics
from workers.rewards.base import as_number
from workers.rows.packed_rows import drawn_per_row, responses_of
from workers.settings.dataflow import (
    DRAWN_COLUMNS,
    REWARD_PARTS,
    SAMPLE_COLUMNS,
    SCALAR_COLUMNS,
    TRAINERS,
    TURN_IDS,
    TURN_REWARDS,
    WEIGHTS,
)
from workers.settings.run import RunConfig
from workers.tasks.graph import launched_tasks, task_specs

# Element types; all other columns are float32
_DTYPES = {
    **dict.fromkeys(DRAWN_COLUMNS, torch.float32),
    "tokens": torch.int64,
    "sample_lengths": torch.int32,
    "response_mask": torch.uint8,
    "versions": torch.int32,
    TURN_IDS: torch.int32,
    TURN_REWARDS: torch.float64,
    "correct": torch.bool,
    "truncated": torch.bool,
}


@dataclass(frozen=True)
class OutsideTask:
    """A task of the queue, as an outside process sees it."""

    # inputs, outputs: columns that it reads, and that a put must contain
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    needs_version: bool  # consumers must say which weights they hold


class OutsideLease(Lease):
    """A lease whose puts are checked, so that a mistake costs an error here and not the run. `held`: weights that the
    rows were requested with; `allowed`: staleness."""

    def __init__(
        self, calls: LeaseCalls, lease: Lease, task: OutsideTask, held: Version, *, allowed: StalenessRule
    ) -> None:
        super().__init__(calls, lease.grant, lease.batch.columns)
        self._task = task
        self._held = held
        self._allowed = allowed

    @property
    def responses(self) -> list[Tensor]:
        """The drawn tokens of each row, int64; for tasks that read generated rows."""
        return responses_of(self.read(["tokens", "response_mask"]))

    def put(self, columns: Mapping[str, Any], rows: Sequence[int] | None = None) -> bool:
        """Write all output columns for some rows (None: all open ones); see `Lease.put`.

        `columns`: name -> a number per row; for per-token columns a tensor or list per row; for `reward_parts` a dict
        of names to finite numbers per row. Raises ConfigError if a column is missing, is not an output, or does not
        fit; nothing was put.
        """
        name, outputs = self.grant.task, self._task.outputs
        given = list(columns.keys())  # also works for a TensorDict
        if set(given) != set(outputs):
            raise ConfigError(f"{name}: a put of columns {' '.join(given) or 'none'}; give {' '.join(outputs)}")
        packed = {column: _packed(column, columns[column]) for column in outputs}
        rows = self.open_rows if rows is None else check_rows_of(self.grant, rows)
        if set(SAMPLE_COLUMNS) <= set(packed):
            self._check_samples(packed)
        elif rows and not set(packed).isdisjoint(DRAWN_COLUMNS):
            with contextlib.suppress(LeaseFenced):  # then the put below is refused as well
                self._check_drawn(packed, self._drawn_lengths(rows))
        if "rewards" in packed and packed["rewards"].values.isinf().any():
            raise ConfigError(f"{name}: rewards are not finite as float32; give numbers, NaN where scoring failed")
        if TURN_IDS in packed and (packed[TURN_IDS].values < 0).any():
            raise ConfigError(f"{name}: {TURN_IDS} are negative; number a row's turns from 0")
        if TURN_REWARDS in packed:
            self._check_turn_rewards(packed)
        return super().put(packed, rows)

    def _check_samples(self, columns: Mapping[str, Column]) -> None:
        tokens, lengths, mask = (columns[name] for name in SAMPLE_COLUMNS)
        drawn = [int(row.sum()) for row in mask.rows()]
        sums = [int(row.sum()) for row in lengths.rows()]
        for name, numbers in (("response_mask", mask.lengths.tolist()), ("sample_lengths (their sums)", sums)):
            self._check_numbers(name, numbers, tokens.lengths.tolist(), of="tokens")
        if (lengths.values < 1).any():
            raise ConfigError(f"{self.grant.task}: sample_lengths are less than 1; a sample has tokens")
        self._check_drawn(columns, drawn)
        if not all(drawn):
            raise ConfigError(f"{self.grant.task}: a row has no drawn token; response_mask is 1 where one was drawn")
        oldest, newest = (int(of(columns["versions"].values)) for of in (torch.min, torch.max))
        least = self._allowed.oldest_version(self.partition)
        if oldest < least or newest > self._held.step:
            raise ConfigError(
                f"{self.grant.task}: versions {oldest} to {newest} for step {self.partition}, which takes {least} to "
                f"{self._held.step} (what the rows were asked for with); generate with newer weights"
            )

    def _drawn_lengths(self, rows: Sequence[int]) -> list[int]:
        """Return the number of drawn tokens in each of these rows, which others generated."""
        place = {row: number for number, row in enumerate(self.rows)}
        return drawn_per_row(self.read(["response_mask"]).select([place[row] for row in rows])).tolist()

    def _check_drawn(self, columns: Mapping[str, Column], drawn: list[int]) -> None:
        for name in DRAWN_COLUMNS:
            if name in columns:
                self._check_numbers(name, columns[name].lengths.tolist(), drawn, of="drawn tokens")
                if not columns[name].values.isfinite().all():
                    raise ConfigError(f"{self.grant.task}: {name} are not finite; were the weights loaded?")

    def _check_turn_rewards(self, columns: Mapping[str, Column]) -> None:
        for ids, rewards, reward in zip(
            columns[TURN_IDS].rows(), columns[TURN_REWARDS].rows(), columns["rewards"].values, strict=True
        ):
            if int(ids.max()) >= len(rewards):
                raise ConfigError(
                    f"{self.grant.task}: {len(rewards)} {TURN_REWARDS} for turns {sorted(set(ids.tolist()))}; give one "
                    f"for each turn, from 0"
                )
            if not torch.isclose(rewards.sum().float(), reward, rtol=1e-4, atol=1e-6, equal_nan=True):
                raise ConfigError(
                    f"{self.grant.task}: {TURN_REWARDS} {rewards.tolist()} of a row whose reward is {reward:g}; give "
                    f"rewards that are their sums, NaN for all turns where scoring failed"
                )

    def _check_numbers(self, name: str, numbers: list[int], wanted: list[int], *, of: str) -> None:
        if numbers != wanted:
            raise ConfigError(f"{self.grant.task}: {name} of {numbers} for {wanted} {of}; give one for each")


def _packed(name: str, values: Any) -> Column:
    dtype = _DTYPES.get(name, torch.float32)
    try:
        if name == REWARD_PARTS:
            return Column.of_values([_reward_parts(row) for row in values])
        if name in (*SAMPLE_COLUMNS, *DRAWN_COLUMNS, TURN_REWARDS):
            given = dtype if dtype is torch.float64 else None  # numbers of a list would become float32 on the way
            rows = [torch.as_tensor(row, dtype=given) for row in values]
            if name == "response_mask" and any((row != row.bool()).any() for row in rows):
                raise ValueError("it has values besides 0 and 1")  # check before the cast to bytes
            return Column.of_rows([row.to("cpu", dtype).reshape(-1) for row in rows])
        return Column.of_scalars(torch.as_tensor(values).to("cpu", dtype))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        per = "a number per row" if name in SCALAR_COLUMNS else "a tensor or list per row"
        raise ConfigError(f"column {name}: {error}; give {per} ({dtype})") from error


def _reward_parts(row: Any) -> dict[str, float]:
    """Return a row's parts as plain numbers, which the trainer sums."""
    try:
        parts = {name: as_number(value) for name, value in row.items()}
    except Exception:  # noqa: BLE001  boundary to user objects
        parts = {"": math.nan}
    if not all(isinstance(name, str) and math.isfinite(value) for name, value in parts.items()):
        raise ConfigError(f"column {REWARD_PARTS}: {reprlib.repr(row)}; give a dict of names to finite numbers per row")
    return parts


_KEY = "outside/run"
_NAME = re.compile(r"[\w.-]+")
_LOOK_S = 0.5  # how often a client checks whether the run is over (s)
_END_S = 10.0  # how long the launcher may outlive the run's services (s)


@dataclass(frozen=True)
class Announcement:
    """What an outside process must know about a run; the lead controller puts it into the job store."""

    tasks: dict[str, OutsideTask]  # by name, except those that train
    queue: dict[str, Any]  # settings of its clients
    staleness_bound: int  # of the schedule
    agents: dict[str, str]  # weight agent -> its node's address; "" in a single-node run
    takes_prompts: bool  # prompts are fed

    @staticmethod
    def from_run(config: RunConfig, job: Job) -> "Announcement":
        # No secrets in here: everybody who reaches the store can read it.
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
        """Publish it; each incarnation of the lead does so again."""
        credentials.call_store("put", _KEY, msgspec.msgpack.encode(asdict(self)))


def connect(run: Path | str, key: str | None = None, *, name: str = "", timeout_s: float = 120.0) -> "RunClient":
    """Join a run in progress.

    Args:
        run: its directory, or `HOST:PORT` of its job store (`store_host`, `store_port` of `job.json`); IPv6 as
            `[ADDRESS]:PORT`.
        key: with an address: the run's key (`secret` of `job.json`, 64 hex digits). It is proved, never sent.
        name: of this process, for messages and metrics; default: host and process id.
        timeout_s: for the run to start, and for each answer.

    Raises:
        ConfigError: nothing runs there, the host is unknown, or key, name or timeout is invalid.
        TransportError: the run is over, or does not answer.
    """
    name = _checked(name or f"{socket.gethostname()}-{os.getpid()}")
    if not 0 < timeout_s <= threading.TIMEOUT_MAX:
        raise ConfigError(f"timeout_s: {timeout_s} is not a timeout; give a positive number of seconds")
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
        raise TransportError(f"run {run}: it accepted no connection within {timeout_s:g} s; has it started?") from error
    alive = partial(_answers, host, port, timeout_s)
    return RunClient(credentials, name, msgpack_decoder(Announcement).decode(announced), alive=alive)


class RunClient:
    """A process's access to a run; a context manager. Thread-safe, but each stream is for one thread.

    Attributes:
        tasks: what may be leased here, by name.
        queue: the queue itself, without checks.
    """

    def __init__(
        self, credentials: Credentials, name: str, announced: Announcement, *, alive: Callable[[], bool]
    ) -> None:
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
        threading.Thread(target=self._watch_run, name="watch-run", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def over(self) -> bool:
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
        """Iterate over a task's rows as they become ready, like `QueueClient.stream`, but with checked puts.

        Ends with the run and, for a task with `needs_version`, when rows need newer weights (`ended_by`).

        Args:
            num_rows: most rows per lease.
            version: of the weights that this process computes with; of a reference that follows the policy, its step.
            columns: to read ahead; default: all inputs.
            prefetch: leases fetched ahead.

        Raises ConfigError if there is no such task, or `version` is missing.
        """
        if task not in self.tasks:
            raise ConfigError(f"task {task!r}: cannot be leased here; the run has {' '.join(self.tasks)}")
        spec = self.tasks[task]
        if spec.needs_version and version is None:
            raise ConfigError(f"task {task}: say with version=... which weights this process holds")
        held = version or Version(0, 0)
        return LeaseStream(
            partial(self._fetch_lease, held),
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
        """Return a feed that announces and loads new weights; only on a host of the run, as the same user. Raises
        ConfigError if no node of the run is on this host."""
        for agent, address in self._announced.agents.items():
            if not address or address_towards(address) == address:
                feed = WeightFeed(self._credentials, agent, self.name, over=self._over.is_set)
                self._feeds.append(feed)
                return feed
        raise ConfigError(
            f"weights: this host is not one of the run's ({' '.join(self._announced.agents.values())}), and weights "
            f"are read from shared memory; start the process there, or have the run export them (weightsync.export)"
        )

    def feed(self, name: str) -> PromptFeed:
        """Return a feed of prompts for a run with `data.source: feed`.

        `name`: of the feeder: the run counts its rows, so it may be killed, and come back under this name.

        Raises:
            ConfigError: the run has its own source, or the name is invalid.
            TransportError: the run is over, or does not answer.
        """
        if not self._announced.takes_prompts:
            raise ConfigError("data.source: the run has prompts of its own; start one with data.source: feed")
        feed = PromptFeed(self._credentials, _checked(name), over=self._over)
        self._feeds.append(feed)
        return feed

    def log(self, metrics: Mapping[str, float]) -> None:
        """Report numbers: the next line of `metrics.jsonl` has the newest as `outside/NAME/METRIC`. Raises ConfigError
        if a value is not a finite number, TransportError if the run is over."""
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

    def _fetch_lease(self, held: Version, task: str, **how: Any) -> "Lease | NoRows":
        try:
            answer = self.queue.fetch(task, lineage=held.lineage, **how)
        except TransportError:
            # At a run's end its queue goes first, and the store that `_watch_run` asks some seconds later.
            if self._over.wait(_END_S):
                return NoRows(NoRowsReason.STOP, held.step)
            raise
        if isinstance(answer, NoRows):
            return answer
        allowed = StalenessRule(self._announced.staleness_bound)
        return OutsideLease(self.queue.data, answer, self.tasks[task], held, allowed=allowed)

    def _watch_run(self) -> None:
        while not self._closed.wait(_LOOK_S):
            # A single failed connection does not count yet.
            if not self._alive() and not self._alive():
                self._over.set()
                return


def _checked(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"name: {name!r} must consist of letters, digits, '.', '_' and '-' only")
    return name


def _endpoint(run: Path | str, key: str | None) -> tuple[str, int, bytes]:
    host, _, port = str(run).rpartition(":")
    if key is None:
        if host and port.isdigit() and not Path(run).exists():
            raise ConfigError(f"run: {run} is an address; give its key, too (`secret` of the run's job.json)")
        job = Job.load(Path(run))
        return job.store_host, job.store_port, bytes.fromhex(job.secret)
    if not host or not port.isdigit():
        raise ConfigError(f"run: {run!s} is not HOST:PORT; give the job store's address, or leave the key out")
    try:
        return host.removeprefix("[").removesuffix("]"), int(port), bytes.fromhex(key)
    except ValueError:
        raise ConfigError("key: it must consist of hex digits; take `secret` of the run's job.json") from None


def _answers(host: str, port: int, timeout_s: float) -> bool:
    try:
        # A plain socket: a client of the store would retry for long, and print tracebacks.
        socket.create_connection((host, port), timeout_s).close()
    except (OSError, OverflowError):  # a port above 65535
        return False
    return True
