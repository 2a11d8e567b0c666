"""Saving and restoring by one rank, beside what it computes: what is saved, what waits, what a failed save leaves."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asyncflow.checkpoint_files import CheckpointMeta, damages, files_below
from asyncflow.errors import CheckpointError
from workers.checkpoint.checkpoint_directory import prunable
from workers.checkpoint.saved_shards import ExportShare
from workers.checkpoint.writer import Checkpointer, Contents, Export, RunFacts
from workers.settings.run import CheckpointConfig

DEADLINE_S = 20.0
CPU = torch.device("cpu")


class FakeEngine:
    """One parameter, in place of a model."""

    def __init__(self) -> None:
        self.weight = torch.zeros(3)
        self.lr = [0.5]

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "groups": [{"lr": self.lr}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight, self.lr = state["weight"], state["groups"][0]["lr"]


@pytest.fixture(autouse=True)
def _single_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(name="run_dir")
def _run_dir(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text("steps: 1\n")
    return tmp_path


def checkpointer(
    run_dir: Path,
    restored_from: Path | None = None,
    *,
    export: Export | None = None,
    stopping: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> Checkpointer:
    facts = RunFacts(lineage=3, model_fingerprint="f", data_hash="d", config=run_dir / "config.yaml")
    return Checkpointer(
        run_dir,
        CheckpointConfig(**settings),
        facts=facts,
        device=CPU,
        restored_from=restored_from,
        warn=WARNINGS.append,
        export=export,
        stopping=stopping,
    )


WARNINGS: list[str] = []


@pytest.fixture(autouse=True)
def _no_warnings_yet() -> None:
    WARNINGS.clear()


def nothing() -> None:
    """Ledger and metrics are durable."""


def begin(saver: Checkpointer, engine: FakeEngine, step: int, **contents: Any) -> None:
    saver.begin(engine, step, Contents(**{"make_durable": nothing, **contents}))  # type: ignore[arg-type]  # a fake


def save(saver: Checkpointer, engine: FakeEngine, *steps: int, **contents: Any) -> None:
    for step in steps:
        engine.weight.fill_(step)
        begin(saver, engine, step, **contents)
        saver.wait()


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


class Gate:
    """Holds a save up until the test lets it go on."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(DEADLINE_S)


def test_restored_is_what_was_saved(run_dir: Path) -> None:
    saver, engine = checkpointer(run_dir), FakeEngine()
    save(saver, engine, 4)
    random = torch.rand(2)
    engine.weight.fill_(0)
    again, restored = checkpointer(run_dir), FakeEngine()
    meta = again.restore_checkpoint(restored, run_dir / "checkpoints" / "step_000004", seed=0)  # type: ignore[arg-type]  # a fake
    assert (meta.step, meta.lineage, meta.num_ranks, meta.data_hash) == (4, 3, 1, "d")
    assert (restored.weight.tolist(), restored.lr) == ([4.0] * 3, [0.5])
    assert torch.rand(2).equal(random)
    assert again.saved_step == 4


def test_meta_lists_every_file_with_its_checksum(run_dir: Path) -> None:
    save(checkpointer(run_dir), FakeEngine(), 4)
    path = run_dir / "checkpoints" / "step_000004"
    meta = CheckpointMeta.read(path)
    assert ["meta.json", *sorted(meta.files)] == sorted(files_below(path), key=lambda name: (name != "meta.json", name))
    assert {"config.yaml", "dcp/.metadata", "dcp/__0_0.distcp", "rng/rank_0.safetensors"} == meta.files.keys()
    assert damages(path, meta.files) == {}


def test_two_that_write_meta_at_the_same_time_leave_one_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export, and a run that was resumed meanwhile."""
    first, second = (
        CheckpointMeta(step=step, lineage=0, model_fingerprint="", data_hash="", num_ranks=1, saved_at=0.0, files={})
        for step in (1, 2)
    )
    sync = os.fsync

    def meanwhile(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        second.write(tmp_path)
        assert CheckpointMeta.read(tmp_path) == second
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", meanwhile)
    first.write(tmp_path)
    assert CheckpointMeta.read(tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == ["meta.json"]


def test_saved_is_the_state_of_its_step_although_training_goes_on(run_dir: Path) -> None:
    saver, engine, gate = checkpointer(run_dir), FakeEngine(), Gate()
    engine.weight.fill_(1)
    begin(saver, engine, 1, snapshot=lambda _: gate())
    assert gate.reached.wait(DEADLINE_S)
    saver.before_update()
    engine.weight.fill_(99)
    engine.lr[0] = 99.0
    torch.rand(5)
    assert names(run_dir) == [".step_000001.tmp"], "nothing is visible that is not complete"
    gate.opened.set()
    saver.wait()
    restored = FakeEngine()
    checkpointer(run_dir).restore_checkpoint(restored, run_dir / "checkpoints" / "step_000001", seed=0)  # type: ignore[arg-type]
    assert (restored.weight.tolist(), restored.lr) == ([1.0] * 3, [0.5])


def test_save_that_is_due_waits_for_the_former_one(run_dir: Path) -> None:
    saver, engine, gate = checkpointer(run_dir), FakeEngine(), Gate()
    begin(saver, engine, 1, make_durable=gate)
    assert gate.reached.wait(DEADLINE_S)
    assert saver.busy
    waits = threading.Event()
    saver._waits = waits.set
    opener = threading.Thread(target=lambda: (waits.wait(DEADLINE_S), gate.opened.set()))
    opener.start()
    second = Gate()
    begin(saver, engine, 2, make_durable=second)
    assert saver.saved_step == 1
    second.opened.set()
    saver.wait()
    opener.join()
    assert names(run_dir) == ["step_000001", "step_000002"]
    assert saver.take_stalled_s() > 0
    assert saver.take_stalled_s() == 0


def test_memory_of_the_copy_is_used_again(run_dir: Path) -> None:
    saver, engine = checkpointer(run_dir), FakeEngine()
    save(saver, engine, 1)
    before = {name: buffer.data_ptr() for name, buffer in saver._copy._buffers.items()}
    save(saver, engine, 2)
    assert {name: buffer.data_ptr() for name, buffer in saver._copy._buffers.items()} == before


def test_checkpoint_is_seen_only_after_the_ledger_is_durable_and_told_of_after_it_is_seen(run_dir: Path) -> None:
    seen: list[tuple[str, list[str]]] = []
    save(
        checkpointer(run_dir), FakeEngine(), 1,
        make_durable=lambda: seen.append(("durable", names(run_dir))),
        saved=lambda: seen.append(("saved", names(run_dir))),
    )  # fmt: skip
    assert seen == [("durable", [".step_000001.tmp"]), ("saved", ["step_000001"])]


@pytest.mark.parametrize(("keep_last", "left"), [(1, [3]), (2, [2, 3]), (5, [1, 2, 3])])
def test_the_newest_are_kept(run_dir: Path, keep_last: int, left: list[int]) -> None:
    save(checkpointer(run_dir, keep_last=keep_last), FakeEngine(), 1, 2, 3)
    assert names(run_dir) == [f"step_{step:06d}" for step in left]


def test_what_is_kept_for_ever_and_what_the_run_goes_on_from_stays(run_dir: Path) -> None:
    save(checkpointer(run_dir), FakeEngine(), 3)
    restored_from = run_dir / "checkpoints" / "step_000003"
    save(checkpointer(run_dir, restored_from, keep_last=1, keep_every=4), FakeEngine(), 4, 5, 6)
    assert names(run_dir) == ["step_000003", "step_000004", "step_000006"]


def test_copies_of_checkpoints_are_nobodys_to_prune(run_dir: Path) -> None:
    save(checkpointer(run_dir), FakeEngine(), 3)
    root = run_dir / "checkpoints"
    for copy in ("step_000003_backup", "step_000003.old", "step_3"):
        shutil.copytree(root / "step_000003", root / copy)
    save(checkpointer(run_dir, keep_last=1), FakeEngine(), 4, 5)
    assert names(run_dir) == ["step_000003.old", "step_000003_backup", "step_000005", "step_3"]


def test_prunable_steps() -> None:
    steps = [30, 10, 20, 40, 50]
    assert prunable(steps, keep_last=2, keep_every=0, in_use=[]) == [10, 20, 30]
    assert prunable(steps, keep_last=2, keep_every=20, in_use=[30]) == [10]
    assert prunable([10], keep_last=2, keep_every=0, in_use=[]) == []


def test_next_start_removes_what_an_interrupted_save_left(run_dir: Path) -> None:
    save(checkpointer(run_dir), FakeEngine(), 3)
    half = run_dir / "checkpoints" / ".step_000006.tmp" / "dcp"
    half.mkdir(parents=True)
    (half / "__0_0.distcp").write_bytes(b"half of it")
    checkpointer(run_dir)
    assert names(run_dir) == ["step_000003"]


def test_interrupted_removal_leaves_nothing_that_looks_complete(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = checkpointer(run_dir, keep_last=1)
    save(saver, FakeEngine(), 1)
    monkeypatch.setattr("workers.checkpoint.checkpoint_directory.shutil.rmtree", lambda *_, **__: None)
    save(saver, FakeEngine(), 2)
    assert names(run_dir) == [".step_000001.tmp", "step_000002"]


def fail() -> None:
    raise OSError(28, "No space left on device")


def occupy_shards(queue: Path) -> None:
    """A file where the shards go: torch reports it by an exception that is no `Exception`."""
    (queue.parent / "dcp").write_bytes(b"")


@pytest.mark.parametrize(
    ("contents", "reason", "remedy"),
    [
        ({"make_durable": fail}, "OSError: .Errno 28. No space left on device", ": make room"),
        ({"reference": Path("/nowhere/reference")}, "FileNotFoundError: .*", ""),
        ({"snapshot": occupy_shards}, "FileExistsError: .*", ""),
        ({"make_durable": lambda: 1 / 0}, "ZeroDivisionError: division by zero", ""),
    ],
)
def test_failed_save_keeps_the_older_checkpoint_and_warns_once(
    run_dir: Path, contents: dict[str, Callable[..., Any]], reason: str, remedy: str
) -> None:
    saver, engine = checkpointer(run_dir, keep_last=1), FakeEngine()
    save(saver, engine, 1)
    save(saver, engine, 2, **contents)
    assert names(run_dir) == ["step_000001"]
    assert (saver.saved_step, saver.num_failures) == (1, 1)
    with pytest.raises(
        CheckpointError, match=rf"step_000002: cannot be written \(rank 0: {reason}; \d+ MB are free there{remedy}\)"
    ):
        raise saver.failure or AssertionError
    assert len(WARNINGS) == 1
    assert WARNINGS[0].endswith("; the run goes on, its newest checkpoint is of step 1")
    save(saver, engine, 3)
    assert names(run_dir) == ["step_000003"]
    assert WARNINGS[1:] == [""], "and it is over"
    assert saver.failure is None


def test_interrupted_replacement_leaves_nothing_half_removed_that_looks_complete(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, engine = checkpointer(run_dir), FakeEngine()
    save(saver, engine, 1)
    removed = []
    monkeypatch.setattr("workers.checkpoint.checkpoint_directory.shutil.rmtree", lambda path, **_: removed.append(path))
    engine.lr = [0.25]
    begin(saver, engine, 1)
    saver.wait()
    assert names(run_dir) == [".step_000001.former.tmp", "step_000001"]
    assert all(path.name.startswith(".") for path in removed), "nothing is removed under a name that counts"
    checkpointer(run_dir).restore_checkpoint(engine, run_dir / "checkpoints" / "step_000001", seed=0)  # type: ignore[arg-type]  # a fake
    assert engine.lr == [0.25]


class SlowExport:
    """Writes an export piece by piece, onto a disk that is busy until the test says otherwise."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.on_busy_disk = True

    def __call__(self, target: Path, saved: Path, share: ExportShare) -> bool:
        assert (saved / ".metadata").is_file()
        for piece in ("config.json", "model.safetensors"):
            if share.stop():
                return False
            (target / piece).write_text(piece)
            if self.on_busy_disk:
                self.gate()
        return True


def exported(run_dir: Path, step: int) -> list[str]:
    """Files that are in the checkpoint beside what every one has, all of them as `meta.json` says."""
    path = run_dir / "checkpoints" / f"step_{step:06d}"
    meta = CheckpointMeta.read(path)
    assert damages(path, meta.files) == {}
    assert files_below(path) == sorted([*meta.files, "meta.json"])
    return [name for name in meta.files if name.startswith("hf/")]


def test_checkpoint_counts_while_its_export_is_still_being_written(run_dir: Path) -> None:
    export = SlowExport()
    saver = checkpointer(run_dir, keep_last=1, export=export)
    save_without_export = checkpointer(run_dir)
    save(save_without_export, FakeEngine(), 1)
    begin(saver, FakeEngine(), 2)
    assert export.gate.reached.wait(DEADLINE_S)
    path = run_dir / "checkpoints" / "step_000002"
    meta = CheckpointMeta.read(path)
    assert (saver.saved_step, meta.has_export, damages(path, meta.files)) == (2, False, {})
    restored = FakeEngine()
    save_without_export.restore_checkpoint(restored, path, seed=0)  # type: ignore[arg-type]  # a fake
    assert names(run_dir) == ["step_000001", "step_000002"], "the older one stays until the newer one is complete"
    export.gate.opened.set()
    saver.wait()
    assert exported(run_dir, 2) == ["hf/config.json", "hf/model.safetensors"]
    assert names(run_dir) == ["step_000002"] and WARNINGS == []


def test_stop_ends_an_export_between_two_pieces_and_says_who_writes_it(run_dir: Path) -> None:
    stop, export = threading.Event(), SlowExport()
    saver = checkpointer(run_dir, export=export, stopping=stop.is_set)
    begin(saver, FakeEngine(), 1)
    assert export.gate.reached.wait(DEADLINE_S)
    stop.set()
    export.gate.opened.set()
    saver.wait()
    assert (saver.saved_step, saver.failure, exported(run_dir, 1)) == (1, None, [])
    path = run_dir / "checkpoints" / "step_000001"
    says = "the checkpoint of step 1 has no hf/ (the run was stopped); a resume adds it, or `asyncflow export"
    assert [f"{says} {path}`"] == WARNINGS

    stop.clear()
    again = checkpointer(run_dir, path, export=export)
    again.restore_checkpoint(FakeEngine(), path, seed=0)  # type: ignore[arg-type]  # a fake
    again.wait()
    assert exported(run_dir, 1) == ["hf/config.json", "hf/model.safetensors"]


@pytest.mark.parametrize(("failure", "reason"), [(fail, "No space left on device"), (lambda: 1 / 0, "division by")])
def test_export_that_fails_costs_a_line_but_no_checkpoint(
    run_dir: Path, failure: Callable[[], object], reason: str
) -> None:
    def export(target: Path, saved: Path, share: ExportShare) -> bool:
        (target / "config.json").write_text("half of it")
        failure()
        return True

    saver = checkpointer(run_dir, export=export)
    save(saver, FakeEngine(), 1)
    assert (saver.saved_step, saver.failure, exported(run_dir, 1)) == (1, None, [])
    assert len(WARNINGS) == 1 and reason in WARNINGS[0] and "has no hf/" in WARNINGS[0]


def test_export_that_is_too_slow_costs_a_line_but_not_the_run(run_dir: Path) -> None:
    given_up = threading.Event()

    def export(target: Path, saved: Path, share: ExportShare) -> bool:
        while not share.stop():
            assert not given_up.wait(0.01)
        return False

    saver = checkpointer(run_dir, export=export, timeout_s=0.5)
    save(saver, FakeEngine(), 1)
    assert (saver.saved_step, saver.failure, exported(run_dir, 1)) == (1, None, [])
    (said,) = WARNINGS
    assert "has no hf/ (training waited for it for 0.5 s, checkpoint.timeout_s); a resume adds it" in said


def test_next_start_removes_what_an_interrupted_export_left(run_dir: Path) -> None:
    save(checkpointer(run_dir), FakeEngine(), 1)
    half = run_dir / "checkpoints" / "step_000001" / ".hf.tmp"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half of it")
    checkpointer(run_dir)
    assert exported(run_dir, 1) == [] and not half.exists()


class CriticsChannel:
    """A critic that writes one file, or cannot."""

    def __init__(self, root: Path, *, fails: bool = False) -> None:
        self.begun: list[tuple[int, bool]] = []
        self._root, self._fails = root, fails

    def send_begun(self, step: int, *, begun: bool) -> None:
        self.begun.append((step, begun))

    def recv_files(self, step: int, *, timeout_s: float) -> dict[str, tuple[int, str]]:
        if self._fails:
            raise CheckpointError(f"the critic could not save step {step}")
        part = self._root / "checkpoints" / f".step_{step:06d}.tmp" / "critic"
        part.mkdir()
        (part / "__0_0.distcp").write_bytes(b"shard")
        return {"critic/__0_0.distcp": (5, "00ff")}


def test_a_critics_files_are_part_of_the_checkpoint_as_it_names_them(run_dir: Path) -> None:
    critic = CriticsChannel(run_dir)
    save(checkpointer(run_dir), FakeEngine(), 4, critic=critic)
    entry = CheckpointMeta.read(run_dir / "checkpoints" / "step_000004").files["critic/__0_0.distcp"]
    assert (entry.num_bytes, entry.xxh3) == (5, "00ff")
    assert critic.begun == [(4, True)]


def test_a_critic_that_cannot_save_fails_the_save_and_is_told_so(run_dir: Path) -> None:
    critic = CriticsChannel(run_dir, fails=True)
    saver = checkpointer(run_dir)
    save(saver, FakeEngine(), 4, critic=critic)
    assert names(run_dir) == [] and "the critic could not save step 4" in str(saver.failure)
    assert critic.begun == [(4, True), (4, False)]


def test_queue_that_cannot_be_asked_costs_its_samples_only(run_dir: Path) -> None:
    save(checkpointer(run_dir), FakeEngine(), 1, snapshot=lambda _: fail())
    assert names(run_dir) == ["step_000001"]
    assert WARNINGS == []


def test_directory_that_cannot_be_written_is_one_line(run_dir: Path) -> None:
    saver = checkpointer(run_dir)
    (run_dir / "checkpoints").rmdir()
    (run_dir / "checkpoints").write_text("a file in its place")
    save(saver, FakeEngine(), 1)
    with pytest.raises(
        CheckpointError, match=r"step_000001: cannot be written \(rank 0: FileExistsError: .* MB are free"
    ):
        raise saver.failure or AssertionError


def test_save_that_does_not_end_is_an_error(run_dir: Path) -> None:
    saver, gate = checkpointer(run_dir, timeout_s=0.05), Gate()
    begin(saver, FakeEngine(), 1, make_durable=gate)
    with pytest.raises(CheckpointError, match=r"step 1 is not written after 0.05 s \(checkpoint.timeout_s\)"):
        saver.wait()
    gate.opened.set()
    assert saver._thread is not None
    saver._thread.join(DEADLINE_S)


def test_other_number_of_ranks_begins_new_random_numbers(run_dir: Path) -> None:
    saver, engine = checkpointer(run_dir), FakeEngine()
    save(saver, engine, 4)
    path = run_dir / "checkpoints" / "step_000004"
    meta = CheckpointMeta.read(path)
    CheckpointMeta(**{**{name: getattr(meta, name) for name in meta.__struct_fields__}, "num_ranks": 2}).write(path)
    drawn = []
    for seed in (0, 0, 1):
        saver.restore_checkpoint(engine, path, seed=seed)  # type: ignore[arg-type]  # a fake
        drawn.append(torch.rand(2).tolist())
    assert drawn[0] == drawn[1] != drawn[2]
