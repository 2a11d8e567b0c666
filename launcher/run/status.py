"""`asyncflow status`: what a live run is doing. Torch-free: it reads what the launcher wrote a few seconds ago.

    launcher: StatusWriter (`launcher.run.status_writer`) --> status.json --> RunStatus.read --> tables or JSON
              at its end                                  --> end.json    --> RunEnd.read    --> lines or JSON

It only reads: nothing in the run changes, and none of its processes is asked.
"""

import contextlib
import json
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from asyncflow.clock import HostClock
from asyncflow.decoding import UNREADABLE, json_decoder, json_step
from asyncflow.errors import ConfigError, TransportError, size_text
from asyncflow.job import PAUSED, GangSpec, Job
from asyncflow.json_lines import LineReader, replace_text
from asyncflow.run_files import CONFIG_FILE, END_FILE, EVALUATION_FILE, JOB_FILE, LOGS, METRICS_FILE, STATUS_FILE
from launcher.process.fork_server import is_stopped
from launcher.process.progress import Status, Statuses, accuracy_text, plain, role_rows, table
from launcher.run.rundir import check_run_dir, is_held, running_launcher
from launcher.run.supervisor import RestartLog
from weightsync.version import Version

Fields = Mapping[str, Any]
"""A service's message as JSON represents it."""

LATE_S = 10.0
"""The user is told about a snapshot that is older (s)."""
_STALE_S = 30.0
"""A run whose launcher is on another host counts as over if its last snapshot is older (s)."""


@dataclass(frozen=True)
class RunStatus:
    """One snapshot of a run.

    Attributes:
        at: when it was taken (unix time, s).
        ranks: what each rank reported last.
        controllers: `tq.messages.QueueStats` of each controller, the lead first; empty: the queue does not answer.
        units: `tq.messages.UnitStats` of each storage unit.
        weights: `weightsync.messages.AgentStatus` of each weight agent that answers.
        evaluation: on held-out prompts, of the newest evaluated version; None: there is none yet.
        restarts: what failed and was started again; see `launcher.run.supervisor`.
        advice: `launcher.run.advice.Advice` as JSON represents it; None: there is none yet.
        failures: kind (reward, rollout) -> why one last failed.
        turn: who has the devices that roles share, and who waits; "": they share none.
        pause: how far a pause is, see `launcher.process.progress.pause_text`; "": there is none.
    """

    run_dir: Path
    at: float
    gangs: tuple[GangSpec, ...]
    ranks: Statuses
    controllers: Sequence[Fields] = ()
    units: Mapping[str, Fields] = field(default_factory=dict)
    weights: Mapping[str, Fields] = field(default_factory=dict)
    evaluation: Fields | None = None
    restarts: RestartLog = field(default_factory=RestartLog)
    advice: Fields | None = None
    failures: Mapping[str, str] = field(default_factory=dict)
    turn: str = ""
    pause: str = ""

    @staticmethod
    def read(run_dir: Path) -> "RunStatus":
        """Return the newest snapshot of a live run.

        Raises:
            ConfigError: it is not a run's directory, or nothing runs there.
            TransportError: the launcher is starting, or a signal stopped it.
        """
        launcher = running_launcher(run_dir)
        if not is_live(run_dir):
            check_run_dir(run_dir)
            raise ConfigError(
                f"run directory: no run is active in {run_dir}; results are in metrics.jsonl and logs/; to continue: "
                f"asyncflow-launch --resume {run_dir}"
            )
        if is_stopped(launcher):
            raise TransportError(
                f"{run_dir}: its launcher (process {launcher}) was stopped by a signal, so nobody answers; continue "
                f"it: kill -CONT {launcher}"
            )
        fields = _newest_fields(run_dir)
        if fields is None:
            raise TransportError(f"{run_dir}: the run is starting; ask again in a moment")
        try:
            gangs = Job.load(run_dir).gangs
        except PermissionError as error:
            raise ConfigError(
                f"run directory: {run_dir / JOB_FILE} is for the run's own user alone, so what its processes do cannot "
                f"be shown; its figures can: asyncflow view {run_dir}"
            ) from error
        return RunStatus(
            run_dir,
            fields["time"],
            gangs,
            {_place(name): Status.from_json(status) for name, status in fields["ranks"].items()},
            fields["controllers"],
            fields["units"],
            fields["weights"],
            _newest_evaluation(run_dir),
            RestartLog.from_summary(fields["restarts"]),
            fields["advice"],
            fields.get("failures", {}),
            fields.get("turn", ""),
            fields.get("pause", ""),
        )

    def as_json(self, *, indent: int | None = 2) -> str:
        """Return everything as one JSON object (SI units); `indent` None: on one line."""
        fields: dict[str, Any] = {
            "run_dir": str(self.run_dir),
            "time": self.at,
            "ranks": {f"{gang}/{rank}": asdict(status) for (gang, rank), status in self.ranks.items()},
            "controllers": self.controllers,
            "units": self.units,
            "weights": self.weights,
            "evaluation": self.evaluation,
            "restarts": self.restarts.to_summary(),
            "advice": self.advice,
            "failures": dict(self.failures),
            "turn": self.turn,
            "pause": self.pause,
        }
        return json.dumps(fields, indent=indent)

    def as_text(self, now: float) -> str:
        roles = [("ROLE", "RANKS", "DOES", "WEIGHTS"), *role_rows(self.gangs, self.ranks, now)]
        every = (self._rollouts(), self._tasks(), self._unit_rows(), self._weights())
        tables = [table(rows) for rows in every if len(rows) > 1]
        age = now - self.at
        late = f": the launcher said nothing for {age:.0f} s" if age > LATE_S else ""
        advice = [] if self.advice is None else [f"advice: {self.advice['text']}"]
        parts = [
            f"{self.run_dir}{late}",
            *([self.pause] if self.pause else []),
            table(roles),
            *([f"devices: {self.turn}"] if self.turn else []),
            *_restart_lines(self.restarts, now),
            *self._failures_text(),
            *self._held_out(),
            *advice,
        ]
        parts.append(self._queue_text())
        return plain("\n\n".join([*parts, *tables]))

    def _failures_text(self) -> list[str]:
        lines = [f"last {kind} that failed: {why}" for kind, why in sorted(self.failures.items())]
        return ["\n".join(lines)] if lines else []

    def _held_out(self) -> list[str]:
        if self.evaluation is None:
            return []
        return [f"held-out accuracy: {accuracy_text(self.evaluation)} at step {self.evaluation['step']}"]

    def _queue_text(self) -> str:
        if not self.controllers:
            return "queue: it does not answer; it may be starting"
        lead = self.controllers[0]
        room = f" of {lead['row_limit']}" if lead["row_limit"] else ""
        bytes_room = f" of {size_text(lead['byte_limit'])}" if lead["byte_limit"] else ""
        parts = [
            f"{lead['live_rows']}{room} rows, {size_text(lead['live_bytes'])}{bytes_room} live",
            f"{lead['waiting_puts']} puts wait for room",
            f"{lead['admitted_groups']} groups admitted",
            f"weights of step {lead['newest_version']}",
        ]
        if lead["lost_rows"]:
            parts.append(f"{lead['lost_rows']} rows lost with a unit")
        dead = max(stats["dead_letter_groups"] for stats in self.controllers)
        if dead:
            parts.append(f"{dead} dead-letter groups")
        filtered = max(stats["filtered_groups"] for stats in self.controllers)
        if filtered:
            parts.append(f"{filtered} groups filtered out")
        return "queue: " + ", ".join(parts)

    def _tasks(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            ("TASK", "CONTROLLER", "WAITING", "READY", "LEASED", "DONE", "ROWS/S", "REQUESTS", "OLDEST")
        ]
        for stats in self.controllers:
            for task in stats["tasks"]:
                counts = (task["waiting"], task["ready"], task["leased"], task["acked"])
                oldest = f"{task['oldest_request_s']:.1f} s" if task["parked_requests"] else "-"
                speed = f"{task['rows_per_s']:.1f}"
                parked = str(task["parked_requests"])
                rows.append((task["task"], task["controller"], *map(str, counts), speed, parked, oldest))
        return rows

    def _rollouts(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("ROLLOUTS", "LIVE", "DRAWING", "WAITING", "IN TOOLS", "TURNS", "TIME SO FAR")]
        for (gang, _), status in self.ranks.items():
            if said := status.rollouts:
                counts = [f"{said[name]:.0f}" for name in ("live", "drawing", "waiting", "in_tools", "turns")]
                times = {name: said[f"{name}_s"] for name in ("drawing", "waiting", "in_tools")}
                whole = max(1e-9, sum(times.values()))
                shares = [f"{100 * time_s / whole:.0f} % {name.replace('_', ' ')}" for name, time_s in times.items()]
                rows.append((gang, *counts, ", ".join(shares)))
        return rows

    def _unit_rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("UNIT", "ROWS", "HELD", "KEPT FOR CHECKPOINT", "IN", "OUT", "CHANNELS")]
        for name, unit in self.units.items():
            sizes = [size_text(unit[key]) for key in ("num_bytes", "retained_bytes", "bytes_in", "bytes_out")]
            channels = f"{unit['shared_channels']} shared memory, {unit['wire_channels']} wire"
            rows.append((name, str(unit["num_rows"]), *sizes, channels))
        return rows

    def _weights(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("WEIGHTS", "NEWEST", "MEMORY", "FROM OTHER NODES", "IN USE")]
        for name, agent in self.weights.items():
            serving = ", ".join(f"{who}: {Version(*version)}" for who, version in sorted(agent["serving"].items()))
            newest = "-" if agent["newest"] is None else str(Version(*agent["newest"]))
            rows.append(
                (name, newest, size_text(agent["slot_bytes"]), size_text(agent["fetched_bytes"]), serving or "-")
            )
        return rows


class _EndFile(msgspec.Struct):
    run_dir: str
    lines: list[str]
    exit_code: int | None
    time: float | None
    restarts: dict[str, Any]


_decode_end = json_decoder(_EndFile).decode


@dataclass(frozen=True)
class RunEnd:
    """How the last start of a run ended.

    Attributes:
        lines: the command's last lines; the very last says how and why it ended.
        code: its exit code; None: it ended without recording one.
        at: when (unix time, s).
        restarts: what failed before that and was started again.
        readable: whether the record is undamaged, if there is one.
    """

    run_dir: Path
    lines: Sequence[str]
    code: int | None = None
    at: float | None = None
    restarts: RestartLog = field(default_factory=RestartLog)
    readable: bool = True

    @staticmethod
    def read(run_dir: Path) -> "RunEnd | None":
        """Return it for a run that is not live; None: `run_dir` is not a run's directory."""
        try:
            fields = _decode_end((run_dir / END_FILE).read_bytes())
            lines = _as_of(run_dir, fields.run_dir, fields.lines)
            return RunEnd(run_dir, lines, fields.exit_code, fields.time, RestartLog.from_summary(fields.restarts))
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, *UNREADABLE, ValueError, KeyError, TypeError) as error:
            why = f"ended, but {END_FILE} cannot be read ({error}), so how is not known; its logs may say"
            return RunEnd(run_dir, (f"logs: {run_dir / LOGS}", why), readable=False)
        if not (run_dir / CONFIG_FILE).is_file():
            return None
        finished = [int(line["step"]) for line in _numbered_lines(run_dir / METRICS_FILE)]
        return RunEnd.killed(run_dir, max(finished, default=0))

    @staticmethod
    def killed(run_dir: Path, step: int) -> "RunEnd":
        """Return it for a run that recorded none; `step`: the last one that it finished."""
        lines = (
            f"resume with: asyncflow-launch --resume {shlex.quote(str(run_dir))}",
            f"logs: {run_dir / LOGS}",
            f"ended without a word (step {step}): its launcher was killed, or its host went down",
        )
        return RunEnd(run_dir, lines)

    def write(self) -> None:
        replace_text(self.run_dir / END_FILE, self.as_json())

    def as_json(self, *, indent: int | None = 2) -> str:
        fields = {
            "run_dir": str(self.run_dir),
            "time": self.at,
            "exit_code": self.code,
            "lines": list(self.lines),
            "restarts": self.restarts.to_summary(),
        }
        return json.dumps(fields, indent=indent)

    def as_text(self, now: float) -> str:
        ago = "" if self.at is None else f" {_duration(now - self.at)} ago, exit code {self.code}"
        return plain("\n".join([f"{self.run_dir}: ended{ago}", *_restart_lines(self.restarts, now), *self.lines]))


def _as_of(run_dir: Path, written_in: str, lines: Sequence[str]) -> list[str]:
    """Return lines that name the directory which is read: a run may have been moved or copied since they were made."""
    here = run_dir.resolve()
    if here == Path(written_in).resolve():
        return list(lines)
    old = re.compile(rf"(?<![\w/]){re.escape(written_in)}(?![\w.-])")
    return [old.sub(lambda _: str(here), line) for line in lines]


def read_status(run_dir: Path) -> RunStatus | RunEnd:
    """Return the newest snapshot of a live run, or how a run ended; raises as `RunStatus.read`."""
    end = None if is_live(run_dir) else RunEnd.read(run_dir)
    return RunStatus.read(run_dir) if end is None else end


def _restart_lines(log: RestartLog, now: float) -> list[str]:
    if not log.last_error:
        return []
    again = ", ".join(f"{name} {times}x" for name, times in sorted(log.gangs.items())) or "nothing"
    back = f"; {log.restores}x back to a checkpoint (lineage {log.lineage})" if log.restores else ""
    return [f"started again: {again}{back}\nlast error, {now - log.last_error_at:.0f} s ago: {log.last_error}"]


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def is_live(run_dir: Path) -> bool:
    """Return whether the run's launcher runs or starts on this host or, judging by its last snapshot, on another."""
    if running_launcher(run_dir) is not None:
        return True
    # A launcher has the directory for some seconds, while it imports torch, before it writes job.json; and it has it
    # still while it writes the report of a run that has ended.
    if not (run_dir / END_FILE).exists() and is_held(run_dir):
        return True
    # Another host's process id cannot be checked, so its newest snapshot decides.
    try:
        return _is_of_another_host(run_dir) and _is_recent(_newest_fields(run_dir))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def live_state(run_dir: Path) -> str:
    """Return `running` or, once everything rests, `paused`, of a run that is live."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if str((_newest_fields(run_dir) or {}).get("pause", "")).startswith(PAUSED):
            return PAUSED
    return "running"


def _is_of_another_host(run_dir: Path) -> bool:
    try:
        return Job.load(run_dir).clock.host != HostClock.from_wall_clock().host
    except PermissionError:  # another user's, whose host is not known
        return True
    except (ConfigError, OSError, ValueError, KeyError, TypeError):
        return False


def _is_recent(fields: Mapping[str, Any] | None) -> bool:
    return fields is not None and time.time() - fields["time"] <= _STALE_S


def _newest_fields(run_dir: Path) -> dict[str, Any] | None:
    try:
        fields: dict[str, Any] = json.loads((run_dir / STATUS_FILE).read_text())
    except FileNotFoundError:
        return None
    return fields


def _place(name: str) -> tuple[str, int]:
    gang, _, rank = name.rpartition("/")
    return gang, int(rank)


def _newest_evaluation(run_dir: Path) -> dict[str, Any] | None:
    return max(_numbered_lines(run_dir / EVALUATION_FILE), key=lambda line: int(line["step"]), default=None)


def _numbered_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines that have a step; damaged ones are what `asyncflow report` and `verify` complain about."""
    return [line for _, line in LineReader(path, json_step).read_lines().lines]
