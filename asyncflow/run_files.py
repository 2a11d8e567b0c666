"""The names of everything that a run keeps in its directory, for launcher, workers and tools. Torch-free."""

# config.yaml  plan.json  metrics.jsonl  ledger.jsonl  updates.jsonl  evaluation.jsonl  sampler.jsonl  feed.jsonl
# logs/ROLE/RANK.log  checkpoints/step_000010/meta.json  samples/  trace/  timeline/  loggers/  inputs/  report.html
# job.json  status.json  while it runs; end.json  after that

import re
from pathlib import Path

CONFIG_FILE = "config.yaml"  # the resolved configuration
PLAN_FILE = "plan.json"  # what `--roles auto:N` chose, with its prediction
METRICS_FILE = "metrics.jsonl"
LEDGER_FILE = "ledger.jsonl"
UPDATES_FILE = "updates.jsonl"
EVALUATION_FILE = "evaluation.jsonl"
SAMPLER_FILE = "sampler.jsonl"  # which tasks `data.sampler` drew, and its state
FEED_FILE = "feed.jsonl"  # the rows that processes outside the run fed
JOB_FILE = "job.json"  # where the job store is, and the job's secret: see `asyncflow.job`
STATUS_FILE = "status.json"  # what `asyncflow status` shows

END_FILE = "end.json"  # how the run's last start ended; see `launcher.run.status.RunEnd`

LOGS = "logs"
CHECKPOINTS = "checkpoints"
SAMPLES = "samples"
TRACE = "trace"  # leases and trainer's log-probabilities of kept rows; the index of `asyncflow trace`
TIMELINE = "timeline"
LOGGERS = "loggers"  # each logger's progress, and what loggers write on this machine
INPUTS = "inputs"  # functions and rows that `asyncflow.Trainer` got as Python objects
REPORT_FILE = "report.html"

# In each checkpoint; written last, with size and checksum of every other file.
META_FILE = "meta.json"

DIRECTORIES = (LOGS, CHECKPOINTS, SAMPLES, TRACE, TIMELINE)
LINE_FILES = (METRICS_FILE, LEDGER_FILE, UPDATES_FILE, EVALUATION_FILE, SAMPLER_FILE, FEED_FILE)
LIVE_FILES = (JOB_FILE, STATUS_FILE, "status.tmp")
# Everything that a run may create in its directory.
OWN_NAMES = frozenset(
    {
        CONFIG_FILE,
        PLAN_FILE,
        *LINE_FILES,
        *LIVE_FILES,
        END_FILE,
        *DIRECTORIES,
        INPUTS,
        LOGGERS,
        REPORT_FILE,
        "reference",
        "export-id",
    }
)

_CHECKPOINT = re.compile(r"step_(\d{6,})")


def checkpoint_path(run_dir: Path, step: int) -> Path:
    return run_dir / CHECKPOINTS / f"step_{step:06d}"


def checkpoint_step(path: Path) -> int | None:
    """Return the step in a directory's name, or None if a run does not give such names.

    Copies and renamed directories (`step_000006_backup`, `step_000006.old`) are the user's: no run counts, cuts, prunes
    or verifies them.
    """
    match = _CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match and path.name == f"step_{int(match[1]):06d}" else None


def list_checkpoints(run_dir: Path) -> dict[int, Path]:
    """Return a run's checkpoints by step, in order, valid or not; empty if there are none."""
    root = run_dir / CHECKPOINTS
    paths = root.iterdir() if root.is_dir() else ()
    found = {step: path for path in paths if (step := checkpoint_step(path)) is not None}
    return dict(sorted(found.items()))
