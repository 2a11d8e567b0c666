"""A short run of the real command, to which something is done: started, watched, hurt, waited for, gone by pid.

Engines sleep (`sim`), so that a step takes a tenth of a second and every process is the real one. Whatever happens, no
process of the run is left: all of them carry a mark in their environment.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError

from asyncflow.sealed_store import SealedStore, connect_store
from tests.support.run_files import lines

_COMMAND = "from launcher.cli.launch import launch; launch()"
_MARK = "ASYNCFLOW_FAULT_RUN"
_LOOK_S = 0.05
START_DEADLINE_S = 180.0
"""For a run to begin on a machine with better things to do (s)."""
SETTINGS: Mapping[str, Any] = {
    "algorithm.kl_coef": 0,
    "rollout.engine": "sim",
    "actor.engine": "sim",
    "sim.mean_tokens": 4,
    "sim.parameters": 10_000,
    "sim.decode_s_per_token": 0.02,
    "rollout.batch_size": 8,
    "schedule.rollout_batch_size": 4,
    "schedule.n_samples_per_prompt": 4,
    "actor.micro_batch_size": 4,
    "tq.num_storage_units": 1,
    "checkpoint.interval": 5,
    "launcher.stop_timeout_s": 15,
}
"""Of every run; a fault adds its own."""


@dataclass(frozen=True)
class Setup:
    """How a run is started.

    Attributes:
        steps: number of the last one.
        recipe: that it begins with.
        roles: ranks per role.
        settings: beyond `SETTINGS`.
        resume: continue the run in the same directory.
        arguments: of the command, beyond those.
        prefix: a command that runs the launcher, e.g. in a namespace of its own.
        root: the file system of the run, as seen from here.
        environment: beyond this process's.
    """

    steps: int = 40
    recipe: str = "quickstart"
    roles: str = "rollout:2,actor:1"
    settings: Mapping[str, Any] = field(default_factory=dict)
    resume: bool = False
    arguments: Sequence[str] = ()
    prefix: Sequence[str] = ()
    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: its exit code; None: it had to be killed.
        last_line: of what it said.
        output: all of it.
        seconds: since the fault.
        left: processes of the run that were still there 5 s after its end.
    """

    code: int | None
    last_line: str
    output: str
    seconds: float
    left: int

    def __str__(self) -> str:
        ending = "still running, killed" if self.code is None else f"exit {self.code}"
        left = f", {self.left} processes left" if self.left else ""
        return f"{ending} after {self.seconds:.1f} s{left}: {self.last_line}"


class FaultyRun:
    """A context manager around one command."""

    def __init__(self, run_dir: Path, setup: Setup, *, cwd: Path) -> None:
        """Args:
        run_dir: absolute; as the run sees it.
        setup: how it is started.
        cwd: working directory.
        """
        self.run_dir = setup.root / run_dir.relative_to("/")
        """As seen from here."""
        self._given = run_dir
        self._setup = setup
        self._cwd = cwd
        self._mark = secrets.token_hex(8)
        self._lines: list[str] = []
        self._store: SealedStore | None = None
        self._hurt_at = time.monotonic()

    def __enter__(self) -> "FaultyRun":
        setup = self._setup
        source = ["--resume", str(self._given)] if setup.resume else [setup.recipe, "--run-dir", str(self._given)]
        settings = {**SETTINGS, **setup.settings}
        overrides = [f"--set={name}={json.dumps(value)}" for name, value in settings.items()]
        roles = ["--roles", setup.roles]
        command = [*setup.prefix, sys.executable, "-c", _COMMAND, *source, "--steps", str(setup.steps), *roles]
        self._process = subprocess.Popen(
            [*command, *overrides, *setup.arguments],
            cwd=self._cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **setup.environment, _MARK: self._mark}, errors="replace",
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._kill_all()
        self._process.wait()
        self._reader.join(5)
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def launcher(self) -> int:
        """The launcher's process id."""
        return self.job()["launcher_pid"] if (self.run_dir / "job.json").exists() else self._process.pid

    @property
    def running(self) -> bool:
        """Whether the command has not ended."""
        return self._process.poll() is None

    @property
    def output(self) -> str:
        """What it said so far."""
        return "\n".join(self._lines)

    def job(self) -> dict[str, Any]:
        """Return `job.json`."""
        job: dict[str, Any] = json.loads((self.run_dir / "job.json").read_text())
        return job

    def steps(self) -> list[int]:
        """Return the steps in `metrics.jsonl`."""
        return [line["step"] for line in lines(self.run_dir / "metrics.jsonl")]

    def wait(self, condition: Callable[[], bool], what: str, *, within_s: float = START_DEADLINE_S) -> None:
        """Wait for something that the run does.

        Raises:
            TimeoutError: it did not, or ended before; says what it said last.
        """
        deadline = time.monotonic() + within_s
        never = threading.Event()
        while not condition():
            if time.monotonic() > deadline or not self.running:
                raise TimeoutError(f"{what} did not come: {self._last_line()}")
            never.wait(_LOOK_S)

    def wait_for_step(self, step: int, *, within_s: float = START_DEADLINE_S) -> None:
        """Wait until a step is finished."""
        self.wait(lambda: max(self.steps(), default=0) >= step, f"step {step}", within_s=within_s)

    def status(self, gang: str, rank: int = 0) -> dict[str, Any]:
        """Return what a rank said about itself last; {} if nothing."""
        if self._store is None:
            job = self.job()
            timeout = timedelta(seconds=20)
            client = connect_store(job["store_host"], job["store_port"], timeout)
            self._store = SealedStore(client, bytes.fromhex(job["secret"]))
        key = f"status/{gang}/{rank}"
        status: dict[str, Any] = json.loads(self._store.get_existing([key]).get(key, "{}"))
        return status

    def pid(self, gang: str, rank: int = 0) -> int:
        """Return the process id of a rank that lives."""
        self.wait(lambda: bool(self.status(gang, rank).get("pid")), f"{gang} rank {rank}")
        return int(self.status(gang, rank)["pid"])

    def is_back(self, gang: str, former: int, rank: int = 0) -> bool:
        """Return whether a rank has another process, which is at work."""
        try:
            status = self.status(gang, rank)
        except DistError:
            return False
        return status.get("pid", 0) not in (0, former) and status["state"] != "starting"

    def hurt(self, pid: int = 0, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal (none without a pid); seconds count from here."""
        if pid:
            os.kill(pid, number)
        self._hurt_at = time.monotonic()

    def end(self, *, within_s: float) -> Ended:
        """Wait for the end of the command, so long at most; then it is killed."""
        try:
            code: int | None = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - self._hurt_at
        left = self._left_behind() if code is not None else []
        self._kill_all()
        self._reader.join(5)
        return Ended(code, self._last_line(), self.output, seconds, len(left))

    def gone(self, *, within_s: float) -> bool:
        """Return whether all processes of the run end in time."""
        deadline = time.monotonic() + within_s
        never = threading.Event()
        while self.pids():
            self._process.poll()
            if time.monotonic() > deadline:
                return False
            never.wait(_LOOK_S)
        return True

    def pids(self) -> list[int]:
        """Return the processes of the run that live."""
        wanted = f"{_MARK}={self._mark}".encode()
        return [pid for pid in _all_pids() if wanted in _read(f"/proc/{pid}/environ").split(b"\0") and _lives(pid)]

    def _left_behind(self) -> list[int]:
        return [] if self.gone(within_s=5.0) else self.pids()

    def _kill_all(self) -> None:
        for _ in range(20):
            pids = self.pids()
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if not pids:
                return
            threading.Event().wait(_LOOK_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip("\n"))

    def _last_line(self) -> str:
        return next((line for line in reversed(self._lines) if line.strip()), "")


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _lives(pid: int) -> bool:
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[:1] not in ([b"Z"], [])


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
