"""A checkpoint's directory: its files with their checksums, and `meta.json`. Torch-free."""

import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import xxhash

from asyncflow.errors import CheckpointError
from asyncflow.json_lines import sync
from asyncflow.run_files import META_FILE

# checkpoints/step_000020/
#     meta.json    what this checkpoint is, and the size and checksum of every other file (`CheckpointMeta`; last)
#     config.yaml  the resolved configuration of the run that saved it
#     dcp/         model and optimizer shards (torch.distributed.checkpoint)
#     critic/      the same of the critic, where the algorithm has one
#     rng/         random number generators, one file per rank
#     reference/   the reference's weights, if they are neither the initial ones nor these
#     hf/          Hugging Face export (safetensors), if configured; resuming does not need it. Added when the rest is
#                  in place; a stop leaves it out, and a resume or `asyncflow export` adds it
#     queue/       finished samples that are not trained yet (`tq.snapshot`, with its own checksums); may be missing
#
# Actor ranks write it (`workers.checkpoint.writer`); the launcher verifies it before a run continues from it.

DCP, CRITIC, RNG, HF, QUEUE, REFERENCE = "dcp", "critic", "rng", "hf", "queue", "reference"
HALF_EXPORT = ".hf.tmp"  # where a run's ranks write `hf/` until it is complete
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
    # With `lora`, of the base's values (`workers.data.model_files.weights_fingerprint`): the shards lack them.
    weights_fingerprint: str = ""
    # Directory -> the same of each model that scores and is not trained (`RunConfig.scoring_models`), when the run
    # began. Columns of finished samples are theirs.
    scoring_weights: dict[str, str] = {}
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

    @property
    def has_export(self) -> bool:
        return any(name.startswith(f"{HF}/") for name in self.files)

    def write(self, directory: Path) -> None:
        """Write `meta.json`, or replace it atomically; several processes may, on several hosts."""
        beside = directory / f".{META_FILE}.{secrets.token_hex(4)}.tmp"
        try:
            with beside.open("xb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(self), indent=1))
                file.flush()
                os.fsync(file.fileno())
            beside.replace(directory / META_FILE)
        finally:
            beside.unlink(missing_ok=True)


def add_export(checkpoint: Path, written: Path, files: Mapping[str, FileEntry]) -> None:
    """Make a complete export the `hf/` of a checkpoint that is in place.

    Args:
        written: directory of the export, inside the checkpoint; its files are durable.
        files: its entries in `meta.json`, by their paths under `hf/`. A crash in between leaves an export that
            `meta.json` does not list; the next attempt writes it again.
    """
    sync_tree(written)
    target = checkpoint / HF
    if target.exists():  # of such a crash, or another process was faster: the content is the same
        shutil.rmtree(target.rename(written.with_name(f"{written.name}.old")), ignore_errors=True)
    written.rename(target)
    sync(checkpoint)
    meta = CheckpointMeta.read(checkpoint)
    listed = {name: entry for name, entry in meta.files.items() if not name.startswith(f"{HF}/")}
    listed |= {f"{HF}/{name}": entry for name, entry in files.items()}
    msgspec.structs.replace(meta, files=dict(sorted(listed.items()))).write(checkpoint)
    sync(checkpoint)


def how_to_load(checkpoint: Path) -> str:
    """Return where a checkpoint's model is, for messages: its `hf/`, or how to make it."""
    path = checkpoint / HF
    return str(path) if path.is_dir() else f"{path} (`asyncflow export {checkpoint}` writes it)"


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
