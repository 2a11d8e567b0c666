"""The lines of `ledger.jsonl`, for readers; `workers.records.ledger` makes them. Imports neither torch nor pydantic.

{"step": 3, "group": 17, ...}                                    trained in step 3
{"step": 3, "group": 18, "dead_letter": true, "replaced_by": 24} failed too often; known when step 3 was finished
{"step": 3, "group": 19, "filtered": true, "replaced_by": 25}    its rewards were all equal; known as above
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from asyncflow.decoding import json_decoder
from asyncflow.errors import ConfigError
from asyncflow.json_lines import LineReader, Lines
from asyncflow.run_files import LEDGER_FILE

if TYPE_CHECKING:
    from workers.settings.schedule import ScheduleConfig


class TrainedLine(msgspec.Struct, frozen=True):
    """A group that a step trained."""

    # The lineage and step that trained it
    lineage: int
    step: int
    admitted_step: int  # The step that it was admitted for; differs only with `schedule.fill: first_ready`
    group: int
    epoch: int  # Number of complete passes over the data before its own
    indices: list[int]  # Its global row indices, ascending
    versions: tuple[int, int]  # Steps of the weights that drew its oldest and its newest token
    staleness: int  # step - 1 - the oldest version
    prompt_hash: str  # xxh3-64 (hex) over the prompt's tokens (int64)
    # xxh3-64 (hex) over the rows in that order, of each its two lengths (int32), prompt and response (int64)
    token_hash: str
    time_s: float  # Seconds since the command started
    rewards: list[float | None] | None = None  # The rows' rewards, with `data.sampler`; None: scoring failed


class DeadLetterLine(msgspec.Struct, frozen=True):
    """A group that some task failed on too often: in this lineage it is part of no weights."""

    lineage: int  # The one that gave it up; a later one may train it, since a resumed run tries again
    step: int  # The last finished step when this became known
    admitted_step: int  # The step that it was admitted for
    group: int
    replaced_by: int  # Id of the group that took its place
    task: str  # The one that failed on it; "": unknown
    deliveries: int  # How often one of its rows came back
    time_s: float  # Seconds since the command started


class FilteredLine(msgspec.Struct, frozen=True):
    """A group whose rewards were all equal, so that another one took its place: it is in no weights of this run."""

    lineage: int  # The one that filtered it out; later ones skip it, too
    # `step`, `admitted_step`, `group`, `replaced_by`, `time_s`: see `DeadLetterLine`
    step: int
    admitted_step: int
    group: int
    replaced_by: int
    task: str  # The one that judged it
    time_s: float


ReplacedLine = DeadLetterLine | FilteredLine
LedgerLine = TrainedLine | DeadLetterLine | FilteredLine


class LedgerKey(msgspec.Struct, frozen=True):
    """The fields that say which groups were trained; all that a resume needs of a line."""

    step: int
    group: int
    dead_letter: bool = False
    filtered: bool = False

    @property
    def replaced(self) -> bool:
        return self.dead_letter or self.filtered


@dataclass(frozen=True)
class Ledger:
    file: Lines[LedgerLine]

    @cached_property
    def trained(self) -> list[tuple[int, TrainedLine]]:
        return [(number, line) for number, line in self.file.lines if isinstance(line, TrainedLine)]

    @cached_property
    def dead_letters(self) -> list[tuple[int, DeadLetterLine]]:
        return [(number, line) for number, line in self.file.lines if isinstance(line, DeadLetterLine)]

    @cached_property
    def filtered(self) -> list[tuple[int, FilteredLine]]:
        return [(number, line) for number, line in self.file.lines if isinstance(line, FilteredLine)]


def read_ledger(run_dir: Path) -> Ledger:
    """Read a run's ledger, which may still grow. Raises ConfigError if the file cannot be read."""
    return Ledger(LineReader(run_dir / LEDGER_FILE, _decode).read_lines())


def _decode(line: bytes) -> LedgerLine:
    if b'"dead_letter"' in line:
        return json_decoder(DeadLetterLine).decode(line)
    if b'"filtered"' in line:
        return json_decoder(FilteredLine).decode(line)
    return json_decoder(TrainedLine).decode(line)


def trained_groups(run_dir: Path, schedule: "ScheduleConfig", *, completed: int) -> frozenset[int]:
    """Return the ids of the groups that steps 1 .. `completed` trained; lines of later steps and a torn last line do
    not count.

    Usually these are the groups admitted for the steps, but not after dead letters or with `schedule.fill:
    first_ready`. Raises ConfigError if the ledger cannot be read, or does not name as many groups as these steps have.
    """
    path = run_dir / LEDGER_FILE
    lines = LineReader(path, json_decoder(LedgerKey).decode).read()
    groups = {line.group for line in lines if line.step <= completed and not line.replaced}
    expected = completed * schedule.rollout_batch_size
    if len(groups) != expected:
        raise ConfigError(
            f"{path}: names {len(groups)} groups of steps 1 to {completed}, not {expected}, so it is unknown which "
            f"ones are left; restore the file, or start a new run from the checkpoint's hf/, which `asyncflow export` "
            f"writes if it is not there (--set model.path=...)"
        )
    return frozenset(groups)


def filtered_groups(run_dir: Path, *, completed: int) -> frozenset[int]:
    """Return the ids of the groups known to be filtered out when step `completed` was finished. Raises ConfigError if
    the ledger cannot be read."""
    lines = LineReader(run_dir / LEDGER_FILE, json_decoder(LedgerKey).decode).read()
    return frozenset(line.group for line in lines if line.step <= completed and line.filtered)
