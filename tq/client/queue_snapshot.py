"""Snapshot and restore of a whole queue, driven by one client over all units.

    hold every unit ---- cut every unit ---- write files ---- manifest, rename
    puts wait (milliseconds)   |  traffic goes on

All units are cut while all of them hold, so the snapshot is the queue at one moment. It appears under its name only
when it is complete. Restoring puts the rows again, spread over however many units there are now.
"""

import secrets
import shutil
from collections.abc import Callable, Sequence, Set
from pathlib import Path

from asyncflow.errors import CheckpointError, TransportError
from tq.client.session import QueueSession
from tq.messages import CutSnapshot, Done, HoldPuts, SnapshotWritten, WriteSnapshot
from tq.snapshot import last_rows, read_manifest, read_snapshot, write_manifest

_HOLD_S = 10.0
_WRITE_TIMEOUT_S = 3600.0


def take_snapshot(
    session: QueueSession, directory: Path, *, after_partition: int, forget_acks_of: Sequence[str]
) -> int:
    """Write the queue's rows into `directory`, which must not exist; all units must see the same file system.

    Returns:
        The number of rows.

    Raises:
        CheckpointError: the directory exists.
        TransportError: a unit is away and does not come back in time, goes meanwhile, or is too slow; nothing is left
            behind.
    """
    if directory.exists():
        raise CheckpointError(f"queue snapshot: {directory} exists already; choose another directory")
    beside = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    hold = secrets.token_hex(8)
    try:
        held = session.tell_units(HoldPuts(hold, _HOLD_S), Done, every=True)
        cut = session.tell_units(CutSnapshot(hold, after_partition, list(forget_acks_of)), Done)
        write = WriteSnapshot(hold, str(beside.resolve()))
        written = session.tell_units(write, SnapshotWritten, timeout_s=_WRITE_TIMEOUT_S)
        _refuse_missing(held.keys(), cut.keys() & written.keys())
        num_rows = sum(part.num_rows for part in written.values())
        files = [file for part in written.values() for file in part.files]
        outputs = session.outputs.read(session.directory.tasks)
        write_manifest(beside, files, num_rows=num_rows, outputs=outputs)
        beside.rename(directory)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return num_rows


def restore_snapshot(put_rows: Callable[..., Sequence[int]], session: QueueSession, directory: Path) -> int:
    """Put a snapshot's rows into a queue that has none of them; tasks that were done with a row stay done.

    New rows that are put without indices of their own get later ones than these.

    Partitions are not declared here: those that were must be declared again (`open_partition`).

    Args:
        put_rows: of the client; puts the rows of one chunk.
        session: the client's.
        directory: the snapshot.

    Returns:
        The number of rows.

    Raises:
        CheckpointError: the snapshot is incomplete or damaged; nothing was put.
        RowsExist: the queue has such a row already.
    """
    for task, columns in read_manifest(directory).outputs.items():
        session.outputs.note(task, columns)
    session.reserve_rows(last_rows(directory))
    num_rows = 0
    for chunk in read_snapshot(directory):
        num_rows += len(
            put_rows(
                chunk.columns,
                partition=chunk.partition,
                rows=chunk.rows,
                groups=chunk.groups,
                group_size=chunk.group_size,
                commits=chunk.commits,
            )
        )
    return num_rows


def _refuse_missing(held: Set[str], written: Set[str]) -> None:
    gone = sorted(held - written)
    if gone:
        raise TransportError(f"queue snapshot: {' '.join(gone)} went while it was taken; take it again")
