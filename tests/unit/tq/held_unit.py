"""A storage unit between several controllers, as random tests see it: announced puts, a link to each, late messages."""

from dataclasses import dataclass, field, replace
from typing import Any

from queue_model import SIZE, TASKS, partition_of

from asyncflow.errors import LeaseFenced, PeerRefused, PutPending, RowsExist
from tq import TaskSpec
from tq.control.events import OrderFenceRows, OrderFenceTask
from tq.messages import (
    OutputsWritten,
    RegisterUnit,
    RemovalReason,
    RowRecords,
    RowsAccepted,
    RowsConfirmed,
    RowsCreated,
    RowsRemoved,
    UnitAccepted,
)
from tq.unit.row_journal import Life, confirmation

ALL_TASKS = (
    *TASKS,
    TaskSpec("look", frozenset({"x"})),
    TaskSpec("judge", frozenset({"rollout"})),
)
"""Those that write nothing stay done with a row that is lost."""
BY_INPUTS = tuple(replace(task, outputs=frozenset()) for task in ALL_TASKS)
"""The same; what they write is only seen."""
NAMES = [task.name for task in ALL_TASKS]
LEARNT = -1
"""Token of a commit that a controller told of."""


@dataclass
class Kept:
    """A row at a unit."""

    columns: set[str]
    unconfirmed: bool = True
    commits: dict[str, int] = field(default_factory=dict)
    fences: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class Change:
    """Something that every controller must hear of: a put of new rows in its two rounds, a commit, a removal.

    Attributes:
        refusals: of controllers.
        agreed: controllers that accepted it.
        orphan: the client died that waits for it.
    """

    kind: str
    rows: list[int]
    task: str = ""
    token: int = 0
    waiting: set[str] = field(default_factory=set)
    failed: bool = False
    refusals: list[PeerRefused] = field(default_factory=list)
    agreed: int = 0
    orphan: bool = False

    @property
    def exist(self) -> bool:
        """Whether the client hears that the rows exist."""
        return bool(self.refusals) and not self.agreed and all(isinstance(one, RowsExist) for one in self.refusals)


@dataclass
class Link:
    """To one controller; `noticed`: the controller knows that it is down."""

    connected: bool = False
    noticed: bool = True
    outbox: list[tuple[Any, Change]] = field(default_factory=list)
    owed: list[OrderFenceRows | OrderFenceTask] = field(default_factory=list)


class HeldUnit:
    """Rows, links, changes in flight. `was_done` and `failed`: changes whose outcome clients have not heard yet."""

    def __init__(self, name: str, controllers: tuple[str, ...]) -> None:
        self.name = name
        self.life = 0
        self.links = {controller: Link() for controller in controllers}
        self.was_done: list[Change] = []
        self.failed: list[Change] = []
        self.earlier: list[RegisterUnit] = []
        self.start()

    def start(self) -> None:
        """Begin a life, empty; changes in flight fail."""
        self.life += 1
        if self.life > 1:
            self.failed += self.changes
            if not self.journal.empty:
                self.earlier.append(self.journal.inventory())
        self.journal = Life(RegisterUnit(self.name, str(self.life), [], {}))
        self.registered: set[str] = set()
        self.rows: dict[int, Kept] = {}
        self.finished: dict[int, dict[str, int]] = {}
        self.floors: dict[str, tuple[int, frozenset[int]]] = {}
        self.changes: list[Change] = []
        for link in self.links.values():
            link.outbox.clear()

    # Clients

    def create(self, rows: list[int]) -> None:
        """Take new rows, all of one partition."""
        if any(
            change.kind in ("create", "confirm") and not set(change.rows).isdisjoint(rows) for change in self.changes
        ):
            raise PutPending("wait for it")
        if any(row in self.rows or row in self.finished for row in rows):
            raise RowsExist("they are here")
        for row in rows:
            self.rows[row] = Kept({"x"})
        groups = [row // SIZE for row in rows]
        created = RowsCreated(
            self.name, partition_of(rows[0]), rows, groups, ["x"], [1] * len(rows), len(rows), SIZE, announced=True
        )
        self.tell(Change("create", rows), created)

    def commit(self, task: str, token: int, row: int) -> None:
        """Store what a task wrote for a row; nothing happens if it was stored under this token before."""
        kept = self.rows.get(row)
        commits = self.finished.get(row, {}) if kept is None else kept.commits
        if commits.get(task) == token:
            if not any(change.kind == "commit" and (change.task, change.token) == (task, token) and change.rows == [row]
                       for change in self.changes):  # fmt: skip
                self.was_done.append(Change("commit", [row], task, token))
            return
        if kept is None or task in commits or self.refuses(task, token, row):
            raise LeaseFenced("somebody else's, or not here")
        kept.commits[task] = token
        columns = outputs_of(task, row)
        kept.columns |= columns
        written = OutputsWritten(self.name, task, [row], sorted(columns), [1], 1)
        self.tell(Change("commit", [row], task, token), written)
        self.sweep()

    def refuses(self, task: str, token: int, row: int) -> bool:
        """Whether a lease is void here."""
        floor, alive = self.floors.get(task, (0, frozenset()))
        fence = self.rows[row].fences.get(task, 0) if row in self.rows else 0
        return token < fence or (token < floor and token not in alive)

    def give_up_put(self, change: Change) -> None:
        """The deadline of a put passed before every controller agreed."""
        self.take_back(change)

    # Controllers

    def tell(self, change: Change, message: Any) -> None:
        """Every controller hears of a change, or finds it in the next inventory."""
        if not isinstance(message, OutputsWritten):
            self.journal.apply_change(message)
        if change not in self.changes:
            self.changes.append(change)
        for name, link in self.links.items():
            change.waiting.add(name)
            if link.connected:
                link.outbox.append((message, change))

    def inventory(self) -> RegisterUnit:
        """Return what is here."""
        records = []
        for row, kept in self.rows.items():
            columns, done = sorted(kept.columns), sorted(kept.commits)
            one = [row], [row // SIZE], [SIZE], [1], [1]
            records.append(RowRecords(partition_of(row), *one, columns, done, announced=kept.unconfirmed))
        finished: dict[int, list[int]] = {}
        for row in self.finished:
            finished.setdefault(partition_of(row), []).append(row)
        return RegisterUnit(self.name, str(self.life), records, finished, earlier=list(self.earlier))

    def note_accepted(self, controller: str, reply: UnitAccepted) -> None:
        """A controller took the inventory, which covers everything that it was not told of."""
        self.registered.add(controller)
        if self.registered == self.links.keys():
            self.earlier = []
        dropped = [row for row in reply.drop if self.rows.pop(row, None) is not None]
        for row in dropped:
            removed = RowsRemoved(self.name, partition_of(row), [row], RemovalReason.DROPPED)
            self.tell(Change("remove", [row]), removed)
        new = self.learn(reply.commits)
        covered = [change for change in self.changes if controller in change.waiting]
        for change in covered:
            elsewhere = change.kind == "create" and not set(reply.drop).isdisjoint(change.rows)
            self.answered(controller, change, PutPending("elsewhere") if elsewhere else None)
        if new:
            rows = sorted({row for known in new.values() for row in known})
            commits = {task: [rows.index(row) for row in known] for task, known in new.items()}
            self.tell(Change("learnt", rows), RowsConfirmed(self.name, rows, commits))

    def answered(self, controller: str, change: Change, reply: Any) -> None:
        """A controller heard of a change; None: from an inventory."""
        change.waiting.discard(controller)
        if change.failed:
            return
        if isinstance(reply, PeerRefused):
            if change.kind == "create":
                change.refusals.append(reply)
                if not change.waiting:
                    self.take_back(change)
            return
        if isinstance(reply, RowsAccepted):
            new = self.learn({task: [change.rows[k] for k in known] for task, known in reply.commits.items()})
            if new and self.passes_on:
                rows = sorted({row for known in new.values() for row in known})
                commits = {task: [rows.index(row) for row in known] for task, known in new.items()}
                self.tell(Change("learnt", rows), RowsConfirmed(self.name, rows, commits))
        if change.kind == "create":
            change.agreed += 1
            if not change.waiting:
                (self.take_back if change.refusals else self.confirm)(change)
        elif not change.waiting and change in self.changes:
            self.changes.remove(change)
            self.was_done.append(change)
            if change.kind == "commit":
                columns = sorted(outputs_of(change.task, change.rows[0]))
                self.journal.apply_change(OutputsWritten(self.name, change.task, change.rows, columns, [1], 1))

    passes_on = False
    """Whether commits that a controller tells with its confirmation reach others; see `UnitPuts._confirm_stored`."""

    def confirm(self, change: Change) -> None:
        """Every controller agreed: the second round."""
        change.kind = "confirm"
        commits: dict[str, list[int]] = {}
        for k, row in enumerate(change.rows):
            for task in self.rows[row].commits if row in self.rows else ():
                commits.setdefault(task, []).append(k)
        self.tell(change, RowsConfirmed(self.name, change.rows, commits))
        for row in change.rows:
            if row in self.rows:
                self.rows[row].unconfirmed = False
        self.sweep()

    def take_back(self, change: Change) -> None:
        """A put of new rows failed."""
        change.failed = True
        self.changes.remove(change)
        self.failed.append(change)
        gone = [row for row in change.rows if self.rows.pop(row, None) is not None]
        if gone:
            removed = RowsRemoved(self.name, partition_of(gone[0]), gone, RemovalReason.REFUSED)
            self.tell(Change("remove", gone), removed)

    def fence(self, fence: OrderFenceRows | OrderFenceTask) -> None:
        """Refuse commits under void leases."""
        if isinstance(fence, OrderFenceTask):
            self.floors[fence.task] = (fence.token, frozenset(fence.alive))
            return
        for row in fence.rows:
            if row in self.rows:
                fences = self.rows[row].fences
                fences[fence.task] = max(fence.token, fences.get(fence.task, 0))

    def learn(self, commits: dict[str, list[int]]) -> dict[str, list[int]]:
        """Controllers know of commits; returns what is new, of confirmed rows."""
        new: dict[str, list[int]] = {}
        for task, rows in commits.items():
            for row in rows:
                kept = self.rows.get(row)
                if kept is not None and task not in kept.commits:
                    kept.commits[task] = LEARNT
                    if not kept.unconfirmed:
                        new.setdefault(task, []).append(row)
        if new:
            self.journal.apply_change(confirmation(self.name, new))
        self.sweep()
        return new

    def sweep(self) -> None:
        """Rows that every task is done with go."""
        for row, kept in list(self.rows.items()):
            if not kept.unconfirmed and len(kept.commits) == len(NAMES):
                self.finished[row] = kept.commits
                del self.rows[row]


def outputs_of(task: str, row: int) -> frozenset[str]:
    """Return what a task writes for a row; one writes for some rows, and declares nothing."""
    if task == "judge":
        return frozenset({"verdict"}) if row % 2 == 0 else frozenset()
    return next(spec.outputs for spec in ALL_TASKS if spec.name == task)
