"""Models and data sets by name, from caches that are made here: the network is never asked."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from asyncflow.errors import ConfigError
from launcher.config import hub
from launcher.config.load_config import load_config
from workers.settings.run import RunConfig

WriteConfig = Callable[..., Path]
COMMIT, OLD = "c" * 40, "0" * 40
NAME = "own/tiny"


@pytest.fixture
def cache(tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two commits of a model; `main` is the second."""
    cache = tmp_path / "hub"
    for commit in (OLD, COMMIT):
        shutil.copytree(model_dir, cache / "models--own--tiny" / "snapshots" / commit)
    refs = cache / "models--own--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return cache


def refusal(source: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides=overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_model_is_a_snapshot_and_its_commit_is_kept(
    cache: Path, tmp_path: Path, write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = load_config(write_config(model={"path": NAME})).model
    assert (Path(found.path), found.revision) == (cache / "models--own--tiny" / "snapshots" / COMMIT, COMMIT)
    old = load_config(write_config(model={"path": NAME, "revision": OLD}))
    assert (Path(old.model.path).name, old.model.revision) == (OLD, OLD)
    old.save(tmp_path)
    assert load_config(tmp_path / "config.yaml").model == RunConfig.load(tmp_path).model == old.model
    elsewhere = cache.rename(tmp_path / "moved")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(elsewhere))
    again = load_config(tmp_path / "config.yaml").model
    assert (Path(again.path), again.revision) == (elsewhere / "models--own--tiny" / "snapshots" / OLD, OLD)


def test_a_directory_of_that_name_comes_first(cache: Path, tmp_path: Path, write_config: WriteConfig) -> None:
    (tmp_path / "own").mkdir()
    shutil.copytree(cache / "models--own--tiny" / "snapshots" / COMMIT, tmp_path / "own" / "tiny")
    found = load_config(write_config(model={"path": NAME})).model
    assert (found.path, found.revision) == (str(tmp_path / "own" / "tiny"), None)


@pytest.mark.parametrize("key", ["model", "critic"])
def test_what_the_cache_lacks_is_to_be_downloaded(cache: Path, write_config: WriteConfig, key: str) -> None:
    message = refusal(write_config(), f"{key}.path=nobody/none", f"{key}.revision=v1")
    assert message.startswith(
        f"{key}.path: nobody/none at v1 is not a directory here, and cannot be fetched from the Hub ("
    )
    assert f"{cache} lacks parts of it" in message
    assert message.endswith("copy the cache of a machine that ran `hf download nobody/none`")


def test_revision_of_a_directory_is_refused(cache: Path, write_config: WriteConfig) -> None:
    message = refusal(write_config(), "model.revision=v1")
    assert message.startswith("model.revision: 'v1' is of a model on the Hub, but model.path /")
    assert message.endswith("is a directory; remove it (--set model.revision=null)")


@pytest.mark.parametrize("text", ["openai/gsm8k", "Qwen/Qwen2.5-0.5B-Instruct"])
def test_names_of_the_hub(text: str) -> None:
    assert hub.is_hub_name(text)


@pytest.mark.parametrize("text", ["gsm8k", "data/train.jsonl", "/a/b", "./a/b", "a/b/c", "../b", "~/b", "a b/c"])
def test_paths_are_no_names_of_the_hub(text: str) -> None:
    assert not hub.is_hub_name(text)


def test_data_set_without_the_library_says_what_to_install(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = refusal(write_config(), "data.path=own/sums")
    assert message.startswith("data.path: own/sums is not a file; a data set takes the library datasets: pip install ")


def test_part_of_a_file_is_refused(write_config: WriteConfig) -> None:
    message = refusal(write_config(), "data.split=test")
    assert message.endswith("is a file, without subset, split and revision; remove these settings")


def test_file_that_is_given_instead_of_a_data_set_has_none_of_its_parts(
    write_config: WriteConfig, data_file: Path
) -> None:
    config = load_config(write_config(data={"path": "own/sums", "split": "test"}), overrides=[f"data.path={data_file}"])
    assert (config.data.path, config.data.split) == (str(data_file), None)


def test_directories_become_files_of_rows(
    tmp_path: Path, write_config: WriteConfig, data_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets", reason="needs datasets: pip install datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "sums"
    folder.mkdir()
    for name, answer in (("train", 2), ("test", 3)):
        (folder / f"{name}.csv").write_text(f"prompt,answer,level\n1+1=,{answer},7\n")
    mixture = [{"path": "sums", "split": "test", "weight": 3}, {"path": data_file.name}]
    roles = {"rollout": 1, "actor": 1, "evaluate": 1}
    source = write_config(data={"path": None, "mixture": mixture}, evaluate={"path": "sums"}, roles=roles)
    config = load_config(source)
    first, second = config.data.mixture
    assert json.loads(Path(first.path).read_text()) == {"prompt": "1+1=", "answer": 3, "level": 7}
    assert json.loads(Path(config.evaluate.path or "").read_text())["answer"] == 2
    assert (first.split, first.weight, second.path) == (None, 3.0, str(data_file))
    cached = tmp_path / "home" / "asyncflow"
    assert Path(first.path).parent == cached
    assert Path(first.path).stat().st_mode == data_file.stat().st_mode, "others may read a shared cache"
    assert len(list(cached.iterdir())) == 2, "nothing is left of what was written on the way"
    assert "Unknown split" in refusal(source, "evaluate.split=nowhere")


def test_held_out_sets_are_fetched_when_something_evaluates(
    cache: Path, write_config: WriteConfig, data_file: Path
) -> None:
    pytest.importorskip("datasets", reason="needs datasets: pip install datasets")
    sets = {"aime": {"path": "nobody/aime", "split": "train"}, "gsm8k": {"path": "gsm8k/absent.jsonl"}}
    source = write_config(evaluate={"sets": sets}, data={"path": "nobody/none"})
    asked = load_config(source, overrides=[f"data.path={data_file}"]).evaluate.sets
    assert [one.path for one in asked.values()] == ["nobody/aime", "gsm8k/absent.jsonl"]
    why = "evaluate.sets.aime.path: the data set nobody/aime cannot be read"
    assert refusal(source, f"data.path={data_file}", "roles.evaluate=1").startswith(why)
    with pytest.raises(ConfigError, match=f"^{why}"):  # and not for the data, on which nothing is trained
        load_config(source, evaluates=True)
