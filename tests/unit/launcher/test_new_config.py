"""`asyncflow init` writes a configuration that passes its own dry-run."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from launcher.cli.commands import main
from launcher.config.load_config import load_config
from launcher.config.new_config import Answers, config_text, first_fields, guess_fields

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "configs" / "quickstart" / "model"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose name YAML would misread, with data."""
    directory = tmp_path / "my: first # run"
    directory.mkdir()
    shutil.copy(ROOT / "configs" / "quickstart" / "train.jsonl", directory / "sums #1.jsonl")
    monkeypatch.chdir(directory)
    return directory


def test_new_configuration_passes_its_dry_run_and_scores_by_the_stub(place: Path) -> None:
    said = CliRunner().invoke(
        main, ["init", "--model", str(MODEL), "--data", "sums #1.jsonl", "--reward", "own"], catch_exceptions=False
    )
    assert said.exit_code == 0, said.output
    assert "reward reward:score" in said.output and said.output.endswith("now: asyncflow-launch config.yaml\n")
    stub: dict[str, Any] = {}
    exec((place / "reward.py").read_text(), stub)
    assert [stub["score"]("1+1=", response, "2") for response in ("so 2 ", "3")] == [1.0, 0.0]
    assert stub["score"]("a poem", "anything", "") == 0.0, "data without a ground truth"
    config = load_config(place / "config.yaml")
    assert config.data.path == place / "sums #1.jsonl" or str(config.data.path).endswith("sums #1.jsonl")
    assert config.rollout.max_response_tokens == 8  # half of the model's 16 positions
    assert all(len(line) <= 120 for line in (place / "config.yaml").read_text().splitlines() if "path:" not in line)


def test_nothing_is_overwritten_and_nothing_half_written(place: Path) -> None:
    (place / "reward.py").write_text("mine")
    said = CliRunner().invoke(main, ["init", "--model", str(MODEL), "--data", "sums #1.jsonl", "--reward", "own"])
    assert said.exit_code == 2
    assert "reward.py exists" in said.output
    assert (place / "reward.py").read_text() == "mine"
    assert not (place / "config.yaml").exists()


@pytest.mark.parametrize(("name", "run"), [("2026", "2026"), ("true", "true"), (".hidden", "hidden"), ("...", "run")])
def test_run_is_named_after_any_directory(name: str, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    answers = Answers(str(MODEL), "x.jsonl", "exact", 2, "prompt", "answer")
    assert yaml.safe_load(config_text(answers))["name"] == run


def test_file_that_cannot_be_written_is_one_line_and_leaves_nothing(place: Path) -> None:
    (place / "reward.py").symlink_to(place / "none" / "reward.py")
    options = ["init", "--model", str(MODEL), "--data", "sums #1.jsonl", "--reward", "own"]
    said = CliRunner().invoke(main, options)
    assert (said.exit_code, said.output.count("\n")) == (2, 1), said.output
    assert "reward.py cannot be written: No such file or directory" in said.output
    assert not (place / "config.yaml").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "nosuch"], "--model: 'nosuch' does not exist"),
        (["--data", "nosuch.jsonl"], "--data: 'nosuch.jsonl' does not exist"),
        (
            ["--prompt-field", "nope"],
            "--prompt-field: sums #1.jsonl has no field 'nope' in its first row; found: prompt",
        ),
        (["--ground-truth-field", "nope"], "--ground-truth-field: sums #1.jsonl has no field 'nope'"),
        (["--data", "other.jsonl"], "--ground-truth-field: missing, and --reward exact compares with it; name one of"),
        (["--data", "empty.jsonl"], "data"),
    ],
)
def test_refusal_names_the_option_and_leaves_nothing(options: list[str], says: str, place: Path) -> None:
    (place / "other.jsonl").write_text('{"prompt": "1+1=", "sum": "2"}\n')
    (place / "empty.jsonl").write_text("")
    given = ["--model", str(MODEL), "--data", "sums #1.jsonl", "--reward", "exact", *options]
    said = CliRunner().invoke(main, ["init", *given])
    assert said.exit_code == 2
    assert says in said.output
    assert not (place / "config.yaml").exists()


def test_data_that_is_no_text_is_left_to_the_dry_run(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"\xff\xfe\n")
    assert first_fields(str(tmp_path / "rows.jsonl")) == ()


def test_without_a_terminal_what_is_missing_is_named(place: Path) -> None:
    said = CliRunner().invoke(main, ["init", "--model", "x/y"])
    assert said.exit_code == 2
    assert "--data, --reward: missing" in said.output


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ('{"question": "q", "answer": "a"}', ("question", "answer")),
        ('{"problem": "q", "solution": "a", "level": 5}', ("problem", "solution")),
        ('{"text": "q"}', ("text", None)),
        ("not json", ("prompt", "answer")),
    ],
)
def test_fields_are_guessed_from_the_first_row(row: str, fields: tuple[str, str | None], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    assert guess_fields(first_fields(str(tmp_path / "rows.jsonl"))) == fields
