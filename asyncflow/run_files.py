"""The names of everything that a run keeps in its directory, for launcher, workers and tools. Torch-free."""

# config.yaml  plan.json  metrics.jsonl  ledger.jsonl  updates.jsonl  evaluation.jsonl  sampler.jsonl  feed.jsonl
# logs/ROLE/RANK.log  checkpoints/step_000010/meta.json  samples/  timeline/  loggers/  inputs/  report.html
# job.json  status.json  while it runs; end.json  after that

import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import xxhash

from asyncflow.errors import CheckpointError
from asyncflow.json_lines import sync

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
TIMELINE = "timeline"
LOGGERS = "loggers"  # each logger's progress, and what loggers write on this machine
INPUTS = "inputs"  # functions and rows that `asyncflow.Trainer` got as Python objects
REPORT_FILE = "report.html"

# In each checkpoint; written last, with size and checksum of every other file.
META_FILE = "meta.json"

DIRECTORIES = (LOGS, CHECKPOINTS, SAMPLES, TIMELINE)
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


# What a checkpoint's directory consists of: its files with their checksums, and `meta.json`. Torch-free.
#
# checkpoints/step_000020/
#     meta.json    what this checkpoint is, and the size and checksum of every other file (`CheckpointMeta`; last)
#     config.yaml  the resolved configuration of the run that saved it
#     dcp/         model and optimizer shards (torch.distributed.checkpoint)
#     critic/      the same of the critic, where the algorithm has one
#     rng/         random number generators, one file per rank
#     reference/   the reference's weights, if they are neither the initial ones nor these
#     hf/          Hugging Face export (safetensors), if configured; resuming does not need it
#     queue/       finished samples that are not trained yet (`tq.snapshot`, with its own checksums); may be missing
#
# Actor ranks write it (`workers.checkpoint.writer`); the launcher verifies it before a run continues from it.

DCP, CRITIC, RNG, HF, QUEUE, REFERENCE = "dcp", "critic", "rng", "hf", "queue", "reference"
FORMAT = 1
_READ_BYTES = 2**24
_THREADS = 8


class FileEntry(msgspec.Struct, frozen=True):
    """Size and checksum of a file; `xxh3` has 64 bits, as 16 hex digits."""

    num_bytes: int
    xxh3: str


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `meta.json`."""

    # The last completed one. It is also the position in the ledger, whose lines up to it are durable; the two together
    # determine the next prompts.
    step: int
    lineage: int  # of the run when it was saved; together with `step` the version of the weights
    model_fingerprint: str  # of the model that the run started with
    data_hash: str  # of the prompts' file when the run started
    num_ranks: int  # of the actor
    saved_at: float  # unix time (s)
    files: dict[str, FileEntry]  # path in the checkpoint -> its size and checksum; without `meta.json` and `queue/`
    # Of the model when the run started: name -> content (`workers.data.tokenizer.tokenizer_files`).
    tokenizer_files: dict[str, str] = {}
    format: int = FORMAT  # of this file

    @staticmethod
    def read(directory: Path) -> "CheckpointMeta":
        """Read a checkpoint's `meta.json`.

        Raises CheckpointError if it is missing or not what a complete save writes.
        """
        path = directory / META_FILE
        try:
            meta = msgspec.json.decode(path.read_bytes(), type=CheckpointMeta)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing: the checkpoint was never completed") from error
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if meta.format != FORMAT:
            raise CheckpointError(f"{path} has format {meta.format}, not {FORMAT}")
        return meta

    def write(self, directory: Path) -> None:
        with (directory / META_FILE).open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self), indent=1))
            file.flush()
            os.fsync(file.fileno())


def describe(directory: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Return size and checksum of files, given by their paths in `directory`; several threads read them."""
    names = list(names)
    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(zip(names, threads.map(lambda name: _entry(directory / name), names), strict=True))


def damages(directory: Path, files: Mapping[str, FileEntry]) -> dict[str, str]:
    """Return what is wrong with files: path in `directory` -> a few words. Several threads read them."""
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda name: _damage(directory / name, files[name]), files)
        return {name: damage for name, damage in zip(files, found, strict=True) if damage}


def files_below(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def content_hash(path: Path) -> str:
    """Return the xxh3-64 of a file as 16 hex digits."""
    digest = xxhash.xxh3_64()
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return str(digest.hexdigest())


def sync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        sync(path)
    sync(directory)


def _entry(path: Path) -> FileEntry:
    return FileEntry(path.stat().st_size, content_hash(path))


def _damage(path: Path, entry: FileEntry) -> str:
    try:
        num_bytes = path.stat().st_size
        if num_bytes != entry.num_bytes:
            return f"has {num_bytes} bytes, not {entry.num_bytes}"
        found = content_hash(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "" if found == entry.xxh3 else f"was changed (checksum {found}, not {entry.xxh3})"
