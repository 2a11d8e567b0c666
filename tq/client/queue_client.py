"""A process's access to the queue: put rows, lease, read, write. Thread-safe; connects to each service on first use.

    client = QueueClient(credentials, "ref-0/0", config=config)
    granted = client.fetch("ref_log_probs", num_rows=32, timeout_s=60)
    batch = client.get(granted, ["prompts", "responses"])
    client.put("ref_log_probs", granted, batch.indices, {"ref_log_probs": column})

A controller that restarts is waited for. A unit that is gone is an error, since its rows are gone, too; but new rows go
to another one, and acks need no row.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncflow.errors import ConfigError, Superseded, TransportError
from asyncflow.transport.handshake import Credentials
from tq.batch import Column, PackedBatch
from tq.client.arguments import (
    check_granted,
    check_lease,
    check_marks,
    check_names,
    check_number,
    check_numbers,
    check_task,
    check_timeout,
    common_length,
)
from tq.client.held_leases import HeldLeases
from tq.client.queue_snapshot import restore_snapshot, take_snapshot
from tq.client.services import PUT_GRACE_S, QueueServices, expect
from tq.client.somewhere import put_somewhere
from tq.client.unit_calls import UnitCalls
from tq.client.unit_loads import UnitLoads
from tq.config import QueueConfig, ReplicaFetch
from tq.messages import (
    NEW_ROWS,
    ClearPartition,
    CommitPartitions,
    Done,
    FetchRound,
    FetchRows,
    GetQueueStats,
    GetUnitStats,
    GiveBack,
    Granted,
    LostRows,
    NoRows,
    OpenPartition,
    Published,
    PublishVersion,
    PutRows,
    QueueStats,
    Stop,
    Stored,
    UnitStats,
    WatchLost,
)
from tq.refill import Refill

_MOST_ROWS = 2**31


class QueueClient:
    """One consumer or producer. Its leases live as long as its heartbeats."""

    def __init__(
        self,
        credentials: Credentials,
        name: str,
        *,
        config: QueueConfig,
        stop: threading.Event | None = None,
        attempt: int | None = None,
    ) -> None:
        """Args:
        credentials: store and secret.
        name: of this process, for messages; need not be unique.
        config: limits and deadlines.
        stop: once set, services that are gone are not waited for.
        attempt: how often a process of this name was started before. It says that there is one at a time, so that the
            leases of earlier ones return as soon as this one asks for something. None: there may be several.
        """
        self._config = config
        self._held = HeldLeases()
        self._services = QueueServices(
            credentials, name, config=config, stop=stop or threading.Event(), held=self._held, attempt=attempt
        )
        self._calls = UnitCalls(self._services, max_message_bytes=config.max_message_bytes)
        self._loads = UnitLoads()

    @property
    def owner(self) -> str:
        """This consumer with its incarnation: leases are bound to it."""
        return self._services.owner

    @property
    def replica_fetch(self) -> ReplicaFetch:
        """Who of the ranks that share rows fetches, as the queue's config says."""
        return self._config.replica_fetch

    def close(self) -> None:
        """Say goodbye everywhere; leases return. Idempotent."""
        self._services.close()

    # Producing

    def put_rows(
        self,
        columns: Mapping[str, Column],
        *,
        partition: int = 0,
        rows: Sequence[int] | None = None,
        groups: Sequence[int] | None = None,
        group_size: int = 0,
        timeout_s: float | None = None,
        commits: Mapping[str, Sequence[int]] | None = None,
    ) -> tuple[int, ...]:
        """Create rows with their first columns on the unit that holds least; waits while the queue is full.

        Args:
            columns: all with the same number of rows.
            partition: the step that the rows belong to.
            rows: their global indices; default: new ones from the job store.
            groups: group ids; default: `group_size` neighbours make one, or each row its own.
            group_size: rows of each group, over all puts; 0: the groups are complete in this put.
            timeout_s: how long to wait for room; default `request_timeout_s`.
            commits: task -> positions of rows that it is done with already (restored ones).

        Returns:
            The rows' indices.

        Raises:
            ConfigError: the arguments do not go together; nothing was put.
            QueueFull: no room within `timeout_s`; says what it waited for.
            RowsExist: a row exists already.
            TransportError: no unit took them in time, or another put of one of them did not end in time.
        """
        timeout_s = check_timeout(self._services.seconds(timeout_s))
        number = common_length(columns)
        partition = check_number("partition", partition)
        group_size = check_number("group_size", group_size)
        rows = None if rows is None else check_numbers("rows", rows)
        groups = None if groups is None else check_numbers("groups", groups)
        for what, given in (("rows", rows), ("groups", groups)):
            if given is not None and len(given) != number:
                raise ConfigError(f"a put of {number} rows names {len(given)} {what}; name one for each row")
        marks = check_marks(commits or {}, number)
        headers, payload = self._calls.described(columns)
        if rows is not None:
            self._services.reserve_rows(rows)
        indices = tuple(self._services.new_rows(number) if rows is None else rows)
        if groups is None:
            size = max(1, group_size)
            groups = [indices[k - k % size] for k in range(number)]

        def put(unit: str) -> None:
            connection = self._services.unit(unit)
            message = PutRows(partition, list(indices), list(groups), headers, group_size, timeout_s, marks)
            future = connection.submit(message, payload)
            stored = expect(self._services.answer(future, unit, message, timeout_s + PUT_GRACE_S), Stored)
            self._loads.put(unit, stored.num_bytes)

        self._services.beats.writes((NEW_ROWS, *columns))
        put_somewhere(self._services, self._loads, put, timeout_s)
        return indices

    def open_partition(self, partition: int, num_rows: int) -> None:
        """Declare how many rows a partition will have, so that its end can be known.

        Raises:
            ConfigError: a negative number.
        """
        message = OpenPartition(check_number("partition", partition), check_number("num_rows", num_rows))
        self._services.tell_controllers(message)

    def lost_rows(self, after: int = 0, *, timeout_s: float | None = None) -> LostRows | None:
        """Wait for rows that were lost with a unit: put them again under the same indices.

        Args:
            after: `sequence` of the last answer; 0 at first.
            timeout_s: then None; default `request_timeout_s`.
        """
        timeout_s = check_timeout(self._services.seconds(timeout_s))
        message = WatchLost(check_number("after", after), timeout_s)
        reply = self._services.ask(self._services.directory.lead, message, timeout_s)
        return reply if isinstance(reply, LostRows) else None

    # Consuming

    def fetch(
        self,
        task: str,
        *,
        num_rows: int,
        version: int = 0,
        timeout_s: float | None = None,
        token_budget: int = 0,
        replica: str = "",
        sequence: int = 0,
        lineage: int = 0,
    ) -> Granted | NoRows:
        """Lease ready rows; waits until there are some, the deadline passes, or the queue stops.

        Args:
            task: whose inputs must be complete.
            num_rows: at most, but at least one parcel.
            version: newest weights that this consumer holds (version-gated tasks).
            timeout_s: default `request_timeout_s`.
            token_budget, replica, sequence, lineage: see `FetchRows`.

        Raises:
            ConfigError: no such task, or a number that cannot be.
        """
        timeout_s = check_timeout(self._services.seconds(timeout_s))
        if not isinstance(replica, str):
            raise ConfigError(f"replica: {replica!r} is no name")
        message = FetchRows(
            task,
            self.owner,
            check_number("num_rows", num_rows, least=1, most=_MOST_ROWS),
            check_number("version", version),
            timeout_s,
            check_number("token_budget", token_budget),
            replica,
            check_number("sequence", sequence),
            check_number("lineage", lineage),
        )
        return self._fetch(message, timeout_s)

    def fetch_round(self, request: FetchRound) -> Granted | NoRows:
        """Lease this rank's share of a round; see `FetchRound`. Asking again for a formed round grants it again."""
        request.owner = self.owner
        check_number("num_rows", request.num_rows, least=1, most=_MOST_ROWS)
        return self._fetch(request, check_timeout(request.timeout_s))

    def get(self, granted: Granted, names: Sequence[str]) -> PackedBatch:
        """Read columns of a lease's rows, in the lease's order, into tensors that the caller owns.

        Raises:
            ConfigError: this is no lease, or these are no names.
            Superseded: rows are not where they were: freed, since the lease is void, or lost with their unit.
            PeerRefused: a column is not written.
            TransportError: a unit is gone, or not all of them answered within `request_timeout_s`.
        """
        check_granted(granted)
        return self._calls.get(granted, check_names(names))

    def put(self, task: str, granted: Granted, rows: Sequence[int], columns: Mapping[str, Column]) -> None:
        """Write all output columns of some rows of a lease; the task is then done with them.

        Args:
            task: that holds the lease.
            granted: the lease.
            rows: some of its rows, in the order of the columns' rows.
            columns: at least one; see `ack`.

        Raises:
            ConfigError: task, lease, rows and columns do not go together; nothing was put.
            Superseded: the lease is void, or the rows were lost; drop the work.
            TransportError: a unit is gone, or not all of them answered within `request_timeout_s`; putting again is
                safe.
        """
        check_lease(task, granted, rows)
        if common_length(columns) != len(rows):
            raise ConfigError(f"{task}: columns of {common_length(columns)} rows, but {len(rows)} rows are named")
        self._services.beats.writes(columns)
        try:
            self._calls.put(task, granted, rows, columns)
        except Superseded:
            self._drop(task, granted, rows)
            raise
        self._held.settled(task, granted.token, rows)

    def ack(self, task: str, granted: Granted, rows: Sequence[int] | None = None) -> None:
        """The task is done with rows of a lease without writing anything. Rows lost with their unit are acked too.

        Raises:
            ConfigError: the lease is another task's, or has no such rows.
            Superseded: the lease is void.
            TransportError: neither unit nor controller answered within `request_timeout_s`; acking again is safe.
        """
        check_granted(granted)
        rows = granted.rows if rows is None else rows
        check_lease(task, granted, rows)
        try:
            self._calls.ack(granted, rows)
        except Superseded:
            self._drop(task, granted, rows)
            raise
        self._held.settled(task, granted.token, rows)

    def give_back(self, task: str, granted: Granted, rows: Sequence[int] | None = None) -> None:
        """Return rows of a lease; somebody else gets them, as soon as the controller is back if it does not answer.

        A trainer's lease (`keeps_leases`) whose controller does not answer must be given back again.

        Raises:
            ConfigError: the lease is another task's, or has no such rows.
            TransportError: the controller did not answer within `request_timeout_s`.
        """
        check_granted(granted)
        rows = granted.rows if rows is None else rows
        check_lease(task, granted, rows)
        self._held.settled(task, granted.token, rows)
        service = self._services.directory.controller_of(task)
        self._services.ask(service, GiveBack(task, granted.token, list(rows)))

    def filter_groups(self, task: str, granted: Granted, rows: Sequence[int]) -> None:
        """Nobody shall work on the groups of these rows any more: they leave the queue.

        Where prompts are admitted, the next one takes each one's place in its step. A lease that is void by now changes
        nothing: the rows are somebody else's, who will judge them.

        Raises:
            ConfigError: the lease is another task's, or has no such rows.
        """
        check_granted(granted)
        check_lease(task, granted, rows)
        service = self._services.directory.controller_of(task)
        self._services.ask(service, GiveBack(task, granted.token, list(rows), filtered=True))
        self._held.settled(task, granted.token, rows)

    def forget(self, task: str, granted: Granted) -> None:
        """Another reader of this lease (a rank of the same replica) settles it: this client does not vouch for it."""
        check_granted(granted)
        self._held.forget(task, granted.token)

    # The queue as a whole

    def publish_version(self, step: int, *, refills_known: int = 0) -> list[Refill]:
        """Announce that weights of `step` exist; returns which groups admission replaced: failed or filtered ones.

        Args:
            step: the version's.
            refills_known: how many of those this trainer was told of; the later ones are returned, in order. Every
                refill whose group, or a later one, could be fetched by now is among them.
        """
        message = PublishVersion(check_number("step", step), check_number("refills_known", refills_known))
        return expect(self._services.tell_controllers(message)[0], Published).refills

    def stop(self) -> None:
        """Answer everybody's fetches with `NoRows(stop)` from now on."""
        self._services.tell_controllers(Stop())

    def clear_partition(self, partition: int) -> None:
        """Remove all rows of a partition; work on them is superseded. Its rows may be put anew once this has returned.

        Units and controllers that are away are waited for.

        Raises:
            TransportError: one, or a controller, did not come back within `request_timeout_s`. Clear again.
        """
        message = ClearPartition(check_number("partition", partition))
        self._services.tell_units(message, Done, every=True)
        self._services.tell_controllers(message)

    def commit(self, newest: int) -> None:
        """A durable checkpoint covers partitions up to and including `newest`: retained rows go.

        A unit that is away is not waited for: the next commit covers the same partitions, and more. Controllers are
        waited for: they write down which rows are finished, before units forget that.

        Raises:
            TransportError: a controller or a unit that is up did not answer within `request_timeout_s`. The next commit
                makes up for it.
        """
        self._services.tell_controllers(CommitPartitions(newest))
        self._services.tell_units(CommitPartitions(newest), Done)

    def snapshot(self, directory: Path, *, after_partition: int = -1, forget_acks_of: Sequence[str] = ()) -> int:
        """Write all rows of partitions after `after_partition` into a new directory; see `take_snapshot`."""
        return take_snapshot(
            self._services, Path(directory), after_partition=after_partition, forget_acks_of=forget_acks_of
        )

    def restore(self, directory: Path) -> int:
        """Put the rows of a snapshot; see `restore_snapshot`."""
        return restore_snapshot(self, self._services, Path(directory))

    def checkpoint_wanted(self) -> bool:
        """Whether rows that only wait for a checkpoint take so much room that one should be saved soon.

        Where a unit does not answer just now, it is not known: ask again later.
        """
        limit = self._config.spill_after_bytes
        try:
            return any(unit.retained_bytes > limit for unit in self.unit_stats().values())
        except TransportError:
            return False

    def stats(self) -> list[QueueStats]:
        """Return what each controller counts, the lead first."""
        services = self._services
        return [expect(services.ask(name, GetQueueStats()), QueueStats) for name in services.directory.controllers]

    def unit_stats(self) -> dict[str, UnitStats]:
        """Return what each unit that is up holds."""
        return self._services.tell_units(GetUnitStats(), UnitStats)

    def _drop(self, task: str, granted: Granted, rows: Sequence[int]) -> None:
        """The lease is void for some of these rows, so the work on all of them is dropped: the others return.

        The controller may also count them all as this client's, and so nobody would get them: one that is recovering
        rebuilds the leases that it was told of when this client joined.
        """
        self._held.settled(task, granted.token, rows)
        service = self._services.directory.controller_of(task)
        self._services.post(service, GiveBack(task, granted.token, list(rows), superseded=True))

    def _fetch(self, message: FetchRows | FetchRound, timeout_s: float) -> Granted | NoRows:
        check_task(message.task, self._services.directory.tasks)
        reply = self._services.ask(self._services.directory.controller_of(message.task), message, timeout_s)
        if isinstance(reply, Granted):
            self._held.granted(message, reply)
            return reply
        return expect(reply, NoRows)
