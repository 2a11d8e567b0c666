from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from asyncflow.errors import ConfigError
from launcher.config.load_config import load_config
from launcher.run.rundir import check_new_run_dir, create_run_dir, default_run_dir, held_run_dir, is_held

NOW = datetime(2026, 9, 1, 12, 30, 5)


def test_default_is_named_after_run_and_time_and_never_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = default_run_dir("tiny", NOW)
    assert first == tmp_path / "runs" / "tiny-20260901-123005"
    first.mkdir(parents=True)
    assert default_run_dir("tiny", NOW) == tmp_path / "runs" / "tiny-20260901-123005-2"


@pytest.mark.parametrize("name", ["", "a/b", "..", "a\nb"])
def test_name_that_is_no_directory_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^name: .* cannot name a run directory"):
        default_run_dir(name, NOW)


def test_missing_and_unrelated_directories_may_become_runs(tmp_path: Path) -> None:
    (tmp_path / "slurm-17.out").touch()
    check_new_run_dir(tmp_path)
    check_new_run_dir(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl", "updates.jsonl", "checkpoints", "logs"])
def test_directory_with_any_part_of_a_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=rf"already holds a run \({name}\); remove it \(it has no checkpoint\), or"):
        check_new_run_dir(tmp_path)


def test_resume_is_advised_where_there_is_something_to_resume(tmp_path: Path) -> None:
    saved, unsaved = tmp_path / "saved", tmp_path / "unsaved"
    (saved / "checkpoints" / "step_000001").mkdir(parents=True)
    unsaved.mkdir()
    (unsaved / "config.yaml").touch()
    for run_dir in (saved, unsaved):
        with pytest.raises(ConfigError, match=rf"continue it with --resume {run_dir}, or choose another --run-dir"):
            check_new_run_dir(run_dir)


def test_nobody_is_advised_to_resume_or_remove_a_configuration_that_no_run_wrote(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("steps: 7\n")
    with pytest.raises(ConfigError, match=r"has a config.yaml that no run wrote; choose another --run-dir$"):
        check_new_run_dir(tmp_path)


@pytest.mark.parametrize("name", ["", " ", ".x", "a/b", "a\nb", "a\0b", "\x1b[31m", "x" * 201])
def test_name_that_cannot_be_a_directory_s_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^name: "):
        default_run_dir(name, datetime(2026, 1, 2))


def test_two_runs_never_share_a_directory(write_config: Callable[..., Path], tmp_path: Path) -> None:
    config = load_config(write_config())
    first = create_run_dir(tmp_path / "a", config)
    assert create_run_dir(tmp_path / "a", config, or_beside=True) == tmp_path / "a-2"
    assert create_run_dir(tmp_path / "a", config, or_beside=True) == tmp_path / "a-3"
    with pytest.raises(ConfigError, match=r"a was taken by another run just now; choose another --run-dir"):
        create_run_dir(first, config)


def test_second_launcher_is_kept_out_of_a_run(tmp_path: Path) -> None:
    with held_run_dir(tmp_path):  # noqa: SIM117  the order matters
        with pytest.raises(ConfigError, match=r"another launcher runs .* now; stop it first"), held_run_dir(tmp_path):
            pass
    with held_run_dir(tmp_path):
        assert is_held(tmp_path)
    assert not is_held(tmp_path) and not is_held(tmp_path / "absent")


def test_layout_is_made_with_the_resolved_configuration(write_config: Callable[..., Path], tmp_path: Path) -> None:
    config = load_config(write_config())
    create_run_dir(tmp_path / "runs" / "a", config)
    made = sorted(path.name for path in (tmp_path / "runs" / "a").iterdir())
    assert made == ["checkpoints", "config.yaml", "logs", "samples", "timeline", "trace"]
    assert load_config(tmp_path / "runs" / "a" / "config.yaml") == config


def test_directory_that_the_system_refuses_is_an_input_error(write_config: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="run directory: /proc/asyncflow cannot be written"):
        create_run_dir(Path("/proc/asyncflow"), load_config(write_config()))
