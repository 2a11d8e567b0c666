"""The names of what a run keeps in its directory, for launcher, workers and tools alike. Torch-free.

config.yaml  plan.json  metrics.jsonl  ledger.jsonl  updates.jsonl  evaluation.jsonl  sampler.jsonl  feed.jsonl
logs/ROLE/RANK.log  checkpoints/step_000010/meta.json  samples/  timeline/  loggers/  inputs/  report.html
job.json  status.json  while it runs; end.json  after that
"""

import re
from pathlib import Path

CONFIG_FILE = "config.yaml"
"""The resolved configuration."""
PLAN_FILE = "plan.json"
"""What `--roles auto:N` chose, and predicted."""
METRICS_FILE = "metrics.jsonl"
LEDGER_FILE = "ledger.jsonl"
UPDATES_FILE = "updates.jsonl"
EVALUATION_FILE = "evaluation.jsonl"
SAMPLER_FILE = "sampler.jsonl"
"""Which tasks `data.sampler` drew, and its state."""
FEED_FILE = "feed.jsonl"
"""The rows that processes outside fed."""
JOB_FILE = "job.json"
"""Where the job store is, and its secret: see `asyncflow.job`."""
STATUS_FILE = "status.json"
"""What `asyncflow status` shows."""

END_FILE = "end.json"
"""How the run's last start ended; see `launcher.run.status.RunEnd`."""

LOGS = "logs"
CHECKPOINTS = "checkpoints"
SAMPLES = "samples"
TIMELINE = "timeline"
LOGGERS = "loggers"
"""How far each logger is, and what loggers write on this machine."""
INPUTS = "inputs"
"""Functions and rows that `asyncflow.Trainer` was given as Python objects."""
REPORT_FILE = "report.html"

META_FILE = "meta.json"
"""In each checkpoint: written last, with size and checksum of every other file."""

DIRECTORIES = (LOGS, CHECKPOINTS, SAMPLES, TIMELINE)
LINE_FILES = (METRICS_FILE, LEDGER_FILE, UPDATES_FILE, EVALUATION_FILE, SAMPLER_FILE, FEED_FILE)
LIVE_FILES = (JOB_FILE, STATUS_FILE, "status.tmp")
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
"""What a run may create in its directory."""

_CHECKPOINT = re.compile(r"step_(\d{6,})")


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Return where a run's complete checkpoint of a step lies."""
    return run_dir / CHECKPOINTS / f"step_{step:06d}"


def checkpoint_step(path: Path) -> int | None:
    """Return the step that a directory's name says, or None: the name is not one that a run gives.

    Copies and what is set aside (`step_000006_backup`, `step_000006.old`) are the user's: no run counts, cuts, prunes
    or proves them.
    """
    match = _CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match and path.name == f"step_{int(match[1]):06d}" else None


def list_checkpoints(run_dir: Path) -> dict[int, Path]:
    """Return a run's checkpoints by step, in order, valid or not; nothing where there are none."""
    root = run_dir / CHECKPOINTS
    paths = root.iterdir() if root.is_dir() else ()
    found = {step: path for path in paths if (step := checkpoint_step(path)) is not None}
    return dict(sorted(found.items()))
