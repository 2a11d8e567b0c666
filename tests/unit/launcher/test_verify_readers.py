"""Those parts of `asyncflow verify` that read real files: saved counts, saved responses, prompts."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from asyncflow.checkpoint_files import CheckpointMeta
from asyncflow.errors import CheckpointError
from asyncflow.json_lines import JsonLines
from launcher.config.load_config import load_config
from launcher.verify.records import prompts_of, saved_groups, saved_updates
from tq.backends.backend import MemoryBackend
from tq.columns import Column, PackedBatch
from tq.snapshot import write_manifest
from tq.unit.block import BlockStore
from tq.unit.snapshots import SnapshotWriter
from tq.unit.unit_state import UnitState
from tq.wire import describe
from workers.data.prompt_dataset import PromptDataset
from workers.data.prompt_rows import read_prompt_rows
from workers.data.tokenizer import tokenizer_files
from workers.records.ledger import ledger_lines, token_hashes
from workers.records.ledger_file import Ledger, read_ledger
from workers.rows.packed_rows import sample_columns

WriteConfig = Callable[..., Path]


def responses(rows: list[int]) -> PackedBatch:
    """Rows of groups of two."""
    prompts = [torch.arange(row // 2 + 1) for row in rows]
    columns = {"prompts": Column.of_rows(prompts), **sample_columns(prompts, [torch.arange(row) for row in rows])}
    return PackedBatch(tuple(rows), columns, tuple(row // 2 for row in rows))


def write_queue(directory: Path, *parts: PackedBatch) -> None:
    """Save rows as a storage unit does."""
    directory.mkdir()
    store, state = BlockStore(MemoryBackend(), None, prefix="u", token_columns=()), UnitState()
    for part in parts:
        headers, payload = describe(part.columns, narrow=True)
        data = torch.zeros(payload.num_bytes, dtype=torch.uint8)
        payload.write(data)
        block = store.add_block(part.indices, headers, data)
        state.create_rows(part.indices, block, partition=1, groups=part.groups, group_size=2)
        state.confirm(part.indices)
    writer = SnapshotWriter(directory, "storage-0", store, chunk_bytes=2**20)
    cut = state.cut_rows(after_partition=-1, forget_acks_of=())
    write_manifest(directory, writer.write(cut.rows, threading.Event())[0], num_rows=len(cut.rows))


def test_saved_responses_have_the_hashes_that_the_ledger_will_have(tmp_path: Path) -> None:
    """However they are spread, if all of a group are there."""
    unfinished = PackedBatch((8, 9), {"prompts": responses([8, 9])["prompts"]}, (4, 4))
    write_queue(tmp_path / "queue", responses([5, 0]), responses([1, 4]), responses([6]), unfinished)
    expected = token_hashes(responses([0, 1, 4, 5]))
    assert saved_groups(tmp_path / "queue") == expected
    assert expected.keys() == {0, 2}
    assert saved_groups(tmp_path / "none") == {}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_saved_updates_are_those_of_the_engine_s_state(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(3)}, "optimizer_updates": torch.tensor(17)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert saved_updates(tmp_path / "dcp") == 17


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_state_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    dcp.save({"model": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for directory in ("dcp", "none"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            saved_updates(tmp_path / directory)


def ledger_of(directory: Path, dataset: PromptDataset, groups: list[int]) -> Ledger:
    """Write the ledger of groups with their prompts."""
    prompts = [dataset.prompt_of_group(group) for group in groups]
    columns = {
        "prompts": Column.of_rows([prompt.tokens for prompt in prompts]),
        **sample_columns([prompt.tokens for prompt in prompts], [torch.tensor([1])] * len(groups)),
        "versions": Column.of_rows([torch.tensor([0], dtype=torch.int32)] * len(groups)),
        "epochs": Column.of_scalars(torch.tensor([prompt.epoch for prompt in prompts], dtype=torch.int32)),
    }
    batch = PackedBatch(tuple(groups), columns, tuple(groups))
    file = JsonLines(directory / "ledger.jsonl")
    file.write(ledger_lines(batch, step=1, admitted_step=1, lineage=0, time_s=0.0))
    file.close()
    return read_ledger(directory)


def test_prompts_are_those_of_seed_data_and_tokenizer(write_config: WriteConfig, tmp_path: Path) -> None:
    config = load_config(write_config())
    rows = read_prompt_rows(config.data.file, config.data)
    dataset = PromptDataset(rows, config.data, model_dir=Path(config.model.path), seed=config.seed)
    ledger = ledger_of(tmp_path, dataset, [0, 1, 2, 3, 7])
    written = {line.group: (line.epoch, line.prompt_hash) for _, line in ledger.trained}
    assert prompts_of(config, ledger).expected == written
    assert prompts_of(config.model_copy(update={"seed": 1}), ledger).expected != written
    config.data.file.write_text('{"prompt": "8+1=", "answer": "9"}\n')
    assert prompts_of(config, ledger).expected != written


def test_prompts_that_are_gone_are_not_checked(write_config: WriteConfig, tmp_path: Path) -> None:
    config = load_config(write_config())
    config.data.file.unlink()
    found = prompts_of(config, read_ledger(tmp_path))
    assert (found.expected, "data.path: cannot read" in found.unknown) == ({}, True)


def test_prompts_are_verified_at_the_time_that_the_run_s_templates_were_told(
    write_config: WriteConfig, tmp_path: Path
) -> None:
    config = load_config(write_config())
    model = shutil.copytree(config.model.path, tmp_path / "own")
    (tmp_path / "own/chat_template.jinja").write_text("{{ strftime_now('%Y%m%d') }}+{{ messages[0].content }}")
    told = {"chat_template": True, "max_prompt_tokens": 16, "template_time": "2001-02-03T04:05:06"}
    data = config.data.model_copy(update=told)
    config = config.model_copy(update={"data": data, "model": config.model.model_copy(update={"path": str(model)})})
    rows = read_prompt_rows(data.file, data)
    dataset = PromptDataset(rows, data, model_dir=tmp_path / "own", seed=config.seed)
    assert dataset.prompt_of_group(0).text.startswith("20010203+")
    ledger = ledger_of(tmp_path, dataset, [0, 1])
    written = {line.group: (line.epoch, line.prompt_hash) for _, line in ledger.trained}
    assert prompts_of(config, ledger).expected == written
    later = config.model_copy(update={"data": data.model_copy(update={"template_time": "2001-02-04T04:05:06"})})
    assert prompts_of(later, ledger).expected != written
    checkpoint = tmp_path / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    CheckpointMeta(
        step=1, lineage=0, model_fingerprint="f", data_hash="d", num_ranks=1, saved_at=0.0, files={},
        tokenizer_files=tokenizer_files(tmp_path / "own"),
    ).write(checkpoint)  # fmt: skip
    assert prompts_of(config, ledger).expected == written
    (tmp_path / "own/chat_template.jinja").write_text("{{ messages[0].content }}")
    found = prompts_of(config, ledger)
    assert (found.expected, "chat_template.jinja of" in found.unknown) == ({}, True)
    checkpoint.rename(checkpoint.with_name("step_1000000"))  # by its number, not by its name, the newest
    older = tmp_path / "checkpoints" / "step_999999"
    older.mkdir()
    CheckpointMeta(
        step=999999, lineage=0, model_fingerprint="f", data_hash="d", num_ranks=1, saved_at=0.0, files={},
        tokenizer_files=tokenizer_files(tmp_path / "own"),
    ).write(older)  # fmt: skip
    assert "chat_template.jinja of" in prompts_of(config, ledger).unknown
