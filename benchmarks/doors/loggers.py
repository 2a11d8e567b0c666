"""A run with loggers and the same run without."""

import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from asyncflow.json_lines import LineReader

COMMAND = Path(sys.executable).parent / "asyncflow-launch"
SETTINGS = (
    *("rollout.engine=sim", "actor.engine=sim", "ref.engine=sim", "schedule.rollout_batch_size=8"),
    *("sim.lengths=constant", "sim.mean_tokens=20", "sim.optimizer_s=1.0", "checkpoint.interval=0"),
)
LOGGERS = "loggers=[tensorboard, {name: wandb, options: {mode: offline}}]"
CHILD = "launcher.loggers.feed"
FIRST = 10
"""Step from which a run is in its steady state: libraries are loaded, and the first table of samples is sent."""
POLL_S = 0.2


def measure(steps: int) -> dict[str, float]:
    """Return the figures of this part."""
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor() as both:
        # Side by side: what else the machine does slows both. They sleep most of the time.
        plain = both.submit(_run, Path(temporary) / "plain", steps)
        logged = both.submit(_run, Path(temporary) / "logged", steps, LOGGERS)
        (plain_s, _), (logged_s, cpu) = plain.result(), logged.result()
    return {"logger_cpu": cpu, "logger_overhead": logged_s / plain_s}


def _run(run_dir: Path, steps: int, *more: str) -> tuple[float, float]:
    """Return the median time of a step (s), and the CPU time of loggers by time (cores)."""
    options = [word for setting in (*SETTINGS, *more) for word in ("--set", setting)]
    command: list[str | Path] = [
        COMMAND,
        "--run-dir",
        str(run_dir),
        "--steps",
        str(steps),
        "--roles",
        "rollout:1,actor:1",
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    never = threading.Event()
    marks: list[tuple[float, float]] = []
    while process.poll() is None:
        done = _times(run_dir)
        if FIRST <= len(done) < steps:
            marks.append((time.monotonic(), _cpu_s(process.pid)))
        never.wait(POLL_S)
    if process.returncode:
        raise SystemExit(f"{COMMAND.name} ended with {process.returncode}: {process.stderr and process.stderr.read()}")
    (began, cpu_before), (ended, cpu_after) = marks[0], marks[-1]
    return statistics.median(_times(run_dir)[FIRST:]), (cpu_after - cpu_before) / (ended - began)


def _times(run_dir: Path) -> list[float]:
    return [line["step_time_s"] for line in LineReader(run_dir / "metrics.jsonl").read()]


def _cpu_s(launcher: int) -> float:
    """Return the CPU time of all loggers so far (s)."""
    total = 0.0
    for child in psutil.Process(launcher).children():
        if CHILD in child.cmdline():
            for each in (child, *child.children(recursive=True)):
                times = each.cpu_times()
                total += times.user + times.system
    return total
