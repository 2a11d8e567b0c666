"""What a controller remembers beyond its process: facts are durable before they are acted on or told.

Shell of `DurableMark`; used by `ControllerService` and, through it, by admission. Thread-safe.
"""

import threading
from collections.abc import Callable, Collection, Iterator

from tq.config import ScheduleConfig
from tq.control.admission import AdmissionMark, AdmissionState
from tq.control.durable_mark import KEPT_PARTITIONS, DurableMark, Finished
from tq.control.events import Event, RowsFinished, RowsLost, RowsQuarantined
from tq.control.row_set import RowSet
from tq.messages import CloseWriting, OpenPartition, PublishVersion, RowRecords, Stop


class Memory:
    """The facts of one controller, as they were saved last."""

    def __init__(self, durable: DurableMark, *, version: int) -> None:
        """Recall.

        Args:
            durable: reads and writes.
            version: step of the weights at the start, at least.
        """
        self._durable = durable
        self._lock = threading.Lock()
        self._saving_losses, self._saving_finished = threading.Lock(), threading.Lock()
        self._saving_removed = threading.Lock()
        """Taken before the facts are asked for, so that those of the latest moment are saved last."""
        self._mark = durable.load()
        self._finished = {partition: rows.parts() for partition, rows in durable.load_finished().items()}
        self._removed = {partition: rows.parts() for partition, rows in durable.load_removed().items()}
        self._unsaved: set[tuple[int, int]] = set()
        """Of those, (partition, part) that the store does not have yet: a save may fail."""
        self._mark.newest_version = max(version, self._mark.newest_version)

    @property
    def newest_version(self) -> int:
        """Newest published weights."""
        return self._mark.newest_version

    def admission_state(
        self,
        schedule: ScheduleConfig,
        *,
        version: int,
        last_step: int,
        trained: Collection[int] = (),
        filtered: Collection[int] = (),
        max_filtered: int | None = None,
    ) -> AdmissionState:
        """Return where admission stands; on a first start it begins behind `version`, or behind `trained` groups."""
        mark = self._mark.admission or AdmissionMark(version, version + 1)
        return AdmissionState.from_mark(
            mark, schedule, last_step=last_step, trained=trained, filtered=filtered, max_filtered=max_filtered
        )

    def events(self) -> Iterator[Event]:
        """Return what a new control state must be told."""
        for partition, parts in self._removed.items():
            for rows in parts.values():
                yield RowsQuarantined(partition, rows)
        for partition, num_rows in self._mark.partitions.items():
            yield OpenPartition(partition, num_rows)
        for partition, parts in self._finished.items():
            for rows in parts.values():
                yield RowsFinished(partition, rows)
        if lost := self._durable.load_lost():
            yield RowsLost(tuple(lost))
        if self._mark.writing_closed:
            yield CloseWriting()
        if self._mark.stopped:
            yield Stop()

    def remember(self, event: OpenPartition | PublishVersion | Stop | CloseWriting) -> None:
        """Make durable what the control state was told, or found out."""
        with self._lock:
            match event:
                case OpenPartition():
                    self._mark.partitions[event.partition] = event.num_rows
                case PublishVersion():
                    self._mark.newest_version = max(self._mark.newest_version, event.step)
                case Stop():
                    self._mark.stopped = True
                case CloseWriting():
                    self._mark.writing_closed = True
            self._durable.save(self._mark)

    def remember_admission(self, mark: AdmissionMark) -> None:
        """Admission goes on."""
        with self._lock:
            self._mark.admission = mark
            self._durable.save(self._mark)

    def remember_finished(self, newly: Callable[[], Finished]) -> None:
        """Units go, or forget freed rows: a restarted controller must not wait for them, nor take them for new.

        Args:
            newly: takes the rows that were finished since it was called last.
        """
        with self._saving_finished:
            self._save_finished(newly())

    def clear(self, partition: int) -> None:
        """A partition was cleared: it begins anew."""
        with self._saving_finished:
            self._forget_finished(partition)
        with self._lock:
            if self._mark.partitions.pop(partition, None) is not None:
                self._durable.save(self._mark)

    @property
    def remembering_losses(self) -> bool:
        """Whether somebody is just writing them: what is in there is not durable yet."""
        return self._saving_losses.locked()

    def remember_losses(self, state: Callable[[], tuple[Finished, dict[int, list[RowRecords]]] | None]) -> None:
        """Rows were lost, or tasks are done with some of them: before anybody hears of it.

        Args:
            state: takes what was finished lately, and the parts of the losses that changed, of one moment (a lost row
                that gets finished is known to no unit), or None when that has been saved since.
        """
        with self._saving_losses, self._saving_finished:
            facts = state()
            if facts is not None:
                self._save_finished(facts[0])
                for part, records in facts[1].items():
                    self._durable.save_lost(part, records)

    def remember_removed(self, partition: int, state: Callable[[int], RowSet]) -> None:
        """A partition lacks rows, or was cleared and has none that it lacks.

        Args:
            partition: which one.
            state: returns the rows that it lacks now; somebody else may have saved later ones than caused this call.
        """
        with self._saving_removed:
            self._save_removed(partition, state(partition).parts())
            for old in sorted(self._removed)[:-KEPT_PARTITIONS]:
                self._save_removed(old, {})

    def _save_removed(self, partition: int, now: dict[int, RowSet]) -> None:
        before = self._removed.pop(partition, {})
        if now:
            self._removed[partition] = now
        for part in now.keys() | before.keys():
            rows = now.get(part, RowSet())
            if rows != before.get(part, RowSet()):
                self._durable.save_removed(partition, part, rows)

    def _save_finished(self, newly: Finished) -> None:
        for partition, rows in newly.items():
            parts = self._finished.setdefault(partition, {})
            for part, grown in rows.parts().items():
                parts.setdefault(part, RowSet()).merge(grown)
                self._unsaved.add((partition, part))
        for partition in sorted(self._finished)[:-KEPT_PARTITIONS]:
            self._forget_finished(partition)
        for partition, part in sorted(self._unsaved):
            self._durable.save_finished(partition, part, self._finished[partition][part])
            self._unsaved.discard((partition, part))

    def _forget_finished(self, partition: int) -> None:
        parts = self._finished.pop(partition, {})
        self._unsaved.difference_update([(partition, part) for part in parts])
        self._durable.forget_finished(partition, parts)
