"""Finished samples of a checkpoint: put back when their group is admitted again, instead of being generated anew.

They are a cache, never the truth about admission: which groups come, and in which steps, is `AdmissionState`'s; a row
that is not used here is generated again. `KeepRule` decides (pure); `SavedRows` reads the snapshot.

    snapshot of step 20    row 88: partition 21, versions 20..20, columns prompts tokens rewards ref_log_probs
    admitted for step 21   put with all columns; rollout and ref are done with it
    bound 0, step 22       (22 - 1) - 20 > 0: generated again
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncflow.errors import CheckpointError
from tq.columns import Column
from tq.policies import TaskSpec
from tq.snapshot import ChunkPlace, SnapshotChunk, chunk_places, read_manifest
from workers.admission.state import AdmittedGroup

logger = logging.getLogger(__name__)

_VERSIONS = "versions"
"""Column with the version of every token's weights."""


@dataclass(frozen=True)
class SavedRow:
    """What is known of a saved row without its values.

    Attributes:
        partition: the step that it was admitted for.
        columns: that it has.
        oldest, newest: versions of the weights that generated it.
    """

    partition: int
    columns: frozenset[str]
    oldest: int
    newest: int


@dataclass(frozen=True)
class Kept:
    """What of a row is put back.

    Attributes:
        columns: names.
        tasks: that are done with it.
    """

    columns: frozenset[str]
    tasks: frozenset[str]


@dataclass(frozen=True)
class KeepRule:
    """Which saved rows are worth keeping, and what of them. Pure.

    Attributes:
        saved_step: step of the checkpoint: later weights were abandoned.
        max_staleness: of a row by the step that it is admitted for.
        tasks: of the queue as it is now.
        generation: the task that generates: a row that it is not done with is a prompt.
        first: columns that admission puts.
        usable: (partition that a row was saved in, step that it is admitted for) -> columns whose values still hold.
    """

    saved_step: int
    max_staleness: int
    tasks: Sequence[TaskSpec]
    generation: str
    first: frozenset[str]
    usable: Callable[[int, int], Collection[str]]

    def kept(self, row: SavedRow, *, step: int) -> Kept | None:
        """Return what of a row is kept when its group is admitted for `step`; None: it is generated again."""
        if row.newest > self.saved_step or (step - 1) - row.oldest > self.max_staleness:
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
    """The rows of one snapshot, by number. Used by one thread."""

    def __init__(
        self,
        directory: Path,
        rule: KeepRule,
        *,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        """Args:
        directory: of the snapshot; nothing is read yet.
        rule: what is kept.
        warn: is told when the snapshot is missing or damaged: nothing of it is used then.
        """
        self._directory = directory
        self._rule = rule
        self._warn = warn
        self._found: dict[int, _Found] | None = None

    def take(self, groups: Sequence[AdmittedGroup], *, most: int) -> Iterator[SnapshotChunk]:
        """Yield what is kept of groups that are admitted, in pieces that can be put; each row once.

        Args:
            groups: with their steps.
            most: rows of a piece.
        """
        try:
            if self._found is None:
                self._found = self._index()
            yield from self._pieces(groups, most)
        except CheckpointError as error:
            self._warn(f"{error}; what it holds is generated again")
            self._found = {}

    def _pieces(self, groups: Sequence[AdmittedGroup], most: int) -> Iterator[SnapshotChunk]:
        alike: dict[tuple[str, int, int, Kept], list[tuple[_Found, int, int]]] = {}
        for group in groups:
            for number in group.rows:
                found = (self._found or {}).pop(number, None)
                kept = None if found is None else self._rule.kept(found.row, step=group.step)
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

    def _index(self) -> dict[int, _Found]:
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
