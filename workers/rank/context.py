"""What every worker process has: its place in the run, the job store, a timeline, and a heartbeat.

The heartbeat is a thread with its own store client. Twice a second it reports what this rank does (`status/...`) and
reads the run's phase. If the store is gone, so is the launcher, and the process exits at once.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from asyncflow.agreement import Identity, differences, software
from asyncflow.checkpoint_files import CheckpointMeta
from asyncflow.device import bind_to_device, grow_segments, make_deterministic, name_device, open_device
from asyncflow.errors import ConfigError
from asyncflow.job import NO_PAUSE, PAUSED, GangSpec, Job, choose_interfaces, last_words
from asyncflow.process import ProcessWork
from asyncflow.run_files import META_FILE, TIMELINE
from asyncflow.sealed_store import SealedStore, connect_store
from asyncflow.timeline import Timeline
from asyncflow.transport.meeting import Credentials
from tq.client.queue_client import QueueClient
from workers.calls.user_function import extend_path, search_beside
from workers.data.model_files import changed_weights, weights_fingerprint
from workers.data.task_source import data_identity
from workers.data.tokenizer import load_tokenizer, token_identity, tokenizer_files
from workers.settings.dataflow import OBSERVERS
from workers.settings.run import RunConfig

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
STARTING = "starting"
LOADING = "loading the model"  # what a rank does while it starts
SAVING = "saving"
# Kinds of failures in users' code that a run survives.
REWARD, ROLLOUT = "reward", "rollout"
# How long the job store may take to answer or to accept a thread's connection, whatever the thread waits for (s).
STORE_TIMEOUT_S = 30.0


@dataclass
class _Status:
    state: str = STARTING
    detail: str = "importing"
    step: int = 0
    version: int = -1
    rollouts: dict[str, float] = field(default_factory=dict)


class WorkerContext:
    """One rank's surroundings; a context manager. `run_dir` holds `job.json` and `config.yaml`; rank and attempt come
    from torchrun's environment variables."""

    def __init__(self, run_dir: Path, gang: str) -> None:
        self.run_dir = run_dir
        self.config = RunConfig.load(run_dir)
        search_beside(self.config.code_directory)
        extend_path()  # for a user's own policy, which the queue imports
        self.job = Job.load(run_dir)
        self.gang: GangSpec = self.job.gang(gang)
        self.rank = int(os.environ.get("RANK", "0"))
        self.attempt = int(os.environ.get("ASYNCFLOW_ATTEMPT", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
        self.node = self.gang.nodes[self.rank]
        self.name = f"{gang}/{self.rank}"
        choose_interfaces(self.job.store_host, self.job.network)
        # The user asked to stop, or another gang failed: finish what is cheap to finish, save, exit.
        self.stopping = threading.Event()
        self._woken_to_stop: list[threading.Event] = []
        self.exiting = threading.Event()  # services exit, too
        self.num_saves_asked = 0  # how often the user asked for a checkpoint
        self.pausing = threading.Event()  # the user asked for a pause: no step is admitted
        self._told_of_pauses: list[Callable[[], None]] = []
        self._pause_progress = ""
        self._paused_since: float | None = None
        self._paused_s = 0.0
        self._clock = self.job.local_clock()
        self.timeline = Timeline(run_dir / TIMELINE / f"{gang}-{self.rank}.jsonl", self._clock)
        torch.set_num_threads(self.config.launcher.threads_per_worker)
        name, role = self.gang.devices[self.rank], self.gang.role
        if role in ("actor", "critic"):
            grow_segments(name)
        # vLLM computes and receives in its own processes: this one opens no device context and reads on the CPU alone.
        rollout = self.config.rollout
        engines = {"rollout": rollout.engine, "evaluate": self.config.evaluate.engine or rollout.engine}
        elsewhere = engines.get(role) == "vllm"
        self.device = name_device(name) if elsewhere else open_device(name)
        if not elsewhere:
            bind_to_device(self.device)
        self.reading_device = torch.device("cpu") if elsewhere else self.device  # where this process copies weights to
        if self.config.deterministic:
            make_deterministic(self.device)
        self._status = _Status()
        self._told_failures: set[str] = set()
        self._progress_at = time.monotonic()
        self._store = self.sealed_store()
        self._check_agreement(
            "software",
            software(),
            by=f"{self.name} ({sys.executable})",
            what="launcher: AsyncFlow is another one",
            advice="install the same one everywhere",
        )
        # Before the first heartbeat, so that admission that starts again in a pause admits nothing.
        self._obey_pause(self._store.get_existing(["pause"]).get("pause", NO_PAUSE.encode()).decode())
        self._closed = threading.Event()
        self._start_work = ProcessWork(os.getpid())
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._heart.start()

    def __enter__(self) -> "WorkerContext":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._heart.join(timeout=5)
        self._end_pause()
        self.timeline.close()
        self._store.set(f"left/{self.gang.name}/{self.rank}", last_words(error))

    @cached_property
    def start_step(self) -> int:
        """Step of the weights that this run starts from; 0 for a fresh one."""
        if not self.job.resume_from:
            return 0
        return int(json.loads((Path(self.job.resume_from) / META_FILE).read_text())["step"])

    def first_data_hash(self) -> str:
        """Return the identity of the data that the run began with: from its checkpoint, otherwise from their first
        reader."""
        if self.job.resume_from:
            return CheckpointMeta.read(Path(self.job.resume_from)).data_hash
        return self.said_first("data_hash", data_identity(self.config.data))

    def first_tokenizer_files(self) -> dict[str, str]:
        """Return the tokenizer that the run began with (`tokenizer_files`), in the same way."""
        saved = CheckpointMeta.read(Path(self.job.resume_from)).tokenizer_files if self.job.resume_from else {}
        now = json.dumps(tokenizer_files(Path(self.config.model.path)))
        return saved or dict(json.loads(self.said_first("tokenizer_files", now)))

    def first_weights(self) -> dict[str, str]:
        """Return directory -> `weights_fingerprint` of each model that scores, as the run began, in the same way."""
        return self._first_weights(self.config.scoring_models.values())

    def _first_weights(self, paths: Iterable[str]) -> dict[str, str]:
        saved = CheckpointMeta.read(Path(self.job.resume_from)).scoring_weights if self.job.resume_from else {}
        return {path: saved.get(path) or self._first_weights_in(path) for path in paths}

    def _first_weights_in(self, path: str) -> str:
        key = f"weights/{path}"
        # Who only wants to know what others found needs no model there any more.
        said = self._store.get_existing([f"first/{key}"])
        return next(iter(said.values())).decode() if said else self.said_first(key, weights_fingerprint(Path(path)))

    def check_weights(self, *tasks: str) -> None:
        """Raise ConfigError if a model that one of the tasks scores with has other weights than when the run began: a
        process that starts again would give its rows something else than the others got."""
        own = {key: path for task in tasks for key, path in self.config.models_of(task).items()}
        first = self._first_weights(own.values()) if own else {}
        for key, path in own.items():
            if what := changed_weights(Path(path), first[path], key=key):
                raise ConfigError(what)

    def load_tokenizer(self) -> Any:
        """Return the model's tokenizer. Processes with other interpreters, or on other nodes, must have the same one.
        Raises ConfigError if it cannot be loaded, or produces other tokens than that of the first process."""
        tokenizer = load_tokenizer(Path(self.config.model.path), self.config.data.templates)
        # There for gangs that are started by hand, which no launcher has asked before.
        prompts = json.loads(self._store.get_existing(["first_prompts"]).get("first_prompts", "[]"))
        libraries = " and ".join(f"{name} {version(name)}" for name in ("transformers", "tokenizers"))
        self._check_agreement(
            "tokens",
            token_identity(tokenizer, chat=self.config.data.chat_template, prompts=prompts),
            by=f"{self.name} ({libraries}, {sys.executable})",
            what=f"model.path: the tokenizer of {self.config.model.path} gives other tokens",
            advice="use the same versions of both libraries",
        )
        return tokenizer

    def _check_agreement(self, key: str, own: Identity, *, by: str, what: str, advice: str) -> None:
        """Raise ConfigError, which names what differs, if the first process that said `key` said something else."""
        first_by, first = json.loads(self.said_first(key, json.dumps([by, own])))
        if differing := differences(first, own):
            raise ConfigError(f"{what} in {by} than in {first_by}: {differing}; {advice}")

    @property
    def shares_devices(self) -> bool:
        """Whether this role takes turns with another one on its devices; see `workers.rank.device_turn`."""
        return self.gang.role in self.config.colocated

    @property
    def elapsed_s(self) -> float:
        """Seconds since the user's command started, even if the wall clock was set since."""
        return self._clock.now() - self.job.started_at

    def new_store(self, timeout_s: float | None = None) -> TCPStore:
        """Return a client of the job store for torch's process groups; each thread that may block needs its own."""
        timeout = timedelta(seconds=timeout_s or self.config.start_timeout_s)
        return connect_store(self.job.store_host, self.job.store_port, timeout)

    def sealed_store(self, timeout_s: float | None = None) -> SealedStore:
        """Return a client of the job store for everything else."""
        return SealedStore(self.new_store(timeout_s), bytes.fromhex(self.job.secret))

    def group_store(self) -> Store:
        """Return the store for this gang's process group, new for every attempt: old addresses are never read."""
        return PrefixStore(f"pg/{self.gang.name}/{self.job.lineage}/{self.attempt}", self.new_store())

    def job_credentials(self) -> Credentials:
        timeout_s = self.config.start_timeout_s
        store = self.new_store(min(timeout_s, STORE_TIMEOUT_S))  # its clones connect with this deadline
        return Credentials(store, bytes.fromhex(self.job.secret), timeout_s)

    def queue_client(self) -> QueueClient:
        return QueueClient(
            self.job_credentials(), self.name, config=self.config.tq, stop=self.stopping, attempt=self.attempt
        )

    def report_state(
        self,
        state: str,
        detail: str = "",
        *,
        step: int | None = None,
        version: int | None = None,
        rollouts: dict[str, float] | None = None,
    ) -> None:
        """Set what this rank does from now on; the next heartbeat reports it.

        Args:
            state: a few words, e.g. `generating`, `waiting for weights`; `detail`: more, e.g. `64 responses`.
            step, version, rollouts: None: unchanged; the last are `Rollouts.figures`.
        """
        self.report_progress()
        old = self._status
        self._status = _Status(
            state,
            detail,
            old.step if step is None else step,
            old.version if version is None else version,
            old.rollouts if rollouts is None else rollouts,
        )

    @contextmanager
    def reporting(self, state: str, *, step: int | None = None) -> Iterator[None]:
        """Report a state inside the block, and the previous state again after it."""
        before = self._status
        self.report_state(state, step=step)
        try:
            yield
        finally:
            self.report_state(before.state, before.detail, step=before.step)

    @contextmanager
    def waiting_for_devices(self, state: str) -> Iterator[None]:
        """Report `state` inside the block; a rank that is starting stays so, since it does not work yet."""
        before = self._status
        self._status = replace(before, detail=state) if before.state == STARTING else replace(before, state=state)
        try:
            yield
        finally:
            self.report_state(before.state, before.detail, step=before.step)

    def report_progress(self) -> None:
        """Note progress; a busy rank that stops reporting it counts as stuck."""
        self._progress_at = time.monotonic()

    def warn_user(self, text: str) -> None:
        """Show the user, in one line, a problem that the run survives; "" clears it. Any thread may call."""
        if text:
            logger.warning("%s", text)
        # The launcher shows this key.
        self._store.set(f"warning/{self.gang.name}/{self.rank}", json.dumps({"time": time.time(), "text": text}))

    def reward_failed(self, why: str) -> None:
        """Report why a response could not be scored; see `_record_failure`."""
        self._record_failure(REWARD, why)

    def rollout_failed(self, why: str) -> None:
        """Report why an attempt at a rollout failed; see `_record_failure`."""
        self._record_failure(ROLLOUT, why)

    def last_failure(self, kind: str) -> str:
        """Return why the last failed scoring (`REWARD`) or rollout (`ROLLOUT`) failed, on any rank; "" if none did."""
        key = f"{kind}_failure"
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else ""

    def _record_failure(self, kind: str, why: str) -> None:
        # The launcher shows the first failure; `asyncflow status`, and the error that ends the run, show the last.
        if kind not in self._told_failures:
            self.said_first(f"{kind}_failure", why)
            self._told_failures.add(kind)
        self._store.put(f"{kind}_failure", why)  # before the trainer gets the response, which may end the run

    def said_first(self, key: str, value: str) -> str:
        """Return the value that any rank set first for `key` since the user's command started, or set it."""
        return self._store.set_first(f"first/{key}", value).decode()

    def wake_to_stop(self, wake: threading.Event) -> None:
        """Also set `wake` when the run stops, for a thread that waits for it and then checks `stopping`."""
        self._woken_to_stop.append(wake)

    def report_pause(self, text: str) -> None:
        """Set how far a pause is, as admission sees it; "": there is none. Any thread may call."""
        self._pause_progress = text

    def on_pause(self, call: Callable[[], None]) -> None:
        """Call `call`, in the heartbeat's thread, whenever `pausing` changes."""
        self._told_of_pauses.append(call)

    @property
    def paused_s(self) -> float:
        """Seconds so far in which the run was paused and everything admitted was trained, as this rank heard of it."""
        since = self._paused_since
        return self._paused_s + (0.0 if since is None else time.monotonic() - since)

    @property
    def last_step(self) -> int:
        """Number of the last step: from the settings, or an earlier one if a feed ended."""
        said = self._store.get_existing([self._last_step_key]) if self.config.data.is_feed else {}
        return int(said.get(self._last_step_key, self.job.last_step))

    def end_at(self, step: int) -> None:
        """Make an already trained step the last one. Any thread may call."""
        self._store.set(self._last_step_key, str(step))

    @property
    def _last_step_key(self) -> str:
        return f"last_step/{self.job.lineage}"  # an earlier lineage may have ended later

    def mark_done(self) -> None:
        self._store.set("done", "1")

    def waiting_seconds(self) -> dict[str, list[tuple[float, float]]]:
        """Return, per role, (unix time, seconds waited so far) of every rank that has reported since it started."""
        keys = [(gang.role, f"status/{gang.name}/{k}") for gang in self.job.gangs for k in range(gang.num_ranks)]
        said = self._store.get_existing([key for _, key in keys])
        waiting: dict[str, list[tuple[float, float]]] = {}
        for role, key in keys:
            fields = json.loads(said.get(key, "{}"))
            if "waiting_s" in fields:  # otherwise the launcher wrote it, at a (re)start
                waiting.setdefault(role, []).append((fields["time"], fields["waiting_s"]))
        return waiting

    def _beat(self) -> None:
        store = self.sealed_store(STORE_TIMEOUT_S)
        try:
            while True:
                self._write_status(store)
                said = store.get_existing(["phase", "save", "pause"])
                if phase := said.get("phase"):
                    self._obey_phase(phase.decode())
                self.num_saves_asked = int(said.get("save", "0"))
                if pause := said.get("pause"):
                    self._obey_pause(pause.decode())
                if self._closed.wait(HEARTBEAT_S):
                    return
        except RuntimeError:
            if not self._closed.is_set():
                logger.error("%s: the job store is gone, and with it the launcher; exiting", self.name)
                os._exit(1)

    def _write_status(self, store: SealedStore) -> None:
        # A rank that loads or compiles reports nothing meanwhile; its bytes and compilers show that it gets on.
        if self._status.state == STARTING and self._start_work.advanced():
            self.report_progress()
        status = {
            **vars(self._status),
            "pause": self._pause_progress,
            "time": self._clock.now(),
            "pid": os.getpid(),
            "waiting_s": self.timeline.waiting_s,
            "idle_s": time.monotonic() - self._progress_at,
        }
        store.set(f"status/{self.gang.name}/{self.rank}", json.dumps(status))
        self.timeline.flush()

    def _obey_phase(self, phase: str) -> None:
        if phase in ("stop", "exit") or (phase == "evaluate" and self.gang.role not in OBSERVERS):
            self.stopping.set()
            for wake in self._woken_to_stop:
                wake.set()
        if phase == "exit":
            self.exiting.set()

    def _obey_pause(self, pause: str) -> None:
        if pause != PAUSED:
            self._end_pause()
        elif self._paused_since is None:
            self._paused_since = time.monotonic()
        if (pause != NO_PAUSE) != self.pausing.is_set():
            if pause != NO_PAUSE:
                self.pausing.set()
            else:
                self.pausing.clear()
            for call in self._told_of_pauses:
                call()

    def _end_pause(self) -> None:
        if self._paused_since is not None:
            lasted_s = time.monotonic() - self._paused_since
            self._paused_s, self._paused_since = self._paused_s + lasted_s, None
            self.timeline.record_span(PAUSED, lasted_s)
