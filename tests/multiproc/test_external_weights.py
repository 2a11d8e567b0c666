"""Readers outside the run: a real agent and real senders, processes that attach, exports that engines load."""

import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from waiting import wait_until

import configs
from asyncflow.clock import HostClock
from asyncflow.errors import ConfigError, WeightSyncError
from asyncflow.job import LOOPBACK, GangSpec, Job
from asyncflow.sealed_store import serve_store
from asyncflow.transport.meeting import Credentials
from weightsync.agent.agent_service import WeightAgent
from weightsync.config import ExportConfig, WeightSyncConfig
from weightsync.export import WeightExporter, WeightFeed, connect_weights
from weightsync.plan import Box, Need, TransferPlan, plan_transfer
from weightsync.receiver import WeightReceiver
from weightsync.sender import WeightSender, describe
from weightsync.version import Version
from workers.engines.hf.weights import copy_without_weights, write_weights

SECRET = b"the job's secret"
CPU = torch.device("cpu")
DEADLINE_S = 30
MODEL_DIR = Path(configs.__file__).parent / "quickstart" / "model"
INITIAL = load_file(MODEL_DIR / "model.safetensors")
EXAMPLE = Path(__file__).parents[2] / "examples" / "external_engine.py"
SCRIPT = Path(__file__).with_name("export_process.py")


@dataclass(frozen=True)
class Part:
    name: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor


def weights_of(version: Version) -> dict[str, Tensor]:
    """The quickstart's model, different in every version."""
    return {name: tensor + version.step + 10 * version.lineage for name, tensor in INITIAL.items()}


def parts_of(version: Version, rank: int) -> list[Part]:
    """Matrices are cut between two ranks; the second has all else."""
    parts = []
    for name, tensor in weights_of(version).items():
        shape, half = tuple(tensor.shape), tensor.shape[0] // 2
        if len(shape) > 1:
            start, stop = (0, half) if rank == 0 else (half, shape[0])
            parts.append(Part(name, shape, Box.rows(shape, start, stop), tensor[start:stop]))
        elif rank == 1:
            parts.append(Part(name, shape, Box.from_shape(shape), tensor))
    return parts


def checksum(weights: Mapping[str, Tensor]) -> str:
    """As the example computes it."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


class Run:
    """A job store, its `job.json`, one agent, two trainer ranks."""

    def __init__(self, run_dir: Path) -> None:
        self.dir = run_dir
        store, port = serve_store(LOOPBACK, timedelta(seconds=20))
        self.credentials = Credentials(store, SECRET, 20)
        self.job = Job(
            LOOPBACK, port, SECRET.hex(), os.getpid(), (), 0, "", 100, time.time(), HostClock.from_wall_clock()
        )
        self.job.save(run_dir)
        sync = WeightSyncConfig(num_slots=4, max_updating=1, bucket_bytes=1 << 14, dtype="bfloat16")
        self.agent = WeightAgent(self.credentials, "weights-0", sync)
        held = [describe(parts_of(Version(0, 0), rank)) for rank in range(2)]
        plan = plan_transfer(held, bucket_bytes=sync.bucket_bytes, dtype=sync.dtype)
        self.senders = [
            WeightSender(self.credentials, "weights-0", f"actor/{rank}", plan, rank, device=CPU) for rank in range(2)
        ]

    def publish(self, step: int, lineage: int = 0) -> None:
        version = Version(lineage, step)
        for rank, sender in enumerate(self.senders):
            sender.before_update()
            sender.publish(version, parts_of(version, rank), timeout_s=5)
        for sender in self.senders:
            sender.wait(DEADLINE_S)

    def close(self) -> None:
        (self.dir / "job.json").unlink(missing_ok=True)
        for sender in self.senders:
            sender.close()
        self.agent.close()


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.close()


@pytest.fixture(name="start_script")
def _start_script() -> Iterator[Any]:
    """Return a function that starts a script with arguments."""
    started: list[subprocess.Popen[str]] = []

    def start(*command: object) -> "subprocess.Popen[str]":
        process = subprocess.Popen([sys.executable, *map(str, command)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wire(version: Version) -> dict[str, Tensor]:
    return {name: tensor.bfloat16() for name, tensor in weights_of(version).items()}


def read(feed: WeightReceiver, newer_than: Version | None = None) -> tuple[Version | None, dict[str, Tensor]]:
    got: dict[str, Tensor] = {}
    version = feed.load(
        lambda weights: got.update({name: tensor.clone() for name, tensor in weights.items()}), newer_than=newer_than
    )
    return version, got


def equal(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(tensor, others[name]) for name, tensor in some.items())


def test_plan_is_read_once_by_whoever_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the agent, though two ranks open it, and by the reader, though it is offered several versions."""
    decode, read = TransferPlan.decode, []

    def counted(data: bytes) -> TransferPlan:
        read.append(data)
        return decode(data)

    monkeypatch.setattr(TransferPlan, "decode", staticmethod(counted))
    run = Run(tmp_path)
    with connect_weights(tmp_path, "reader") as feed:
        for step in range(1, 4):
            run.publish(step)
            feed.wait_for(step, timeout_s=DEADLINE_S)
            assert feed.load(lambda weights: None, newer_than=None) == Version(0, step)
    run.close()
    assert len(read) == 2


def test_example_follows_a_run_and_ends_with_it(run: Run, start_script: Any) -> None:
    run.publish(0)
    engine = start_script(EXAMPLE, run.dir, "--model", MODEL_DIR)
    lines = [engine.stdout.readline()]
    for step, lineage in ((1, 0), (1, 1)):
        run.publish(step, lineage)
        lines.append(engine.stdout.readline())
    versions = [Version(0, 0), Version(0, 1), Version(1, 1)]
    assert lines == [f"{checksum(wire(version))} weights of {version}\n" for version in versions]
    wait_until(  # it prints before it says what it serves
        lambda: run.agent.status().serving["external-engine"] == Version(1, 1), "not served", deadline_s=DEADLINE_S
    )
    (run.dir / "job.json").unlink()
    assert engine.wait(DEADLINE_S) == 0


@pytest.mark.gate
def test_feed_gives_versions_as_they_come_and_takes_nobodys_turn(run: Run) -> None:
    with connect_weights(run.dir, "engine") as feed:
        with pytest.raises(WeightSyncError, match=r"engine: weights did not come within 0.1 s; weights-0 has none"):
            feed.wait_newer(None, timeout_s=0.1)
        run.publish(1)
        assert feed.wait_newer(None, timeout_s=DEADLINE_S)
        needs = {name: Need(tuple(tensor.shape)) for name, tensor in INITIAL.items()}
        rollout = WeightReceiver(run.credentials, "weights-0", "rollout-0", needs, device=CPU, takes_turns=True)
        rollout.wait_for(1, timeout_s=DEADLINE_S)
        turns: list[Any] = []
        feed.load(lambda _: turns.append(rollout.load(lambda _: None, newer_than=None)), newer_than=None)
        assert turns == [Version(0, 1)], "although only one may swap at a time"
        rollout.close()
        assert read(feed, Version(0, 1)) == (None, {})
        with pytest.raises(WeightSyncError, match="weights newer than step 1 did not come within 0.1 s"):
            feed.wait_newer(Version(0, 1), timeout_s=0.1)
        run.publish(0, lineage=1)
        assert feed.wait_newer(Version(0, 1), timeout_s=DEADLINE_S), "a newer lineage is newer"
        version, weights = read(feed, Version(0, 1))
        assert version == Version(1, 0)
        assert equal(weights, wire(Version(1, 0)))
        stop = threading.Event()
        stop.set()
        assert not feed.wait_newer(version, timeout_s=DEADLINE_S, stop=stop)


def test_wait_ends_when_another_run_has_taken_the_directory(run: Run) -> None:
    with connect_weights(run.dir, "engine") as feed:
        replace(run.job, secret=b"another".hex()).save(run.dir)
        assert not feed.wait_newer(None, timeout_s=DEADLINE_S)


def test_run_that_went_back_to_a_checkpoint_is_not_over(run: Run) -> None:
    with connect_weights(run.dir, "engine") as feed:
        run.job.with_changes(lineage=1).save(run.dir)
        run.publish(1, lineage=1)
        assert feed.wait_newer(None, timeout_s=DEADLINE_S)


def test_nothing_runs_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing runs there"):
        connect_weights(tmp_path, "engine")


def test_run_that_was_killed_is_over_at_once(tmp_path: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as closing:
        port = closing.getsockname()[1]
    Job(LOOPBACK, port, SECRET.hex(), 1, (), 0, "", 1, 0.0, HostClock.from_wall_clock()).save(tmp_path)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"engine: the run in .* is over"):
        connect_weights(tmp_path, "engine", timeout_s=2 * DEADLINE_S)
    assert time.monotonic() - began < DEADLINE_S


def test_agent_that_is_not_there_is_named(run: Run) -> None:
    with pytest.raises(WeightSyncError, match=r"engine: no weights from weights-7 .* is it running\?"):
        connect_weights(run.dir, "engine", agent="weights-7", timeout_s=0.5)
    gang = GangSpec("weights-0", "weights", 0, 1, ("cpu",))
    replace(run.job, gangs=(gang,)).save(run.dir)
    with pytest.raises(ConfigError, match="has no agent 'weights-7'; it has weights-0"):
        connect_weights(run.dir, "engine", agent="weights-7")
    connect_weights(run.dir, "engine").close()


@pytest.mark.gate
def test_wrong_secret_is_refused(run: Run) -> None:
    replace(run.job, secret=b"another".hex()).save(run.dir)
    with pytest.raises(WeightSyncError, match="secret|did not answer"):
        connect_weights(run.dir, "engine", timeout_s=1)


def start_exporter(run: Run, write: Any = write_weights, **config: Any) -> tuple[WeightExporter, WeightFeed]:
    feed = connect_weights(run.dir, "export")
    copy_rest = partial(copy_without_weights, MODEL_DIR)
    return WeightExporter(feed, ExportConfig(**config), run.dir, copy_rest=copy_rest, write_weights=write), feed


def exported(run: Run) -> Sequence[str]:
    return sorted(path.name for path in (run.dir / "weights").iterdir())


@pytest.mark.gate
def test_export_is_what_was_trained_and_transformers_loads_it(run: Run) -> None:
    run.publish(3)
    exporter, feed = start_exporter(run)
    assert feed.wait_newer(None, timeout_s=DEADLINE_S)
    exporter.close()
    latest = run.dir / "weights" / "latest"
    assert latest.resolve().name == "step_000003"
    assert equal(load_file(latest / "model.safetensors"), wire(Version(0, 3)))
    model = AutoModelForCausalLM.from_pretrained(latest, dtype=torch.bfloat16)
    assert equal(dict(model.state_dict()), wire(Version(0, 3)))


def test_slow_exporter_skips_versions_and_holds_up_nobody(run: Run) -> None:
    begun, go = threading.Event(), threading.Event()

    def write(*arguments: Any) -> None:
        begun.set()
        assert go.wait(DEADLINE_S)
        write_weights(*arguments)

    run.publish(1)
    exporter, feed = start_exporter(run, write, keep_last=9)
    assert begun.wait(DEADLINE_S)
    for step in range(2, 8):
        run.publish(step)
    assert feed.wait_newer(Version(0, 6), timeout_s=DEADLINE_S)  # the exporter has it at hand
    go.set()
    exporter.close()
    assert {"step_000001", "step_000007", "latest"} <= set(exported(run))
    assert not {"step_000003", "step_000004", "step_000005", "step_000006"} & set(exported(run))
    for step in (1, 7):
        written = load_file(run.dir / "weights" / f"step_{step:06d}" / "model.safetensors")
        assert equal(written, wire(Version(0, step)))
    assert (run.dir / "weights" / "latest").resolve().name == "step_000007"


def test_exporter_killed_in_the_middle_leaves_the_former_export(run: Run, start_script: Any) -> None:
    run.publish(1)
    process = start_script(SCRIPT, run.dir, MODEL_DIR)
    root = run.dir / "weights"
    assert process.stdout.readline() == "first\n"
    run.publish(2)
    assert process.stdout.readline() == "half\n"
    process.kill()
    process.wait(DEADLINE_S)
    assert [name for name in exported(run) if not name.startswith(".")] == ["latest", "step_000001"]
    assert any(name.startswith(".export-") for name in exported(run)), "it was in the middle"
    assert equal(load_file(root / "latest" / "model.safetensors"), wire(Version(0, 1)))

    exporter, feed = start_exporter(run)
    assert feed.wait_newer(Version(0, 1), timeout_s=DEADLINE_S)
    exporter.close()
    assert exported(run) == ["latest", "step_000001", "step_000002"]
    assert equal(load_file(root / "latest" / "model.safetensors"), wire(Version(0, 2)))


def test_latest_is_complete_at_every_moment(run: Run) -> None:
    exporter, feed = start_exporter(run, keep_last=1)
    latest, done = run.dir / "weights" / "latest", threading.Event()
    problems: list[str] = []

    def look() -> None:
        while not done.is_set():
            if os.path.lexists(latest):
                named = latest.readlink()
                lacks = {"model.safetensors", "config.json", "export.json"} - entries(latest.parent / named)
                if lacks and named == latest.readlink():  # else it was replaced, and removed, meanwhile
                    problems.append(f"{named} lacks {lacks}")

    looking = threading.Thread(target=look)
    looking.start()
    for step in range(1, 6):
        run.publish(step)
        assert feed.wait_newer(Version(0, step - 1), timeout_s=DEADLINE_S)
    exporter.close()
    done.set()
    looking.join(DEADLINE_S)
    assert problems == []
    assert exported(run) == ["latest", "step_000005"]


def entries(directory: Path) -> set[str]:
    try:
        return {path.name for path in directory.iterdir()}
    except FileNotFoundError:
        return set()
