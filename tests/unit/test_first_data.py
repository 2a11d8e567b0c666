"""Which data a run began with: also a process that starts again, and finds another file, knows."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from asyncflow.errors import ConfigError
from asyncflow.sealed_store import SealedStore
from workers.checkpoint.files import CheckpointMeta
from workers.context import WorkerContext
from workers.data.config import DataConfig
from workers.data.prompt_rows import data_hash
from workers.services import check_data


def context(store: SealedStore, data: Path, *, resume_from: str = "") -> Any:
    """A worker that starts, as far as these functions look at it."""
    made: Any = object.__new__(WorkerContext)
    made._store = store
    made.config = SimpleNamespace(data=DataConfig(path=str(data)))
    made.job = SimpleNamespace(resume_from=resume_from)
    return made


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return path


def test_file_that_changed_while_the_run_goes_on_is_refused_by_whoever_starts_again(data: Path) -> None:
    store = SealedStore(HashStore(), b"secret")
    began = data_hash(data)
    check_data(context(store, data))
    check_data(context(store, data))
    data.write_text('{"prompt": "1+1=", "answer": "3"}\n')
    with pytest.raises(ConfigError, match=r"data.path: the content of .*data.jsonl is not what the run began with"):
        check_data(context(store, data))
    assert context(store, data).first_data_hash() == began, "for checkpoints, too"


def test_resumed_run_began_with_what_its_checkpoint_names(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"hash": data_hash(data)}
    monkeypatch.setattr(CheckpointMeta, "read", lambda _: SimpleNamespace(data_hash=named["hash"]))
    check_data(context(SealedStore(HashStore(), b"secret"), data, resume_from="step_000005"))
    named["hash"] = "of another file"
    with pytest.raises(ConfigError, match="is not what the run began with"):
        check_data(context(SealedStore(HashStore(), b"secret"), data, resume_from="step_000005"))
