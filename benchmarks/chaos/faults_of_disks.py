"""Disks that are full, files and directories that vanish or change, checkpoints that are damaged."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.chaos.fault import Fault, Lab, Outcome, Seen, gave_up, is_named, judge_named, recovers, went_on
from benchmarks.chaos.faulty_run import FaultyRun
from benchmarks.chaos.small_disk import fill, small_disks

_SOON = 3
_SAVED = 12
"""A run of so many steps has checkpoints of steps 5, 10 and 12; the last two are kept."""


_NO_ROOM = "cannot be written"


def disk_is_full_during_a_save(lab: Lab) -> Seen:
    """No room for checkpoints for a while: a warning says so, the run goes on, old ones stay, later ones come again."""
    with small_disks() as disks, lab.run_on(disks, steps=60) as run:
        run.wait_for_step(1)
        disk = disks.mount(lab.run_dir / "checkpoints", "40m")
        run.wait(lambda: any(disk.glob("step_*")), "a checkpoint")
        first = next(disk.glob("step_*"))
        filler = fill(disk)
        run.hurt()
        run.wait(lambda: _NO_ROOM in run.output, "a warning", within_s=40.0)
        if not first.is_dir():
            return Seen(Outcome.WRONG, "the old checkpoint is gone")
        filler.unlink()
        return went_on(run, steps=60)


def disk_is_full_for_everything(lab: Lab) -> Seen:
    """No room for ledger, metrics, logs, checkpoints for a while: a warning, lines wait, nothing is lost or torn."""
    with _run_on_its_own_disk(lab) as (run, disk):
        filler = fill(disk)
        run.hurt()
        run.wait(lambda: _NO_ROOM in run.output, "a warning", within_s=40.0)
        filler.unlink()
        return went_on(run, steps=60)


def disk_stays_full(lab: Lab) -> Seen:
    """No room for ledger, metrics, logs, checkpoints to the end: the run ends and says what is lost."""
    with _run_on_its_own_disk(lab) as (run, disk):
        fill(disk)
        run.hurt()
        return gave_up(run, "actor rank 0", "No space left on device")


def disk_is_full_for_logs(lab: Lab) -> Seen:
    """No room for logs, and a rollout that starts again wants to write one: it works without."""
    with small_disks() as disks, lab.run_on(disks) as run:
        run.wait_for_step(1)
        disk = disks.mount(lab.run_dir / "logs", "1m")
        (disk / "rollout").mkdir()
        fill(disk)
        run.hurt(run.pid("rollout-0"))
        return went_on(run)


@contextmanager
def _run_on_its_own_disk(lab: Lab) -> Iterator[tuple[FaultyRun, Path]]:
    """Start a run of 60 steps whose whole directory is on a small disk; it has finished a few of them."""
    with small_disks() as disks:
        (lab.directory / "disk").mkdir()
        disk = disks.mount(lab.directory / "disk", "40m")
        with lab.run_on(disks, below="disk", steps=60) as run:
            run.wait_for_step(_SOON)
            yield run, disk


def run_directory_is_removed(lab: Lab) -> Seen:
    """Somebody removes the run's directory while it runs: it ends and says so."""
    with lab.run(steps=10_000) as run:
        run.wait_for_step(_SOON)
        run.hurt()
        shutil.rmtree(lab.run_dir.rename(lab.directory / "removed"), ignore_errors=True)
        return gave_up(run, str(lab.run_dir))


def data_file_is_removed(lab: Lab) -> Seen:
    """The data file goes while the run goes on, then a controller dies, which reads it: the run ends and names it."""
    data = _own_data(lab)
    with lab.run(steps=10_000, settings={"data.path": str(data)}) as run:
        run.wait_for_step(_SOON)
        data.unlink()
        run.hurt(run.pid("controller-0"))
        return gave_up(run, "controller rank 0", "data.path", str(data))


def data_file_is_changed(lab: Lab) -> Seen:
    """The data file changes while the run goes on, then a controller dies: groups would be other prompts. Named."""
    data = _own_data(lab)
    with lab.run(steps=10_000, settings={"data.path": str(data)}) as run:
        run.wait_for_step(_SOON)
        data.write_text("\n".join(reversed(data.read_text().splitlines())) + "\n")
        run.hurt(run.pid("controller-0"))
        return gave_up(run, "controller rank 0", "data.path", str(data))


def _own_data(lab: Lab) -> Path:
    import configs

    data = lab.directory / "data.jsonl"
    shutil.copy(Path(configs.__file__).parent / "quickstart" / "train.jsonl", data)
    return data


def _resumed(lab: Lab, damage: Callable[[Path], None], *, words: str = "") -> Seen:
    """Damage the newest checkpoint of a run and resume it: from the one before."""
    with lab.run(steps=_SAVED) as run:
        first = went_on(run, steps=_SAVED)
    if first.outcome is not Outcome.RECOVERED:
        return first
    damage(sorted((lab.run_dir / "checkpoints").glob("step_*"))[-1])
    with lab.run(resume=True, steps=_SAVED + 8) as run:
        run.hurt()
        return went_on(run, steps=_SAVED + 8, says=words)


def _largest(checkpoint: Path) -> Path:
    """Return the file that has most of the model."""
    return max(
        (path for path in (checkpoint / "dcp").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )


def checkpoint_is_unreadable(lab: Lab) -> Seen:
    """The newest checkpoint's shards cannot be read: the run goes on from the one before."""

    def damage(checkpoint: Path) -> None:
        shard = _largest(checkpoint)
        shard.unlink()
        shard.mkdir()

    return _resumed(lab, damage)


def checkpoint_shard_is_truncated(lab: Lab) -> Seen:
    """A shard of the newest checkpoint is cut off: the run goes on from the one before."""

    def damage(checkpoint: Path) -> None:
        shard = _largest(checkpoint)
        with shard.open("r+b") as file:
            file.truncate(shard.stat().st_size // 2)

    return _resumed(lab, damage)


def checkpoint_byte_is_flipped(lab: Lab) -> Seen:
    """A bit of the newest checkpoint's shard is flipped: the run goes on from the one before."""

    def damage(checkpoint: Path) -> None:
        shard = _largest(checkpoint)
        data = bytearray(shard.read_bytes())
        data[lab.random.randrange(len(data))] ^= 1 << lab.random.randrange(8)
        shard.write_bytes(data)

    return _resumed(lab, damage)


def checkpoint_has_no_meta(lab: Lab) -> Seen:
    """The newest checkpoint has no meta.json: the run goes on from the one before."""
    return _resumed(lab, lambda checkpoint: (checkpoint / "meta.json").unlink())


def checkpoint_was_not_finished(lab: Lab) -> Seen:
    """A crash left half a checkpoint under its temporary name: it is not looked at, and goes."""
    return _resumed(lab, lambda checkpoint: _unfinished(checkpoint))


def _unfinished(checkpoint: Path) -> None:
    (checkpoint / "meta.json").unlink()
    _largest(checkpoint).unlink()
    checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.tmp"))


def every_checkpoint_is_damaged(lab: Lab) -> Seen:
    """No checkpoint can be read: --resume says which, and touches nothing."""
    with lab.run(steps=_SAVED) as run:
        first = went_on(run, steps=_SAVED)
    if first.outcome is not Outcome.RECOVERED:
        return first
    for checkpoint in (lab.run_dir / "checkpoints").glob("step_*"):
        meta = checkpoint / "meta.json"
        meta.write_text(json.dumps({**json.loads(meta.read_text()), "step": "x"}))
    with lab.run(resume=True, steps=_SAVED + 8) as run:
        run.hurt()
        return judge_named(run.end(within_s=30.0), "--resume", "checkpoint", str(lab.run_dir), code=2)


FAULTS: tuple[Fault, ...] = (
    recovers(disk_is_full_during_a_save),
    recovers(disk_is_full_for_everything),
    is_named(disk_stays_full),
    recovers(disk_is_full_for_logs),
    is_named(run_directory_is_removed),
    is_named(data_file_is_removed),
    is_named(data_file_is_changed),
    recovers(checkpoint_is_unreadable),
    recovers(checkpoint_shard_is_truncated),
    recovers(checkpoint_byte_is_flipped),
    recovers(checkpoint_has_no_meta),
    recovers(checkpoint_was_not_finished),
    is_named(every_checkpoint_is_damaged),
)
