"""What the lines of `ledger.jsonl` mean, for whoever reads it. Torch-free; `workers.ledger` makes the lines.

{"step": 3, "group": 17, ...}                                    trained in step 3
{"step": 3, "group": 18, "quarantined": true, "replaced_by": 24} failed too often; known when step 3 was finished
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from workers.json_reader import Fields, ReadLines, TypedLines, read_json_lines, typed_lines

LEDGER_FILE = "ledger.jsonl"


class TrainedLine(msgspec.Struct, frozen=True):
    """A group that a step trained.

    Attributes:
        lineage, step: that trained it.
        admitted_step: that it was admitted for; another one only with `schedule.fill: first_ready`.
        group: id.
        epoch: passes over the data before the one that it belongs to.
        indices: its global row indices, ascending.
        versions: steps of the weights that drew its oldest and its newest token.
        staleness: step - 1 - the oldest of them.
        prompt_hash: xxh3-64 (hex) over the prompt's tokens (int64).
        token_hash: xxh3-64 (hex) over the rows in that order, of each its two lengths (int32), prompt and response
            (int64).
        time_s: seconds since the command started.
    """

    lineage: int
    step: int
    admitted_step: int
    group: int
    epoch: int
    indices: list[int]
    versions: tuple[int, int]
    staleness: int
    prompt_hash: str
    token_hash: str
    time_s: float


class QuarantinedLine(msgspec.Struct, frozen=True):
    """A group that some task failed on too often: in this lineage it is in no weights.

    Attributes:
        lineage: that gave it up; a later one may train it, since a resumed run tries again.
        step: that was finished when this became known.
        admitted_step: whose place it had.
        group: id.
        replaced_by: id of the group that has its place now.
        task: that failed on it; "": unknown.
        deliveries: how often one of its rows came back.
        time_s: seconds since the command started.
    """

    lineage: int
    step: int
    admitted_step: int
    group: int
    replaced_by: int
    task: str
    deliveries: int
    time_s: float


@dataclass(frozen=True)
class Ledger:
    """A ledger file; a malformed line is one of neither kind."""

    file: ReadLines
    trained: TypedLines[TrainedLine]
    quarantined: TypedLines[QuarantinedLine]


def read_ledger(run_dir: Path) -> Ledger:
    """Read a run's ledger, which may still be written.

    Raises:
        ConfigError: the file cannot be read.
    """
    file = read_json_lines(run_dir / LEDGER_FILE)
    return Ledger(
        file,
        typed_lines([line for line in file.objects if not is_quarantine(line[1])], TrainedLine),
        typed_lines([line for line in file.objects if is_quarantine(line[1])], QuarantinedLine),
    )


def is_quarantine(fields: Fields) -> bool:
    """Whether a line of the ledger names a group that was not trained."""
    return fields.get("quarantined") is True
