"""Fetches models and data sets of the Hugging Face Hub as directories and files before a run starts. Torch-free.

    model OWNER/NAME     -> the snapshot of one commit, in huggingface_hub's cache
    data set OWNER/NAME  -> a JSONL file in HF_HOME/asyncflow, named after its content, which a child writes

The launcher of each node does this while it reads the configuration, so no process of the run needs the network. The
caches lock their files: nodes that share a cache download once. What was found (directory, commit, file) is written
into the run's `config.yaml`, so a resumed run uses the same; a snapshot that left the cache is downloaded again.
"""

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from asyncflow.checkpoint_files import content_hash
from asyncflow.errors import ConfigError, one_line
from asyncflow.extras import pip_line
from workers.settings.data import HubPart

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SNAPSHOT = re.compile(r".*/models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})")
_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
_NOT = ["*/*", "consolidated*"]  # the same weights in other forms


def is_hub_name(text: str) -> bool:
    """Return whether a text may be a name on the Hub, OWNER/NAME, rather than a path to a file."""
    return _NAME.fullmatch(text) is not None and not re.search(r"\.(jsonl?|txt|csv|tsv|parquet|gguf)$", text)


def snapshot_of(text: str) -> tuple[str, str] | None:
    """Return name and commit of a cached Hub model; None: the directory is not one."""
    match = _SNAPSHOT.fullmatch(text)
    return (f"{match[1]}/{match[2]}", match[3]) if match else None


def located_model(section: Any, path: Path | None, *, key: str) -> Any:
    """Return the section `key` with a local directory and, for a Hub model, its commit. `path`: None asks the Hub.

    Raises:
        ConfigError: the Hub lacks it or cannot be reached, or a revision is given for a directory.
    """
    if path is not None and section.revision not in (None, path.name):
        raise ConfigError(
            f"{key}.revision: {section.revision!r} is of a model on the Hub, but {key}.path {path} is a directory; "
            f"remove it (--set {key}.revision=null)"
        )
    if path is None:
        name, revision = snapshot_of(section.path) or (section.path, section.revision)
        path = _download(name, revision, key=f"{key}.path")
        section = section.model_copy(update={"revision": path.name})
    return section.model_copy(update={"path": str(path)})


def located_data(section: Any, path: Path | None, *, key: str) -> Any:
    """Return the section `key`, a `HubPart`, with a file of rows, made from a directory or a data set if necessary.

    Raises:
        ConfigError: the data set cannot be read, or a part of a single file is requested.
    """
    if path is not None and not path.is_dir():
        if section.is_part:
            raise ConfigError(f"{key}: {path} is a file, without subset, split and revision; remove these settings")
        return section.model_copy(update={"path": str(path)})
    file = _rows_of(section.path if path is None else str(path), section, key=f"{key}.path")
    return section.model_copy(update={**dict.fromkeys(HubPart.model_fields), "path": str(file)})


def _download(name: str, revision: str | None, *, key: str) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    at = f" at {revision}" if revision else ""
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_FILES, ignore_patterns=_NOT))
    except Exception as error:  # from several libraries: HTTP, proxies, files
        absent = isinstance(error, errors.LocalEntryNotFoundError)
        why = f"{constants.HF_HUB_CACHE} lacks parts of it" if absent else one_line(error)
        raise ConfigError(
            f"{key}: {name}{at} is not a directory here, and cannot be fetched from the Hub ({why}); correct the name, "
            f"log in (`hf auth login`), or copy the cache of a machine that ran `hf download {name}`"
        ) from error


def _rows_of(text: str, part: HubPart, *, key: str) -> Path:
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(f"{key}: {text} is not a file; a data set takes the library datasets: {pip_line('data')}")
    asked = json.dumps([text, part.subset, part.split or "train", part.revision])
    command = [sys.executable, "-P", "-m", "launcher.config.hub", asked]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    # The answer is the last line: the library may print before it.
    lines = child.stdout.splitlines()
    if child.returncode or not lines:
        why = lines[-1] if lines else f"its process ended with {child.returncode}"
        raise ConfigError(
            f"{key}: the data set {text} cannot be read ({why}); correct path, subset and split, or without a network "
            f"copy the cache of a machine that has read it (HF_HOME), or name a file"
        )
    return Path(lines[-1])


def _write_rows(name: str, subset: str | None, split: str, revision: str | None) -> Path:
    """Write the rows as JSON lines into a file named after its content."""
    from datasets import load_dataset
    from huggingface_hub import constants

    rows = load_dataset(name, subset, split=split, revision=revision)
    folder = Path(constants.HF_HOME).expanduser() / "asyncflow"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        file = Path(directory) / "rows.jsonl"  # a regular file mode, not mkstemp's 0600: a cache may be shared
        with file.open("wb") as written:
            for row in rows:
                written.write(msgspec.json.encode(row, enc_hook=str) + b"\n")
        words = (*name.strip("/").split("/")[-2:], *([subset] if subset else []), split, content_hash(file))
        target = folder / (re.sub(r"[^\w.-]+", "-", "-".join(words)) + ".jsonl")
        if not target.exists():
            file.replace(target)
    return target


def _main() -> None:
    try:
        line, code = str(_write_rows(*json.loads(sys.argv[1]))), 0
    except Exception as error:  # noqa: BLE001  process boundary: the parent reports it
        line, code = one_line(error), 1
    sys.stdout.write(f"\n{line}\n")
    sys.exit(code)


if __name__ == "__main__":
    _main()
