"""Which data a run began with: also a process that starts again, and finds another file, knows."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from torch.distributed import HashStore

import configs
from asyncflow.agreement import differences
from asyncflow.checkpoint_files import CheckpointMeta
from asyncflow.errors import ConfigError
from asyncflow.sealed_store import SealedStore
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from workers.data.prompt_rows import data_hash
from workers.data.tokenizer import load_tokenizer, token_identity, tokenizer_files
from workers.rank.context import WorkerContext
from workers.roles.services import check_data
from workers.settings.data import DataConfig

QUICKSTART = Path(configs.__path__[0]) / "quickstart" / "model"


def context(store: SealedStore, data: Path, *, resume_from: str = "", name: str = "controller/0") -> Any:
    """A worker that starts, as far as these functions look at it."""
    made: Any = object.__new__(WorkerContext)
    made._store = store
    made.config = SimpleNamespace(
        data=DataConfig(path=str(data)), model=SimpleNamespace(path=str(data.parent / "model"))
    )
    made.name = name
    made.job = SimpleNamespace(resume_from=resume_from)
    return made


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    shutil.copytree(QUICKSTART, tmp_path / "model")
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
    named: dict[str, Any] = {"hash": data_hash(data), "files": tokenizer_files(data.parent / "model")}
    monkeypatch.setattr(
        CheckpointMeta, "read", lambda _: SimpleNamespace(data_hash=named["hash"], tokenizer_files=named["files"])
    )
    check_data(context(SealedStore(HashStore(), b"secret"), data, resume_from="step_000005"))
    named["hash"] = "of another file"
    with pytest.raises(ConfigError, match="is not what the run began with"):
        check_data(context(SealedStore(HashStore(), b"secret"), data, resume_from="step_000005"))
    named["hash"] = data_hash(data)
    named["files"] = {**named["files"], "chat_template.jinja": "of another file"}
    with pytest.raises(
        ConfigError, match=r"^model.path: chat_template.jinja of .* is not what the run began with, and"
    ):
        check_data(context(SealedStore(HashStore(), b"secret"), data, resume_from="step_000005"))
    named["files"] = {}  # an earlier version wrote none down
    check_data(context(SealedStore(HashStore(), b"secret"), data, resume_from="step_000005"))


def test_tokenizer_that_changed_while_the_run_goes_on_is_refused_by_whoever_starts_again(data: Path) -> None:
    store = SealedStore(HashStore(), b"secret")
    check_data(context(store, data))
    began = tokenizer_files(data.parent / "model")
    (data.parent / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(ConfigError, match=r"^model.path: chat_template.jinja of .* is not what the run began with"):
        check_data(context(store, data))
    assert context(store, data).first_tokenizer_files() == began, "for checkpoints, too"


def test_model_that_scores_and_starts_again_with_other_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a resume, when the checkpoint says which they were."""
    teachers = {name: tmp_path / name for name in ("one", "two")}
    for path in teachers.values():
        shutil.copytree(QUICKSTART, path)
    sources = f"sources: {{hard: {{path: {teachers['two']}}}}}"
    given = (
        "algorithm={name: distill, teacher_coef: 1.0, kl_coef: 0.1}",
        f"teacher={{path: {teachers['one']}, {sources}}}",
        "roles={rollout: 1, actor: 1, ref: 1, teacher: 1}",
    )
    store = SealedStore(HashStore(), b"secret")
    started = context(store, tmp_path / "data.jsonl")
    started.config = load_config(find_recipe("quickstart"), overrides=given)
    started.check_weights("teacher_log_probs")
    began = started.first_weights()
    assert set(began) == {*map(str, teachers.values()), started.config.model.path}
    file = teachers["two"] / "model.safetensors"
    save_file({name: value + 1 for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    started.check_weights("ref_log_probs", "compute_advantages_and_returns")
    with pytest.raises(ConfigError, match=r"^teacher.sources.hard.path: .*two has other weights than the run began"):
        started.check_weights("teacher_log_probs")
    assert started.first_weights() == began, "for checkpoints, too"
    (teachers["one"] / "model.safetensors").unlink()
    assert started.first_weights() == began, "a trainer that starts again needs no teacher's files"
    shutil.copy(QUICKSTART / "model.safetensors", teachers["one"])

    resumed = context(SealedStore(HashStore(), b"secret"), tmp_path / "data.jsonl", resume_from="step_000005")
    resumed.config = started.config
    monkeypatch.setattr(CheckpointMeta, "read", lambda _: SimpleNamespace(scoring_weights=began))
    with pytest.raises(ConfigError, match=r"^teacher.sources.hard.path: "):
        resumed.check_weights("teacher_log_probs")
    monkeypatch.setattr(CheckpointMeta, "read", lambda _: SimpleNamespace(scoring_weights={}))
    resumed.check_weights("teacher_log_probs")  # an earlier version saved it


def test_process_with_another_tokenizer_is_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of another interpreter may have, whose libraries are others."""
    store = SealedStore(HashStore(), b"secret")
    for name in ("controller/0", "rollout/0"):
        assert context(store, data, name=name).load_tokenizer().eos_token_id == 1
    file = data.parent / "model" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    file.write_text(json.dumps(tokenizer))
    monkeypatch.setattr("workers.rank.context.version", lambda name: "0.1")
    with pytest.raises(ConfigError) as caught:
        context(store, data, name="rollout/1").load_tokenizer()
    assert "rollout/1 (transformers 0.1 and tokenizers 0.1" in str(caught.value)
    assert "than in controller/0 (transformers 5" in str(caught.value)
    assert "tokens of the probe texts (" in str(caught.value) and "end tokens" not in str(caught.value)


def test_what_a_tokenizer_makes_is_compared_by_name(tmp_path: Path) -> None:
    shutil.copytree(QUICKSTART, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    tokenizer = load_tokenizer(tmp_path / "model")
    asked = [[{"role": "user", "content": "1+1="}]]
    first = token_identity(tokenizer, chat=True, prompts=asked)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(3)
    assert "end tokens (" in differences(first, token_identity(tokenizer, chat=True, prompts=asked))
    tokenizer = load_tokenizer(tmp_path / "model")
    tokenizer.chat_template += "!"
    names = differences(first, token_identity(tokenizer, chat=True, prompts=asked)).split(", ")
    assert [name.partition(" (")[0] for name in names if "(" in name] == ["chat template", "first chunk of the data"]
    tokenizer = load_tokenizer(tmp_path / "model")
    assert differences(first, token_identity(tokenizer, chat=True, prompts=asked)) == ""
    assert differences(first, token_identity(tokenizer, chat=True, prompts=[*asked, *asked])).startswith("first chunk")


def test_gang_by_hand_is_compared_on_the_first_rows(data: Path) -> None:
    """As by `JobStore.announce_tokens`."""
    store = SealedStore(HashStore(), b"secret")
    prompts = ["1+1=", "2+2="]
    identity = token_identity(load_tokenizer(data.parent / "model"), chat=False, prompts=prompts)
    store.set("first_prompts", json.dumps(prompts))
    store.set("first/tokens", json.dumps(["the launcher", identity]))
    context(store, data).load_tokenizer()
    store.set("first_prompts", json.dumps(prompts[:1]))
    with pytest.raises(ConfigError, match=r"than in the launcher: first chunk of the data \("):
        context(store, data).load_tokenizer()


def test_worker_with_another_wire_format_is_refused() -> None:
    store = SealedStore(HashStore(), b"secret")
    one, other = (context(store, Path("none"), name=name) for name in ("controller/0", "rollout-0/0"))
    said = {"by": "/a/python", "what": "launcher: AsyncFlow is another one", "advice": "install the same"}
    one._check_agreement("software", {"AsyncFlow version": "1", "wire format": "a"}, **said)
    one._check_agreement("software", {"AsyncFlow version": "1", "wire format": "a"}, **said)
    with pytest.raises(
        ConfigError, match=r"another one in /a/python than in /a/python: wire format \(b, not a\); inst"
    ):
        other._check_agreement("software", {"AsyncFlow version": "1", "wire format": "b"}, **said)
