"""Puts new prompts into the queue: the shell around `AdmissionState`, a queue client in a thread of the lead's process.

Published versions, rows lost with a storage unit, groups that became dead letters, fed rows and pauses wake it. The
mark is durable before the rows of a group are put, so no group id is ever given out twice. When a run resumes from a
checkpoint, finished samples in it (`SavedRows`) replace prompts as their groups are admitted; rows put again after a
loss are always prompts.
"""

import contextlib
import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from asyncflow.errors import CheckpointError, RowsExist, TooManyFailures
from asyncflow.process import ServiceThreads
from asyncflow.repeated import RepeatedWarnings
from asyncflow.transport.meeting import Credentials
from tq.client.queue_client import QueueClient
from tq.columns import Column
from tq.config import QueueConfig
from tq.control.controller import AdmissionPlace, MakeAdmission
from tq.control.events import GroupRemoved, PutAgain
from tq.policies import StalenessRule, TaskSpec
from tq.refill import AdmissionMark, Refill
from tq.snapshot import ChunkPlace, SnapshotChunk, chunk_places, read_manifest
from workers.admission.admission_state import AdmissionState, AdmittedGroup
from workers.data.feed_file import Fed, FeedFile

# Finished samples of a checkpoint are put back when their group is admitted again, instead of being regenerated.
#
# They are a cache and never decide admission: `AdmissionState` decides which groups come in which steps, and a row that
# is not used here is generated again. `KeepRule` decides (pure); `SavedRows` reads the snapshot.
#
#     snapshot of step 20    row 88: partition 21, versions 20..20, columns prompts tokens rewards ref_log_probs
#     admitted for step 21   put with all columns; rollout and ref are done with it
#     bound 0, step 22       (22 - 1) - 20 > 0: generated again

logger = logging.getLogger(__name__)

# The column with the weight version of every token.
_VERSIONS = "versions"


@dataclass(frozen=True)
class SavedRow:
    """What is known of a saved row without reading its values."""

    partition: int  # The step that it was admitted for
    columns: frozenset[str]
    # `oldest`, `newest`: weight versions that generated its tokens
    oldest: int
    newest: int


@dataclass(frozen=True)
class Kept:
    columns: frozenset[str]
    tasks: frozenset[str]  # Tasks that are done with the row


@dataclass(frozen=True)
class KeepRule:
    """Decides which saved rows are kept, and which of their columns. Pure."""

    saved_step: int  # Step of the checkpoint; any later weights were abandoned
    gate: StalenessRule  # Of the step that a row is admitted for
    tasks: Sequence[TaskSpec]  # The queue's current tasks
    generation: str  # The generating task; a row that it is not done with is only a prompt
    first: frozenset[str]  # Columns that admission puts
    # (partition that a row was saved in, step that it is admitted for) -> columns whose values still hold
    usable: Callable[[int, int], Collection[str]]

    def decide_kept(self, row: SavedRow, *, step: int) -> Kept | None:
        """Return what to keep of a row whose group is admitted for `step`; None: generate it again."""
        if row.newest > self.saved_step or row.oldest < self.gate.oldest_version(step):
            return None
        columns = row.columns.intersection(self.usable(row.partition, step))
        done = [task for task in self.tasks if task.outputs and task.outputs <= columns]
        names = frozenset(task.name for task in done)
        if self.generation not in names or not self.first <= columns:
            return None
        return Kept(self.first.union(*(task.outputs for task in done)), names)


@dataclass(frozen=True)
class _Found:
    place: ChunkPlace
    position: int
    row: SavedRow


class SavedRows:
    """The rows of one snapshot, by row number. Used by one thread; reads nothing before the first `take_groups`. `warn`
    is called if the snapshot is missing or damaged; then nothing of it is used."""

    def __init__(
        self,
        directory: Path,
        rule: KeepRule,
        *,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self._directory = directory
        self._rule = rule
        self._warn = warn
        self._found: dict[int, _Found] | None = None

    def take_groups(self, groups: Sequence[AdmittedGroup], *, most: int) -> Iterator[SnapshotChunk]:
        """Yield what is kept of admitted groups, in pieces of at most `most` rows that can be put; each row once."""
        try:
            if self._found is None:
                self._found = self._index_rows()
            yield from self._make_chunks(groups, most)
        except CheckpointError as error:
            self._warn(f"{error}; its samples are generated again")
            self._found = {}  # use nothing of it from now on

    def _make_chunks(self, groups: Sequence[AdmittedGroup], most: int) -> Iterator[SnapshotChunk]:
        alike: dict[tuple[str, int, int, Kept], list[tuple[_Found, int, int]]] = {}
        for group in groups:
            for number in group.rows:
                found = (self._found or {}).pop(number, None)
                kept = None if found is None else self._rule.decide_kept(found.row, step=group.step)
                if found is not None and kept is not None:
                    key = (str(found.place.path), found.place.number, group.step, kept)
                    alike.setdefault(key, []).append((found, number, group.group))
        for (_, _, step, kept), members in alike.items():
            place = members[0][0].place
            chunk = place.read(kept.columns)
            for start in range(0, len(members), most):
                part = members[start : start + most]
                positions = [found.position for found, _, _ in part]
                yield SnapshotChunk(
                    partition=step,
                    group_size=place.record.group_size,
                    rows=[number for _, number, _ in part],
                    groups=[group for _, _, group in part],
                    columns={name: column.select(positions) for name, column in chunk.columns.items()},
                    commits={task: list(range(len(part))) for task in sorted(kept.tasks)},
                )

    def _index_rows(self) -> dict[int, _Found]:
        read_manifest(self._directory)
        found: dict[int, _Found] = {}
        for place in chunk_places(self._directory):
            record = place.record
            columns = frozenset(header.name for header in record.columns)
            if _VERSIONS not in columns:
                continue
            versions = place.read([_VERSIONS]).columns[_VERSIONS]
            for position, (number, (oldest, newest)) in enumerate(zip(record.rows, _extremes(versions), strict=True)):
                found[number] = _Found(place, position, SavedRow(record.partition, columns, oldest, newest))
        logger.info("%s: %d finished samples", self._directory, len(found))
        return found


def _extremes(versions: Column) -> Iterator[tuple[int, int]]:
    oldest, newest = versions.extremes()
    return zip(oldest.tolist(), newest.tolist(), strict=True)


_GROUPS_PER_PUT = 64
# (group ids, weight version that had to be published)
Draw = Callable[[Sequence[int], int], None]
# (last step of the run, rows left that fill no step)
FeedEnded = Callable[[int, int], None]


class PauseChanged:
    """The user asked for a pause, or for its end."""


@dataclass(frozen=True)
class Pause:
    """Pauses of a run: while one lasts, no step is admitted. Steps that were admitted before are completed, refills
    included, so that everything then rests at the end of a step.

    Args:
        asked: whether there is one now.
        report: called with (last admitted step, newest version) after each event of a pause, and with None at its end.
        watch: takes what is to be called when a pause begins or ends.
    """

    asked: Callable[[], bool] = lambda: False
    report: Callable[[tuple[int, int] | None], None] = lambda steps: None
    watch: Callable[[Callable[[], None]], None] = lambda call: None


NO_PAUSES = Pause()
AdmissionEvent = int | PutAgain | GroupRemoved | Fed | PauseChanged
"""A published version, lost rows, a removed group, fed rows, or a pause that begins or ends."""


class PromptSource(Protocol):
    def columns(self, groups: Sequence[AdmittedGroup]) -> Mapping[str, Column]:
        """Return the first columns of all rows of `groups`, group by group."""


class PromptAdmitter:
    """Owns the admission state and its thread; closes its client.

    Args:
        num_units: storage units; a step is put in at least as many parts, so that it spreads over them.
        save: makes a mark durable before it returns.
        saved: finished samples of the checkpoint that the run resumes from.
        draw: durably records which tasks new groups have, before any other effect of their admission.
        feed_ended: called once the weights of the last step that a feed has rows for are published; then the queue
            stops.
        last_failure: returns why the last failed rollout failed; "" if none did.
        pause: of the run; `PauseChanged` says that it begins or ends.
    """

    def __init__(
        self,
        state: AdmissionState,
        client: QueueClient,
        prompts: PromptSource,
        *,
        num_units: int,
        save: Callable[[AdmissionMark], None],
        threads: ServiceThreads,
        saved: SavedRows | None = None,
        draw: Draw = lambda groups, version: None,
        feed_ended: FeedEnded = lambda last_step, num_left: None,
        last_failure: Callable[[], str] = lambda: "",
        pause: Pause = NO_PAUSES,
    ) -> None:
        self._draw = draw
        self._pause = pause
        self._told_of_pause = False
        self._last_failure = last_failure
        self._warnings = RepeatedWarnings(logger)
        self._feed_ended = feed_ended
        self._state = state
        self._client = client
        self._prompts = prompts
        self._num_units = num_units
        self._save = save
        self._threads = threads
        self._saved = saved
        self._events: queue.SimpleQueue[AdmissionEvent | None] = queue.SimpleQueue()
        self._refills = tuple(state.list_refills())
        self._missing: list[AdmittedGroup] = []
        self._reopened: list[int] = []
        # Removed groups that wait for a row of the feed to replace them.
        self._unreplaced: list[GroupRemoved] = []
        self._published = self._over = False
        self.started = False
        self._thread: threading.Thread | None = None

    @property
    def admitted_groups(self) -> int:
        """High-water mark of the group ids."""
        return self._state.admitted_groups

    @property
    def refills(self) -> tuple[Refill, ...]:
        """The groups replaced so far, in order. Durable, so a later incarnation starts with the same ones."""
        return self._refills

    def start(self, known_rows: Mapping[int, Collection[int]] | None) -> None:
        """Start the thread. `known_rows`: after a restart, step -> rows that exist or are finished; admitted rows
        missing from it are put again. None: the first start."""
        self.started = True
        self._published = known_rows is not None
        if known_rows is not None:
            self._missing = self._state.missing_groups(known_rows)
            self._reopened = list(self._state.untrained_steps())
        self._thread = self._threads.start(self._admit_until_closed, name="admission")

    def add_event(self, event: AdmissionEvent) -> None:
        """Queue an event. Any thread may call."""
        self._events.put(event)

    def close(self) -> None:
        self._events.put(None)
        if self._thread is not None:
            self._thread.join(timeout=5)
        self._client.close()

    def _admit_until_closed(self) -> None:
        for step in self._reopened:  # the mark is saved before a step is opened, so some may not have been opened
            self._open_step(step)
        self._put_again(self._missing)
        self._admit_steps()
        self._report_pause()
        while (event := self._events.get()) is not None:
            self._handle_event(event)
            self._report_pause()
            self._end_with_feed()

    def _handle_event(self, event: AdmissionEvent) -> None:
        match event:
            case int():
                self._published = True
                self._state.note_published(event)
                self._admit_steps()
            case PauseChanged():
                self._admit_steps()
            case PutAgain():
                self._put_again(self._state.groups_of_rows(event.rows))
            case Fed():
                self._state.note_fed(event.num_rows, ended=event.ended)
                waiting, self._unreplaced = self._unreplaced, []
                for removed in waiting:
                    self._handle_event(removed)
                self._admit_steps()
            case GroupRemoved() if not self._state.can_refill:
                self._unreplaced.append(event)
            case GroupRemoved():
                group = self._refill_group(event)
                if group is None:
                    return  # already replaced: two controllers reported it
                # The order matters: tasks and mark must be durable before the rows exist.
                self._draw([group.group], self._state.version)
                self._save(self._state.make_mark())
                self._refills = tuple(self._state.list_refills())
                if not event.cause.filtered:
                    cause = f"after {event.cause.deliveries} deliveries to {event.cause.task}"
                    then = f"group {group.group} takes its place in step {event.partition}"
                    self._warnings.log_warning(f"group {event.group} became a dead letter {cause}; {then}")
                self._put_new([group])

    def _refill_group(self, event: GroupRemoved) -> AdmittedGroup | None:
        try:
            return self._state.refill_group(event.partition, event.group, event.cause)
        except TooManyFailures as error:
            why = self._last_failure() or "see `last error` of `asyncflow status`, and the logs of that task's role"
            raise TooManyFailures(f"{error}; the last reason: {why}; correct that and resume") from error

    def _report_pause(self) -> None:
        asked = self._pause.asked()
        if asked or self._told_of_pause:
            self._pause.report((self._state.last_admitted_step, self._state.version) if asked else None)
        self._told_of_pause = asked

    def _admit_steps(self) -> None:
        if self._pause.asked():
            return
        for step in self._state.admit_steps():
            self._draw([group.group for group in self._state.groups_of(step)], self._state.required_version(step))
            # Durable before the rows exist, so that no group id is ever given out twice.
            self._save(self._state.make_mark())
            self._open_step(step)
            self._put_new(self._state.groups_of(step))

    def _end_with_feed(self) -> None:
        """Stop the queue after the last step, but not while the trainer still sends the weights that it starts with."""
        last_step, may = self._state.ended_at, self._published and not self._over
        if may and last_step is not None and self._state.version >= last_step:
            self._over = True
            self._feed_ended(last_step, self._state.num_left)
            self._client.stop()

    def _open_step(self, step: int) -> None:
        self._client.open_partition(step, sum(len(group.rows) for group in self._state.groups_of(step)))

    def _put_new(self, groups: Sequence[AdmittedGroup]) -> None:
        done: set[int] = set()
        most = self._groups_per_put(len(groups)) * self._state.group_size
        for piece in () if self._saved is None else self._saved.take_groups(groups, most=most):
            self._client.put_rows(
                piece.columns,
                partition=piece.partition,
                rows=piece.rows,
                groups=piece.groups,
                group_size=piece.group_size,
                commits=piece.commits,
            )
            done.update(piece.rows)
        if done:
            logger.info("%d finished samples of the checkpoint are used", len(done))
            left = [(group, tuple(row for row in group.rows if row not in done)) for group in groups]
            groups = [AdmittedGroup(group.group, group.step, rows) for group, rows in left if rows]
        self._put_groups(groups)

    def _put_again(self, groups: Sequence[AdmittedGroup]) -> None:
        """Put rows that were in the queue before. A returning unit may have brought some of them back."""
        try:
            self._put_groups(groups)
        except RowsExist:
            for group in groups:
                for row in group.rows:
                    with contextlib.suppress(RowsExist):
                        self._put_groups([AdmittedGroup(group.group, group.step, (row,))])

    def _put_groups(self, groups: Sequence[AdmittedGroup]) -> None:
        by_step: dict[int, list[AdmittedGroup]] = defaultdict(list)
        # Some of these rows exist: put the others one by one.
        for group in groups:
            by_step[group.step].append(group)
        for step, members in by_step.items():
            chunk = self._groups_per_put(len(members))
            for start in range(0, len(members), chunk):
                part = members[start : start + chunk]
                self._client.put_rows(
                    dict(self._prompts.columns(part)),
                    partition=step,
                    rows=[row for group in part for row in group.rows],
                    groups=[group.group for group in part for _ in group.rows],
                    group_size=self._state.group_size,
                )

    def _groups_per_put(self, num_groups: int) -> int:
        return max(1, min(_GROUPS_PER_PUT, -(-num_groups // self._num_units)))


def prompt_admission(
    credentials: Credentials,
    name: str,
    prompts: PromptSource,
    state: AdmissionState,
    *,
    config: QueueConfig,
    saved: SavedRows | None = None,
    draw: Draw = lambda groups, version: None,
    feed: FeedFile | None = None,
    feed_ended: FeedEnded = lambda last_step, num_left: None,
    last_failure: Callable[[], str] = lambda: "",
    pause: Pause = NO_PAUSES,
) -> MakeAdmission:
    """Return the factory that a controller calls once to make its admission; see `PromptAdmitter`.

    `state` is that of a first start; later starts restore the controller's mark. `feed` reports new rows to admission.
    """

    def make(place: AdmissionPlace) -> PromptAdmitter:
        now = state if place.mark is None else state.restore_mark(place.mark)
        now.note_published(place.version)
        admitter = PromptAdmitter(
            now,
            QueueClient(credentials, name, config=config, attempt=place.starts),
            prompts,
            num_units=config.num_storage_units,
            save=place.save,
            threads=place.threads,
            saved=saved,
            draw=draw,
            feed_ended=feed_ended,
            last_failure=last_failure,
            pause=pause,
        )
        pause.watch(lambda: admitter.add_event(PauseChanged()))
        if feed is not None:
            feed.watch(admitter.add_event)
        return admitter

    return make
