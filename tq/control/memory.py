"""What a controller remembers beyond its process: facts are durable before they are acted on or told.

Shell of `DurableMark`; used by `ControllerService` and, through it, by admission. Thread-safe.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping

from tq.config import ScheduleConfig
from tq.control.admission import AdmissionMark, AdmissionState
from tq.control.durable_mark import DurableMark
from tq.control.events import Event, Quarantined, RowsFinished, RowsLost
from tq.control.row_set import RowSet
from tq.messages import OpenPartition, PublishVersion, RowRecords, Stop

Finished = Mapping[int, RowSet]
"""Partition -> rows that all tasks are done with."""


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
        self._saving_losses = threading.Lock()
        self._mark = durable.load()
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
        for partition, num_rows in self._mark.partitions.items():
            yield OpenPartition(partition, num_rows)
        for partition, rows in self._mark.finished.items():
            yield RowsFinished(partition, RowSet.of_spans(rows))
        if lost := self._durable.load_lost():
            yield RowsLost(tuple(lost))
        if self._mark.stopped:
            yield Stop()

    def remember(self, event: OpenPartition | PublishVersion | Stop) -> None:
        """Somebody said so."""
        with self._lock:
            match event:
                case OpenPartition():
                    self._mark.partitions[event.partition] = event.num_rows
                case PublishVersion():
                    self._mark.newest_version = max(self._mark.newest_version, event.step)
                case Stop():
                    self._mark.stopped = True
            self._durable.save(self._mark)

    def remember_admission(self, mark: AdmissionMark) -> None:
        """Admission goes on."""
        with self._lock:
            self._mark.admission = mark
            self._durable.save(self._mark)

    def remember_finished(self, finished: Finished) -> None:
        """A unit went away, and with it what it knew of freed rows: a restarted controller must not wait for them."""
        if not any(finished.values()):
            return
        with self._lock:
            for partition, rows in finished.items():
                known = RowSet.of_spans(self._mark.finished.get(partition, ()))
                known.merge(rows)
                self._mark.finished[partition] = known.spans()
            self._durable.save(self._mark)

    def clear(self, partition: int) -> None:
        """A partition was cleared: its rows may be put anew."""
        with self._lock:
            if self._mark.finished.pop(partition, None) is not None:
                self._durable.save(self._mark)

    @property
    def remembering_losses(self) -> bool:
        """Whether somebody is just writing them: what is in there is not durable yet."""
        return self._saving_losses.locked()

    def remember_losses(self, state: Callable[[], "tuple[Finished, list[RowRecords]] | None"]) -> None:
        """Rows were lost, or tasks are done with some of them: before anybody hears of it.

        Args:
            state: returns what is finished and what is lost, of one moment (a lost row that gets finished is known to
                no unit), or None when that has been saved since. Called one at a time: the newest is saved last.
        """
        with self._saving_losses:
            facts = state()
            if facts is not None:
                self.remember_finished(facts[0])
                self._durable.save_lost(facts[1])

    def shrink(self, quarantined: Quarantined) -> None:
        """Nobody puts a replacement: the partition has fewer rows from now on, also after a restart."""
        with self._lock:
            if quarantined.partition in self._mark.partitions:
                self._mark.partitions[quarantined.partition] -= quarantined.num_rows
                self._durable.save(self._mark)
