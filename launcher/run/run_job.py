"""Runs a job whose configuration was accepted: store, fork server and gangs, until the supervisor says how it ended.

`launcher.run.supervisor` decides; this shell carries out its decisions. One thread owns everything here: gang
threads and signal handlers only put events into its queue.
"""

import contextlib
import functools
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncflow.agreement import Identity, software
from asyncflow.clock import HostClock
from asyncflow.job import (
    INTERFACE_VARIABLES,
    NO_PAUSE,
    PAUSED,
    PAUSING,
    GangSpec,
    Job,
    OfferedNetworks,
    choose_interfaces,
    own_name,
)
from asyncflow.json_lines import VersionTail
from asyncflow.run_files import END_FILE, EVALUATION_FILE, JOB_FILE, METRICS_FILE, STATUS_FILE
from launcher.checks.environments import check_hosts
from launcher.checks.placement import HEAD
from launcher.loggers.feed import feeding
from launcher.nodes.options import ONE_NODE, NodePlace, save_time_left_s
from launcher.process.device_turn import DeviceTurn, TurnAsked, TurnEvent, TurnGiven, TurnLost
from launcher.process.fork_server import ForkServers, serving
from launcher.process.gang_hosts import LocalGangs
from launcher.process.launcher_process import (
    UserRequest,
    keep_torch_off_the_terminal,
    launcher_log,
    logging_to,
    stop_signals,
    user_requests,
)
from launcher.process.progress import SAVING, Output, Progress, Status, final_lines, pause_text, print_line
from launcher.process.run_events import (
    FAILED,
    AllReady,
    Arm,
    AtWork,
    DumpStacks,
    Event,
    Finish,
    GangExited,
    Instruction,
    KillGang,
    LastStepDone,
    Note,
    Phase,
    Restore,
    RunDirLost,
    RunTimer,
    SetPhase,
    StartGang,
    StopRequested,
    TimerExpired,
)
from launcher.process.worker_entry import ENTRYPOINT
from launcher.report.report import newest_sample
from launcher.run.rank_watch import RankWatch
from launcher.run.restore import restore_run
from launcher.run.rundir import has_checkpoint, newest_model
from launcher.run.status import RunEnd
from launcher.run.supervisor import RestartBudget, RestartLog, Supervisor
from workers.settings.dataflow import CONTROLLER, OBSERVERS, SERVICES, TRAINERS
from workers.settings.run import RunConfig

if TYPE_CHECKING:
    from launcher.nodes.run_nodes import RunNodes
    from launcher.process.job_store import JobStore, TurnMessages
    from launcher.run.status_writer import StatusWriter

POLL_S = 0.5
SAMPLE_S = 2.0
"""Between two looks at the newest rollout (s)."""
JOIN_TIMEOUT_S = 5.0

_FAILED = {
    "reward": "such responses have no weight (reward_failures in metrics.jsonl counts them)",
    "rollout": "it is tried rollout.max_attempts times, then rollout.on_failure says what becomes of its group",
}
"""Kind of failure that a run survives -> what happens then."""

logger = logging.getLogger(__name__)


def run_job(
    config: RunConfig,
    gangs: tuple[GangSpec, ...],
    run_dir: Path,
    *,
    resume_from: str,
    lineage: int,
    started_at: float,
    version_bytes: int = 0,
    entrypoint: str = ENTRYPOINT,
    place: NodePlace = ONE_NODE,
    identity: Identity | None = None,
    first_prompts: Sequence[Any] = (),
    output: Output = Output.LINES,
    at_end: Callable[[], str] | None = None,
) -> int:
    """Run the job to its end and return the exit code: 0 done, 1 failed, 75 stopped and resumable.

    Call it from the main thread.

    Args:
        gangs: every gang of the run; the user starts those in `launcher.external_gangs`.
        run_dir: exists and contains `config.yaml`.
        resume_from: checkpoint directory, or "".
        lineage: number of actor restores before this start.
        started_at: when the user's command started (unix time, s).
        version_bytes: size of a weight version on the wire; 0: unknown.
        entrypoint: `module:function` that every worker runs as `function(run_dir, gang)`.
        place: how many nodes the run has; this is node 0.
        identity: what must be equal on all nodes, and in gangs that are started by hand; None: of the software.
        first_prompts: of which it is.
        output: what the command prints.
        at_end: called once the run has ended; returns a line to be printed before the last one.

    Raises:
        ConfigError: another node cannot take part, or the job store cannot listen on its address.
        RoleFailed: not all nodes arrived in time.
    """
    events: SimpleQueue[Event] = SimpleQueue()
    requests: SimpleQueue[UserRequest] = SimpleQueue()
    # SimpleQueue.put is reentrant, so a signal handler may call it while the main thread puts.
    with (
        stop_signals(lambda count: events.put(StopRequested(count))),
        user_requests(requests.put),
    ):
        with contextlib.ExitStack() as stack:
            clock = HostClock.from_wall_clock()
            # First, so that a user sees what goes on while torch is imported.
            progress = stack.enter_context(
                Progress(gangs, last_step=config.steps, started_at=started_at, clock=clock.now, output=output)
            )
            progress.show_note(f"starting {sum(gang.num_ranks for gang in gangs)} processes: importing torch")
            log_file = launcher_log(run_dir)
            stack.enter_context(logging_to(log_file, config.launcher.log_format))
            pythons = config.launcher.interpreters(HEAD, own_name())
            servers = stack.enter_context(
                serving(
                    log_file,
                    threads=config.launcher.threads_per_worker,
                    pythons=[pythons[gang.role] for gang in gangs if gang.role in pythons and HEAD in gang.parts],
                )
            )
            from launcher.nodes.run_nodes import RunNodes, open_store  # imports torch
            from launcher.process.job_store import TurnMessages
            from launcher.run.status_writer import StatusWriter

            keep_torch_off_the_terminal()
            progress.show_note("")
            secret = secrets.token_hex(32)
            # Only the holder of this secret is believed on the store's port, which others on the host can reach.
            store = open_store(place, secret)
            offered, as_set = OfferedNetworks(store.host, secret), dict(os.environ)
            stack.callback(offered.close)
            choose_interfaces(store.host)  # the launcher opens channels as well
            identity = identity or software()
            if config.launcher.external_gangs:
                store.announce_tokens(first_prompts, identity)
            job = Job(
                store_host=store.host,
                store_port=store.port,
                secret=secret,
                launcher_pid=os.getpid(),
                gangs=gangs,
                lineage=lineage,
                resume_from=resume_from,
                last_step=config.steps,
                started_at=started_at,
                clock=clock,
                networks=offered.networks,
            )
            for left in (STATUS_FILE, END_FILE):  # left by an earlier start
                (run_dir / left).unlink(missing_ok=True)
            job.save(run_dir)
            # job.json marks the run as live, so it goes when the launcher ends.
            stack.callback((run_dir / JOB_FILE).unlink, missing_ok=True)
            servers.say = lambda line: progress.print_warning(f"warning: {line}")
            nodes = stack.enter_context(
                RunNodes(job, run_dir, store=store, place=place, identity=identity, events=events)
            )
            restarts = RestartLog(lineage=lineage)
            finish = nodes.gather(
                config.launcher.start_timeout_s, version_bytes=version_bytes, say=progress.print_event
            )
            if finish is None and nodes.job.nodes:
                check_hosts(config, gangs, {node.rank: node.host for node in nodes.job.nodes})
            if nodes.job.network:  # a fork server that is started again inherits it
                choose_interfaces(store.host, nodes.job.network, as_set)
                os.environ.update({name: as_set[name] for name in INTERFACE_VARIABLES})
            if finish is None:
                status = stack.enter_context(StatusWriter(nodes.job, run_dir, config))
                look_at_loggers = stack.enter_context(feeding(config.loggers, run_dir, progress.print_event))
                sides = {gang.name: gang.role for gang in gangs if gang.role in config.colocated}
                turns = None
                if sides:
                    turns = TurnMessages(store, [gang for gang in gangs if gang.name in sides], events.put)
                    stack.callback(turns.close)
                run = _Run(
                    config, nodes, run_dir, store=store, events=events, requests=requests, progress=progress,
                    status=status, look_at_loggers=look_at_loggers, entrypoint=entrypoint, restarts=restarts,
                    servers=servers, pythons=pythons, turns=turns,
                    turn=DeviceTurn(sides, interrupts=config.schedule.mode.interrupts_for_turns),
                )  # fmt: skip
                finish = run.until_finished()
            lines = _final_lines(finish, run_dir, progress=progress, job=job)
            with contextlib.suppress(OSError):  # disk full or directory gone: the terminal still shows it
                # Without the line that names the run directory.
                RunEnd(run_dir, lines[1:], finish.code, time.time(), restarts).write()
            nodes.finish_run(finish.code, lines[-1])
        if at_end is not None:
            with contextlib.suppress(Exception):  # a convenience only; `asyncflow report` tells what is wrong
                lines.insert(-1, at_end())
        for line in lines:
            print_line(line, err=finish.code == FAILED or output is Output.JSON)
    return finish.code


def _trains(job: Job) -> bool:
    """Return whether there is a run to resume; `asyncflow evaluate` has evaluators alone."""
    return any(gang.role not in OBSERVERS for gang in job.gangs)


def _final_lines(finish: Finish, run_dir: Path, *, progress: Progress, job: Job) -> list[str]:
    return final_lines(
        finish.code,
        finish.message,
        step=progress.last_finished_step,
        last_step=job.last_step if _trains(job) else 0,
        elapsed_s=job.clock.now() - job.started_at,
        run_dir=run_dir,
        resumable=has_checkpoint(run_dir),
        evaluation=progress.last_evaluation,
        model=newest_model(run_dir),
    )


class _Heard(NamedTuple):
    """When a rank wrote its last status, by its own clock, and when it arrived here (monotonic, s)."""

    written: float
    at: float


class _Run:
    """One run in progress."""

    def __init__(
        self,
        config: RunConfig,
        nodes: "RunNodes",
        run_dir: Path,
        *,
        store: "JobStore",
        events: "SimpleQueue[Event]",
        requests: "SimpleQueue[UserRequest]",
        progress: Progress,
        status: "StatusWriter",
        look_at_loggers: Callable[[float], None],
        entrypoint: str,
        restarts: RestartLog,
        servers: ForkServers,
        pythons: Mapping[str, str],
        turn: DeviceTurn,
        turns: "TurnMessages | None",
    ) -> None:
        own = config.launcher
        self._job = job = nodes.job
        self._run_dir = run_dir
        # Device and inode, to notice when the directory is replaced by another one.
        self._run_dir_is = (run_dir.stat().st_dev, run_dir.stat().st_ino)
        self._specs = {gang.name: gang for gang in job.gangs}
        self._lead = next((gang.name for gang in job.gangs if gang.role == CONTROLLER), None)  # where admission is
        self._external = {name: self._specs[name] for name in own.external_gangs}
        self._ranks = [(gang.name, rank) for gang in job.gangs for rank in range(gang.num_ranks)]
        self._nodes = nodes
        self._host = nodes.hosts
        local = LocalGangs(
            entrypoint=entrypoint,
            run_dir=run_dir,
            store=store,
            servers=servers,
            pythons=pythons,
            exited=functools.partial(nodes.hosts.part_exited, HEAD),
        )
        nodes.hosts.add_hosts({HEAD: local})
        self._store = store
        self._events = events
        self._requests = requests
        self._pause_asked = False
        self._pause = ""
        self._rests = False  # in a pause, and everything that was given out is trained
        self._turn = turn
        self._turns = turns
        self._progress = progress
        self._status = status
        self._look_at_loggers = look_at_loggers
        self._tail = VersionTail(run_dir / METRICS_FILE, lineage=job.lineage)
        self._evaluations = VersionTail(run_dir / EVALUATION_FILE, lineage=job.lineage)
        self._supervisor = Supervisor(
            job.gangs,
            restarts=RestartBudget(
                max_restarts=own.max_restarts,
                max_global_restarts=own.max_global_restarts,
                window_s=own.restart_window_s,
            ),
            start_timeout_s=config.start_timeout_s,
            start_timeout_key=config.start_timeout_key,
            max_start_s=own.max_start_s,
            evaluate_timeout_s=config.evaluate.timeout_s,
            stop_timeout_s=own.stop_timeout_s,
            reference_follows=bool(config.algorithm.ref_update_interval),
            external=self._external,
        )
        # A run that waits for processes outside may wait as long as those take, which is no deadlock.
        self._watch = RankWatch(
            start_timeout_s=config.start_timeout_s,
            max_start_s=own.max_start_s,
            operation_timeout_s=own.operation_timeout_s,
            silence_timeout_s=own.silence_timeout_s,
            deadlock_timeout_s=math.inf if config.waits_for_others else own.deadlock_timeout_s,
        )
        self._start_timeout_s = config.start_timeout_s
        self._restarts = restarts
        self._phase = Phase.RUN
        self._deadlines: dict[tuple[RunTimer, str], float] = {}
        self._gone: set[str] = set()
        self._worked: set[str] = set()
        self._all_ready = False
        self._statuses: dict[tuple[str, int], Status] = {}
        self._heard: dict[tuple[str, int], _Heard] = {}
        self._next_poll = 0.0
        self._next_sample = 0.0

    def until_finished(self) -> Finish:
        """Start the gangs and follow the supervisor; on return none of their processes is left."""
        try:
            finish = self._apply_instructions(self._supervisor.start())
            with contextlib.suppress(Empty):  # a stop requested during the imports prevents the start
                while finish is None:
                    finish = self._handle_event(self._events.get_nowait())
            if finish is None:
                self._start_gangs()
            while finish is None:
                finish = self._handle_or_poll()
            self._report_progress()
            logger.info("finish: %s", finish)
            return finish
        finally:
            self._host.close(JOIN_TIMEOUT_S)

    def _start_gangs(self) -> None:
        # Services first: all others need them.
        for gang in sorted(self._specs.values(), key=lambda gang: gang.role not in SERVICES):
            if gang.name not in self._external:
                self._host.start(gang, 0)

    def _handle_or_poll(self) -> Finish | None:
        """Handle one event, or poll if there is none."""
        wait_s = max(0.0, self._next_poll - time.monotonic())
        try:
            return self._handle_event(self._events.get(timeout=wait_s) if wait_s else self._events.get_nowait())
        except Empty:
            pass
        now = time.monotonic()
        self._next_poll = now + POLL_S
        self._look_at_loggers(now)
        self._nodes.check()
        self._obey_requests()
        self._report_progress()
        for event in [*self._due_deadlines(), *self._external_exits(), *self._stuck_ranks(), *self._lost_run_dir()]:
            if (finish := self._handle_event(event)) is not None:
                return finish
        return None

    def _obey_requests(self) -> None:
        while not self._requests.empty():
            request = self._requests.get_nowait()
            logger.info("request: %s", request.name)
            if self._lead is None:
                self._progress.print_event("nothing to save, nor to pause: this command trains nothing")
            elif request is UserRequest.SAVE:
                self._store.request_save()
                after = "the first step after the pause" if self._rests else "this step"
                self._progress.print_event(f"saving after {after}, as asked")
            else:
                self._pause_asked = request is UserRequest.PAUSE

    def _follow_pause(self) -> None:
        """Tell the user and the workers how far a pause is, if that changed."""
        running = self._phase is Phase.RUN
        lead = None if self._lead is None else self._statuses.get((self._lead, 0))
        now = pause_text(self._pause_asked and running, lead)
        if now == self._pause:
            return
        self._pause = now
        # A lead that starts again, and has not said yet how far the pause is, leaves everything at rest meanwhile.
        self._rests = now.startswith(PAUSED) or (now == PAUSING and self._rests)
        self._progress.show_pause(now)
        if not running:  # a run that stops admits nothing more: its pause is not lifted
            return
        logger.info("pause: %s", now or NO_PAUSE)
        self._store.set_pause(PAUSED if self._rests else PAUSING if now else NO_PAUSE)
        if now != PAUSING:
            self._progress.print_event(now or "the pause is over")

    def _handle_event(self, event: Event) -> Finish | None:
        logger.info("event: %s", event)
        if isinstance(event, TurnAsked | TurnGiven | TurnLost):
            self._pass_turn(event)
            return None
        if isinstance(event, StopRequested):
            self._report_progress()  # whether there is something to save may have changed since the last poll
        if isinstance(event, GangExited):
            self._read_statuses()  # whether it got to work may have changed since the last poll
            self._gone.add(event.gang)
            self._watch.forget_gang(event.gang)
            self._pass_turn(TurnLost(event.gang))
            # The supervisor judges an exit by whether the last step is done, so tell it first.
            if self._store.is_done():
                self._supervisor.handle(LastStepDone())
        is_first = self._phase is not Phase.STOP  # a scheduler signals the launchers of all nodes at once
        finish = self._apply_instructions(self._supervisor.handle(event))
        if finish is None and event == StopRequested(1) and is_first:
            saves = ": saving the last completed step" if _trains(self._job) else ""
            over = "; resumed, the run is not paused" if self._pause else ""
            self._progress.show_note(f"stopping{saves} (Ctrl-C again: at once){over}")
        return finish

    def _pass_turn(self, event: TurnEvent) -> None:
        for instruction in self._turn.handle(event):
            logger.info("instruction: %s", instruction)
            assert self._turns is not None, "gangs that take turns have messages"
            self._turns.send(instruction)

    def _apply_instructions(self, instructions: list[Instruction]) -> Finish | None:
        for instruction in instructions:
            logger.info("instruction: %s", instruction)
            match instruction:
                case SetPhase(phase=phase):
                    self._set_phase(phase)
                case Arm(timer=timer, seconds=seconds, gang=gang):
                    self._deadlines[timer, gang] = time.monotonic() + seconds
                case StartGang(gang=name, attempt=attempt):
                    self._start_again(name, attempt)
                case KillGang(gang=name):
                    self._host.kill(name)
                case DumpStacks():
                    self._host.dump_stacks()
                case Restore():
                    return self._restore_checkpoint()
                case Note():
                    self._show_note(instruction)
                case Finish():
                    return instruction
        return None

    def _show_note(self, note: Note) -> None:
        if note.failure:
            self._progress.print_warning(note.text)
            self._restarts.record_failure(note.text)
        else:
            self._progress.print_event(note.text)

    def _start_again(self, name: str, attempt: int) -> None:
        self._gone.discard(name)
        self._restarts.started_again(name)
        self._store.forget_reports(self._specs[name])
        self._turn.start_attempt(name, attempt)
        self._host.start(self._specs[name], attempt)

    def _restore_checkpoint(self) -> Finish | None:
        # `Restore` is always the last instruction of its list, so returning early skips none.
        self._job, outcome = restore_run(self._run_dir, self._job)
        self._restarts.count_restore(self._job.lineage)
        return self._handle_event(outcome)

    def _set_phase(self, phase: Phase) -> None:
        self._phase = phase
        self._store.set_phase(phase)
        if phase is Phase.EVALUATE:
            self._progress.show_note("trained and saved; held-out prompts are still being answered (Ctrl-C skips them)")

    def _report_progress(self) -> None:
        """Read what workers and trainer report; tell the user, and the supervisor once all are at work."""
        self._read_statuses()
        self._follow_pause()
        finished_steps = self._tail.read()
        # A finished step proves that all were at work, even if a status was missed.
        if not self._all_ready and (finished_steps or not self._missing_ranks()):
            self._all_ready = True
            self._supervisor.handle(AllReady())
            if not self._gone:
                self._progress.ready(len(self._ranks))
        for metrics in finished_steps:
            self._progress.step(metrics)
        for evaluation in self._evaluations.read():
            self._progress.report_evaluation(evaluation)
        for warning in self._new_warnings():
            self._progress.print_warning(f"warning: {warning}")
        if self._progress.is_live and time.monotonic() >= self._next_sample:
            self._next_sample = time.monotonic() + SAMPLE_S
            self._progress.show_sample(newest_sample(self._run_dir))
        self._progress.update(self._statuses)
        self._status.tell(
            self._statuses, self._restarts, finished_steps, self._store.last_failures(), turn=self._turn.to_text(),
            pause=self._pause,
        )  # fmt: skip

    def _read_statuses(self) -> None:
        self._statuses = self._store.read_statuses(self._ranks)
        for place, status in self._statuses.items():
            if place not in self._heard or self._heard[place].written != status.time:
                self._heard[place] = _Heard(status.time, time.monotonic())
        missing = {name for name, rank in self._ranks if not self._is_at_work(name, rank)}
        for name in self._specs.keys() - missing - self._worked:
            self._worked.add(name)
            self._supervisor.handle(AtWork(name))

    def _is_at_work(self, name: str, rank: int) -> bool:
        status = self._statuses.get((name, rank))
        return status is not None and status.at_work

    def _new_warnings(self) -> list[str]:
        """Return new warnings of any rank, and the first failed reward and rollout."""
        failures = [f"{text}; {_FAILED[kind]}" for kind, text in self._store.first_failures().items()]
        return failures + self._store.new_warnings(self._ranks)

    def _missing_ranks(self) -> list[str]:
        return [
            f"{name} rank {rank}"
            for name, rank in self._ranks
            if name not in self._gone and not self._is_at_work(name, rank)
        ]

    def _due_deadlines(self) -> list[Event]:
        due = [key for key, at in self._deadlines.items() if at <= time.monotonic()]
        for key in due:
            del self._deadlines[key]
        return [self._expired(timer, gang) for timer, gang in due]

    def _expired(self, timer: RunTimer, gang: str) -> TimerExpired:
        match timer:
            case RunTimer.START:
                return TimerExpired(timer, ", ".join(self._missing_ranks()), gang, self._more_start_s())
            case RunTimer.STOP:
                return TimerExpired(timer, "", gang, self._more_stop_s())
        return TimerExpired(timer, "", gang)

    def _more_start_s(self) -> float:
        """Return how long the ranks that are still starting may take, counted from their last progress."""
        known = [(place, status) for place, status in self._statuses.items() if place[0] not in self._gone]
        starting = [(place, status) for place, status in known if not status.at_work and not status.waits]
        # If all others wait for devices, those count that have them.
        working = [(place, status) for place, status in known if status.at_work and place[0] in self._turn.holders]
        idle_s = [
            status.idle_s + time.monotonic() - self._heard[place].at for place, status in starting or working or known
        ]
        return self._start_timeout_s - min(idle_s, default=self._start_timeout_s)

    def _more_stop_s(self) -> float:
        """Return how long a save of the trainer may still take; 0: none is being written."""
        saving = any(
            status.state == SAVING and name not in self._gone and self._specs[name].role in TRAINERS
            for (name, _), status in self._statuses.items()
        )
        # The trainer itself ends a save after `checkpoint.timeout_s`.
        return save_time_left_s(os.environ, time.time()) if saving else 0.0

    def _stuck_ranks(self) -> list[Event]:
        """Return the ranks that make no progress."""
        if self._phase is not Phase.RUN or not self._all_ready:
            return []
        # Ranks that start, for the first time or again, have another deadline.
        away = self._gone | self._supervisor.pending
        passive = SERVICES | OBSERVERS
        workers = {name: gang.role not in passive for name, gang in self._specs.items() if name not in away}
        now = time.monotonic()
        return list(self._watch.find_stuck_ranks(self._statuses, workers=workers, now=now, paused=self._rests))

    def _external_exits(self) -> list[Event]:
        """Return the exits of the gangs that the user started."""
        waited = [gang for name, gang in self._external.items() if name not in self._gone]
        return [exited for gang in waited if (exited := self._store.exit_of(gang, self._statuses)) is not None]

    def _lost_run_dir(self) -> list[Event]:
        """Return an event if the directory was removed, moved or replaced."""
        try:
            facts = self._run_dir.stat()
        except FileNotFoundError:
            return [RunDirLost(str(self._run_dir))]
        except OSError:  # a temporary error of the file system
            return []
        return [] if (facts.st_dev, facts.st_ino) == self._run_dir_is else [RunDirLost(str(self._run_dir))]
