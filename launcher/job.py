"""Runs a job whose configuration was accepted: store, fork server, gangs, until the supervisor says how it ended.

`launcher.cli` calls `run_job`. Decisions are `launcher.supervisor`'s; this is the shell that carries them out. One
thread owns everything here: gang threads and signal handlers only put events into its queue.
"""

import contextlib
import functools
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING

from asyncflow.clock import HostClock
from asyncflow.job import FILE_NAME, GangSpec, Job, error_in
from asyncflow.lifeline import STOP_SIGNALS
from launcher import preload
from launcher.line_tail import EvaluationTail, MetricsTail
from launcher.progress import Progress, Status, final_lines, print_line
from launcher.rundir import EVALUATION_FILE, METRICS_FILE, has_checkpoint
from launcher.supervisor import (
    FAILED,
    AllReady,
    Arm,
    DeadlinePassed,
    Event,
    Finish,
    GangExited,
    Instruction,
    KillGang,
    LastStepDone,
    Phase,
    SetPhase,
    StopRequested,
    Supervisor,
    Timer,
)
from workers.config import RunConfig
from workers.dataflow import SERVICES

if TYPE_CHECKING:
    from launcher.job_store import JobStore

ENTRYPOINT = "workers.main:run_worker"
POLL_S = 0.5
JOIN_TIMEOUT_S = 5.0
SAME_PRESS_S = 0.5
"""Wrappers such as `timeout` deliver one Ctrl-C twice; a second one counts only after so long (s)."""

logger = logging.getLogger(__name__)


def run_job(
    config: RunConfig,
    gangs: tuple[GangSpec, ...],
    run_dir: Path,
    *,
    resume_from: str,
    lineage: int,
    started_at: float,
    entrypoint: str = ENTRYPOINT,
) -> int:
    """Run the job to its end; call it from the main thread.

    Args:
        config: the resolved configuration.
        gangs: every gang of the run; those in `launcher.external_gangs` are the user's to start.
        run_dir: exists, with `config.yaml` in it.
        resume_from: checkpoint directory, or "".
        lineage: number of actor restores before this start.
        started_at: when the user's command started (unix time, s).
        entrypoint: `module:function` that every worker runs as `function(run_dir, gang)`.
    Returns:
        The exit code: 0 done, 1 failed, 75 stopped and resumable.
    """
    events: SimpleQueue[Event] = SimpleQueue()
    with _stop_signals(events):
        with contextlib.ExitStack() as stack:
            log_file = run_dir / "logs" / "launcher.log"
            stack.enter_context(_logging_to(log_file))
            # The fork server imports torch on one core while this process does so on the other.
            os.environ.update(preload.environment(threads=config.launcher.threads_per_worker))
            preload.start(log_file)
            stack.callback(preload.stop)
            stack.enter_context(preload.hidden_main())
            from launcher.job_store import JobStore  # imports torch

            _keep_torch_off_the_terminal()
            store = JobStore()
            job = Job(
                store_host=store.host,
                store_port=store.port,
                secret=secrets.token_hex(32),
                launcher_pid=os.getpid(),
                gangs=gangs,
                lineage=lineage,
                resume_from=resume_from,
                last_step=config.steps,
                started_at=started_at,
                clock=HostClock.measure(),
            )
            job.save(run_dir)
            stack.callback((run_dir / FILE_NAME).unlink, missing_ok=True)
            progress = stack.enter_context(Progress(gangs, last_step=config.steps, started_at=started_at))
            run = _Run(config, job, run_dir, store=store, events=events, progress=progress, entrypoint=entrypoint)
            finish = run.until_finished()
        _say_how_it_ended(finish, run_dir, progress=progress, job=job)
    return finish.code


def _say_how_it_ended(finish: Finish, run_dir: Path, *, progress: Progress, job: Job) -> None:
    lines = final_lines(
        finish.code,
        finish.message,
        step=progress.last_finished_step,
        last_step=job.last_step,
        elapsed_s=time.time() - job.started_at,
        run_dir=run_dir,
        resumable=has_checkpoint(run_dir),
        evaluation=progress.last_evaluation,
    )
    for line in lines:
        print_line(line, err=finish.code == FAILED)


class _Run:
    """One run while it goes on."""

    def __init__(
        self,
        config: RunConfig,
        job: Job,
        run_dir: Path,
        *,
        store: "JobStore",
        events: "SimpleQueue[Event]",
        progress: Progress,
        entrypoint: str,
    ) -> None:
        from launcher.gang import Gang  # imports torch

        external = set(config.launcher.external_gangs)
        new_gang = functools.partial(Gang, entrypoint=entrypoint, run_dir=run_dir, store=store, events=events)
        self._gangs: dict[str, Gang] = {gang.name: new_gang(gang) for gang in job.gangs if gang.name not in external}
        self._external = {gang.name: gang for gang in job.gangs if gang.name in external}
        self._ranks = [(gang.name, rank) for gang in job.gangs for rank in range(gang.num_ranks)]
        self._store = store
        self._events = events
        self._progress = progress
        self._tail = MetricsTail(run_dir / METRICS_FILE, lineage=job.lineage)
        self._evaluations = EvaluationTail(run_dir / EVALUATION_FILE, lineage=job.lineage)
        self._supervisor = Supervisor(
            job.gangs,
            start_timeout_s=config.launcher.start_timeout_s,
            evaluate_timeout_s=config.evaluate.timeout_s,
            stop_timeout_s=config.launcher.stop_timeout_s,
        )
        self._deadlines: dict[Timer, float] = {}
        self._gone: set[str] = set()
        self._all_ready = False
        self._statuses: dict[tuple[str, int], Status] = {}
        self._next_poll = 0.0

    def until_finished(self) -> Finish:
        """Start the gangs and follow the supervisor; on return no process of theirs is left."""
        try:
            finish = self._apply(self._supervisor.start())
            with contextlib.suppress(Empty):  # a stop that was requested during the imports comes before the start
                while finish is None:
                    finish = self._take(self._events.get_nowait())
            if finish is None:
                self._start()
            while finish is None:
                finish = self._once()
            self._show()
            logger.info("finish: %s", finish)
            return finish
        finally:
            self._end()

    def _start(self) -> None:
        order = sorted(self._gangs.values(), key=lambda gang: gang.spec.role not in SERVICES)
        for gang in order:
            gang.start()

    def _once(self) -> Finish | None:
        """Handle one event, or poll when there is none."""
        wait_s = max(0.0, self._next_poll - time.monotonic())
        try:
            return self._take(self._events.get(timeout=wait_s) if wait_s else self._events.get_nowait())
        except Empty:
            pass
        self._next_poll = time.monotonic() + POLL_S
        self._show()
        for event in [*self._due(), *self._left()]:
            if (finish := self._take(event)) is not None:
                return finish
        return None

    def _take(self, event: Event) -> Finish | None:
        logger.info("event: %s", event)
        if isinstance(event, StopRequested):
            self._show()  # whether there is something to save may be news of the last half second
        if isinstance(event, GangExited):
            self._gone.add(event.gang)
            if self._store.is_done():
                self._supervisor.handle(LastStepDone())
        finish = self._apply(self._supervisor.handle(event))
        if finish is None and event == StopRequested(1):
            self._progress.note("stopping: saving the last completed step (Ctrl-C again: at once)")
        return finish

    def _apply(self, instructions: list[Instruction]) -> Finish | None:
        for instruction in instructions:
            logger.info("instruction: %s", instruction)
            match instruction:
                case SetPhase(phase=phase):
                    self._set_phase(phase)
                case Arm(timer=timer, seconds=seconds):
                    self._deadlines[timer] = time.monotonic() + seconds
                case KillGang(gang=name):
                    if name in self._gangs:
                        self._gangs[name].kill()
                case Finish():
                    return instruction
        return None

    def _set_phase(self, phase: Phase) -> None:
        self._store.set_phase(phase)
        if phase is Phase.EVALUATE:
            self._progress.note("trained and saved; held-out prompts are still answered (Ctrl-C leaves that out)")

    def _show(self) -> None:
        """Read what workers and trainer say; tell the user, and the supervisor when all are at work."""
        self._statuses = self._store.statuses(self._ranks)
        finished_steps = self._tail.read()
        if not self._all_ready and (finished_steps or not self._missing()):
            self._all_ready = True
            self._supervisor.handle(AllReady())
            if not self._gone:
                self._progress.ready(len(self._ranks))
        for metrics in finished_steps:
            self._progress.step(metrics)
        for evaluation in self._evaluations.read():
            self._progress.evaluation(evaluation)
        self._progress.update(self._statuses)

    def _missing(self) -> list[str]:
        """Return the ranks that are not at work yet."""
        return [
            f"{name} rank {rank}"
            for name, rank in self._ranks
            if name not in self._gone and not ((status := self._statuses.get((name, rank))) and status.at_work)
        ]

    def _due(self) -> list[Event]:
        """Return the deadlines that passed."""
        due = [timer for timer, at in self._deadlines.items() if at <= time.monotonic()]
        for timer in due:
            del self._deadlines[timer]
        return [DeadlinePassed(timer, ", ".join(self._missing()) if timer is Timer.START else "") for timer in due]

    def _left(self) -> list[Event]:
        """Return the exits of external gangs: all ranks said so, or one is gone without a word."""
        exits: list[Event] = []
        for name, gang in self._external.items():
            if name in self._gone:
                continue
            words = {rank: self._store.left(name, rank) for rank in range(gang.num_ranks)}
            failed = [rank for rank, word in words.items() if error_in(word)]
            vanished = [rank for rank, word in words.items() if word is None and self._has_vanished(name, rank)]
            if failed:
                exits.append(GangExited(name, 1, error_in(words[failed[0]]), failed[0], time.time()))
            elif vanished:
                exits.append(GangExited(name, 1, "its process is gone", vanished[0], time.time()))
            elif None not in words.values():
                exits.append(GangExited(name, 0, at=time.time()))
        return exits

    def _has_vanished(self, gang: str, rank: int) -> bool:
        status = self._statuses.get((gang, rank))
        return status is not None and status.pid > 0 and not Path(f"/proc/{status.pid}").exists()

    def _end(self) -> None:
        """Kill what is left of the gangs and wait for their threads."""
        for gang in self._gangs.values():
            gang.kill()
        preload.stop()
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        for name, gang in self._gangs.items():
            if not gang.join(max(0.0, deadline - time.monotonic())):
                logger.error("the thread of gang %s did not end", name)


@contextlib.contextmanager
def _stop_signals(events: "SimpleQueue[Event]") -> Iterator[None]:
    """Turn SIGINT, SIGTERM, SIGUSR1 and SIGHUP into `StopRequested`; only a repeated Ctrl-C counts beyond the first.

    SIGHUP comes when the terminal is closed; under `nohup` it stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    count = 0
    last_at = 0.0

    def request(number: int, _: FrameType | None) -> None:
        nonlocal count, last_at
        now = time.monotonic()
        if count == 0 or (number == signal.SIGINT and now - last_at > SAME_PRESS_S):
            count += 1
            last_at = now
            events.put(StopRequested(count))  # SimpleQueue.put may be interrupted by itself

    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [number for number in STOP_SIGNALS if not (under_nohup and number is signal.SIGHUP)]
    before = {number: signal.signal(number, request) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Send the launcher's log, Python warnings and errors of its threads to one file; the terminal stays the user's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger()
    level, hook = root.level, threading.excepthook
    root.addHandler(handler)
    root.setLevel(logging.INFO)

    def log_thread_error(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else "?"
        error = args.exc_value
        logger.error("thread %s died", name, exc_info=error if error is not None else True)

    threading.excepthook = log_thread_error
    try:
        yield
    finally:
        threading.excepthook = hook
        root.setLevel(level)
        root.removeHandler(handler)
        handler.close()


def _keep_torch_off_the_terminal() -> None:
    """Have torch's loggers, which write to stderr themselves, write to the launcher's log."""
    for name in ("torch", "torch.distributed"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    # It warns of every agent outside the main thread, where it cannot take over the signals: as it should be.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.ERROR)
