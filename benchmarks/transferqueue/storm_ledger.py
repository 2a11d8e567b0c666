"""What the clients of a storm did, line by line in append-only files, and the verdict over all lines.

    producer    put     rows     before rows are put         put_done     it was confirmed, or they were there already
                reput   rows     before lost rows are put again
    consumer    intent  rows     before an ack               confirmed    the queue confirmed it: this is THE ack
                                                             fenced   the queue refused it: another consumer has the row
                seen    rows     with which token their score was written
                corrupt rows     what came is not what was put

A client that is killed between an intent and what follows leaves it open: only the queue knows whether that ack counts.
If it does, nobody gets the row again; if not, somebody else confirms it. So at the end every row must have either one
confirmed ack or, without any, an open intent.

A refusal also leaves the intent open if the service that took the first try was killed before it answered (`Kill`): its
successor does not know the lease. If outputs of that try were seen, it counted.
"""

import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec


class Deed(StrEnum):
    """Kinds of records."""

    PUT = "put"
    PUT_DONE = "put_done"
    REPUT = "reput"
    INTENT = "intent"
    CONFIRMED = "confirmed"
    FENCED = "fenced"
    SEEN = "seen"
    CORRUPT = "corrupt"


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One line. `token` is the lease's; for `seen` the one that wrote the score. Puts have neither task nor token.

    Intents, and what follows them, name the `unit` that has the rows.
    """

    deed: Deed
    rows: list[int]
    task: str = ""
    token: int = 0
    at: float = 0.0
    """Seconds on the host's monotonic clock."""
    unit: str = ""


@dataclass(frozen=True)
class Kill:
    """A service got SIGKILL at a moment between `since` and `until` (s, the clock of `Record.at`)."""

    service: str
    since: float
    until: float


@dataclass
class Verdict:
    """What the records prove.

    Attributes:
        rows: put and confirmed.
        lost: (row, task) without an ack.
        twice: acks beyond the first, except repetitions of work whose result went with a unit.
        corrupt: rows that came different from how they were put, or with a score that had been refused.
        redone: acks beyond the first where the task's outputs were lost with a unit and the row was put again.
        open_intents: (row, task) whose only ack came from a client that died before it heard the answer, or went to a
            unit that died before it gave one.
        fenced: (row, task) acks that the queue refused.
        deliveries: (row, task) in hand of a consumer right before an ack.
    """

    rows: int = 0
    lost: int = 0
    twice: int = 0
    corrupt: int = 0
    redone: int = 0
    open_intents: int = 0
    fenced: int = 0
    deliveries: int = 0
    examples: list[str] = field(default_factory=list)

    def blame(self, text: str) -> None:
        """Keep the first few of what went wrong."""
        if len(self.examples) < 20:
            self.examples.append(text)


class LedgerFile:
    """Appends records; a line is in the file when `write` returns, whatever happens to the process afterwards."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, record: Record) -> None:
        """Append one line."""
        line = msgspec.json.encode(msgspec.structs.replace(record, at=time.monotonic()))
        os.write(self._descriptor, line + b"\n")


def read_ledger(path: Path) -> Iterator[Record]:
    """Yield the records of a file; nothing when it does not exist yet."""
    if path.exists():
        decoder = msgspec.json.Decoder(Record)
        *lines, _ = path.read_bytes().split(b"\n")  # the last one may just be written
        for line in lines:
            yield decoder.decode(line)


def history(directory: Path, row: int) -> list[str]:
    """Return what happened to a row, in order of time, to look for the cause of a fault."""
    found = [
        (record.at, f"{record.at:.3f} {path.stem}: {record.deed} {record.task} {record.token:x}")
        for path in directory.glob("*.ledger")
        for record in read_ledger(path)
        if row in record.rows
    ]
    kills = directory / "kills.log"
    lines = kills.read_text().splitlines() if kills.exists() else []
    found += [(float(line.split()[0]), line) for line in lines if "storage-" in line or "controller-" in line]
    return [line for _, line in sorted(found)]


def unfinished_puts(records: Iterable[Record]) -> tuple[list[list[int]], int]:
    """Return (puts that nobody knows the end of, newest row number or -1) of a producer that died."""
    unknown: dict[int, list[int]] = {}
    newest = -1
    for record in records:
        if record.deed is Deed.PUT:
            unknown[record.rows[0]] = record.rows
            newest = max(newest, *record.rows)
        elif record.deed is Deed.PUT_DONE:
            unknown.pop(record.rows[0], None)
    return list(unknown.values()), newest


@dataclass
class Accounts:
    """Rows so far. `acked`: by every task; where a client died over an ack, that one counts."""

    confirmed: set[int]
    acked: set[int]


def accounts(directory: Path, tasks: Collection[str]) -> Accounts:
    """Return what the ledgers of a storm say of rows; later ones may follow."""
    confirmed: set[int] = set()
    acked: dict[str, set[int]] = {task: set() for task in tasks}
    for path in directory.glob("*.ledger"):
        for record in read_ledger(path):
            if record.deed is Deed.PUT_DONE:
                confirmed.update(record.rows)
            elif record.deed in (Deed.INTENT, Deed.CONFIRMED):
                acked[record.task].update(record.rows)
    return Accounts(confirmed, set.intersection(*acked.values()))


def judge(
    records: Iterable[Record], *, tasks: Collection[str], writers: Collection[str], kills: Collection[Kill] = ()
) -> Verdict:
    """Return the verdict over all records of all clients.

    Args:
        records: those of one client in their order; clients in any order.
        tasks: every row must be acked once for each.
        writers: tasks with outputs: they are lost with a unit, so they may be made once more per put of the row.
        kills: of units and controllers.
    """
    verdict = Verdict()
    put: set[int] = set()
    reputs: Counter[int] = Counter()
    acks: dict[str, Counter[int]] = {task: Counter() for task in tasks}
    open_intents: dict[str, Counter[int]] = {task: Counter() for task in tasks}
    asked_at: dict[tuple[str, int, int], float] = {}
    refused: dict[tuple[int, int], Record] = {}
    doubtful: set[tuple[int, int]] = set()  # of these, writes that may have worked when they were first tried
    seen: dict[tuple[int, int], float] = {}
    for record in records:
        match record.deed:
            case Deed.PUT_DONE:
                put.update(record.rows)
            case Deed.REPUT:
                reputs.update(record.rows)
            case Deed.INTENT:
                open_intents[record.task].update(record.rows)
                asked_at[record.task, record.token, record.rows[0]] = record.at
                verdict.deliveries += len(record.rows)
            case Deed.CONFIRMED:
                acks[record.task].update(record.rows)
                open_intents[record.task].subtract(record.rows)
            case Deed.FENCED:
                verdict.fenced += len(record.rows)
                writes = record.task in writers
                asked = asked_at.get((record.task, record.token, record.rows[0]), record.at)
                doubt = _may_have_worked(record, asked, kills, writes=writes)
                if not doubt:
                    open_intents[record.task].subtract(record.rows)
                if writes:
                    names = [(row, record.token) for row in record.rows]
                    refused |= dict.fromkeys(names, record)
                    doubtful.update(names if doubt else ())
            case Deed.SEEN:
                seen |= {(row, record.token): record.at for row in record.rows}
            case Deed.CORRUPT:
                verdict.corrupt += len(record.rows)
                verdict.blame(f"rows {record.rows} came corrupt to {record.task}")
    verdict.rows = len(put)
    for row, token in seen.keys() & refused.keys():
        # Outputs may be stored, be seen, and be lost with their unit; the writer that asks again is refused then.
        before = seen[row, token] <= refused[row, token].at
        if not before or not (reputs[row] or (row, token) in doubtful):
            verdict.corrupt += 1
            verdict.blame(f"row {row} carries the outputs of lease {token}, which were refused")
        elif (row, token) in doubtful:  # it did work
            acks[refused[row, token].task][row] += 1
    for task in tasks:
        again = reputs if task in writers else Counter()
        _count_acks(verdict, task, put, acks[task], open_intents[task], again)
    return verdict


def _may_have_worked(refusal: Record, asked_at: float, kills: Collection[Kill], *, writes: bool) -> bool:
    """Whether an earlier try of an ack that was refused may count: who took it died between question and answer."""
    dead = {kill.service for kill in kills if asked_at <= kill.until and kill.since <= refusal.at}
    # With its unit gone, an ack without outputs is judged by a controller, which knows of the earlier try unless it
    # was killed as well.
    return refusal.unit in dead and (writes or any(service.startswith("controller-") for service in dead))


def _count_acks(
    verdict: Verdict, task: str, put: set[int], acks: Counter[int], open_intents: Counter[int], again: Counter[int]
) -> None:
    for row in put | acks.keys():
        number, allowed = acks[row], 1 + again[row]
        if number == 0 and open_intents[row] > 0:
            verdict.open_intents += 1
        elif number == 0:
            verdict.lost += 1
            verdict.blame(f"row {row} was never acked for {task}")
        elif number > allowed:
            verdict.twice += number - allowed
            verdict.blame(f"row {row} was acked {number} times for {task}, put again {again[row]} times")
        verdict.redone += max(0, min(number, allowed) - 1)
