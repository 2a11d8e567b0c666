"""Those parts of `asyncflow verify` that need torch and the tokenizer: saved counts, saved answers, the data set."""

import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from asyncflow.errors import CheckpointError, ConfigError
from launcher.verify_records import Prompts, Readers
from tq.batch import PackedBatch
from tq.snapshot import MANIFEST, SnapshotChunk, read_snapshot
from workers.config import RunConfig
from workers.data import read_prompt_rows
from workers.ledger import prompt_hash, token_hashes
from workers.ledger_file import Ledger
from workers.prompt_dataset import PromptDataset

_NO_GROUP = 2**40
"""A damaged ledger may name any number; no run admits so many groups."""


def readers() -> Readers:
    """Return what `read_records` needs."""
    return Readers(saved_updates=saved_updates, saved_groups=saved_groups, prompts=prompts_of)


def saved_updates(directory: Path) -> int:
    """Return how many optimizer updates are in the state that a checkpoint's `dcp/` holds.

    Raises:
        CheckpointError: it cannot be read.
    """
    state = {"optimizer_updates": torch.tensor(0)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it is one process is no news
            dcp.load(state, checkpoint_id=directory, no_dist=True)
    except (OSError, ValueError, RuntimeError, dcp.CheckpointException) as error:
        reason = next(iter(error.failures.values()))[0] if isinstance(error, dcp.CheckpointException) else error
        raise CheckpointError(f"{directory} cannot be read ({type(reason).__name__}: {reason})") from error
    return int(state["optimizer_updates"])


def saved_groups(directory: Path) -> Mapping[int, str]:
    """Return the token hash of each group whose answers all are in a queue's snapshot; nothing without one.

    Raises:
        CheckpointError: it cannot be read.
    """
    if not (directory / MANIFEST).exists():
        return {}
    sizes: dict[int, int] = {}
    parts: list[PackedBatch] = []
    for chunk in read_snapshot(directory):
        if {"prompts", "responses"} <= chunk.columns.keys():
            sizes.update(dict.fromkeys(chunk.groups, chunk.group_size))
            parts.append(_batch(chunk))
    if not parts:
        return {}
    batch = PackedBatch.concatenate(parts)
    present = Counter(batch.groups)
    return {group: digest for group, digest in token_hashes(batch).items() if present[group] == sizes[group]}


def _batch(chunk: SnapshotChunk) -> PackedBatch:
    columns = {name: chunk.columns[name] for name in ("prompts", "responses")}
    return PackedBatch(tuple(chunk.rows), columns, tuple(chunk.groups))


def prompts_of(config: RunConfig, ledger: Ledger) -> Prompts:
    """Return the prompts of all groups that the ledger names as trained."""
    path = Path(config.data.path)
    try:
        dataset = PromptDataset(
            read_prompt_rows(path, config.data), config.data, model_dir=Path(config.model.path), seed=config.seed
        )
    except (ConfigError, OSError) as error:
        return Prompts({}, str(error))
    expected = {}
    groups = {line.group for _, line in ledger.trained}
    for group in sorted(group for group in groups if 0 <= group < _NO_GROUP):
        prompt = dataset.prompt(group)
        expected[group] = (prompt.epoch, prompt_hash(prompt.tokens))
    return Prompts(expected)
