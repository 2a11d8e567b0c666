"""Data in another format is refused with a command that converts it, and the command works."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncflow.errors import ConfigError
from workers.data.config import DataConfig
from workers.data.prompt_rows import hub_data_command, hub_model_command, is_hub_name, read_prompt_rows

ROWS = [{"prompt": 'say "1", 2\nand 3', "answer": "x"}, {"prompt": "\u00fcber", "answer": "4"}]


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_prompt_rows(path, DataConfig(path=str(path)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def run_printed(message: str) -> None:
    """Run the command as a shell reads it, without installing anything, with this Python."""
    command = message.partition("convert it: ")[2].rpartition("&& ")[2]
    command = command.replace("python -c", f"{sys.executable} -c", 1)
    subprocess.run(["sh", "-c", command], check=True, timeout=120)


def check_converted(path: Path) -> None:
    rows = read_prompt_rows(path, DataConfig(path=str(path)))
    assert [(row.prompt, row.ground_truth) for row in rows] == [(row["prompt"], row["answer"]) for row in ROWS]


@pytest.mark.parametrize(("name", "dialect"), [("it's (1).csv", "excel"), ("rows.TSV", "excel-tab")])
def test_table_is_converted_by_the_printed_command(tmp_path: Path, name: str, dialect: str) -> None:
    path = tmp_path / name
    with path.open("w", newline="", encoding="utf-8-sig") as stream:
        table = csv.DictWriter(stream, ["prompt", "answer"], dialect=dialect)
        table.writeheader()
        table.writerows(ROWS)
    message = refusal(path)
    assert message.startswith(f"data.path: {path} is a table of text; convert it: python -c ")
    run_printed(message)
    check_converted(path.with_suffix(".jsonl"))


def test_array_is_converted_by_the_printed_command(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS, indent=2))
    message = refusal(path)
    assert message.startswith(f"data.path: {path} is one JSON array; convert it: python -c ")
    run_printed(message)
    check_converted(path.with_suffix(".jsonl"))


def test_parquet_is_known_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"PAR1\x15\x04PAR1")
    start = f"data.path: {path} is a Parquet file; convert it: pip install pyarrow && python -c "
    assert refusal(path).startswith(start)


def test_parquet_is_converted_by_the_printed_command(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install pyarrow")
    import pyarrow

    path = tmp_path / "train-00000-of-00001.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    run_printed(refusal(path))
    check_converted(path.with_suffix(".jsonl"))


def test_data_set_is_converted_by_the_printed_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets", reason="needs datasets: pip install datasets")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openai" / "sums").mkdir(parents=True)  # to the library a directory is a data set like the Hub's
    (tmp_path / "openai" / "sums" / "train.json").write_text(json.dumps(ROWS))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    run_printed(f"convert it: {hub_data_command('openai/sums')}")
    check_converted(tmp_path / "sums.jsonl")


def test_jsonl_named_otherwise_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    check_converted(path)


@pytest.mark.parametrize("text", ["openai/gsm8k", "Qwen/Qwen2.5-0.5B-Instruct"])
def test_names_of_the_hub(text: str) -> None:
    assert is_hub_name(text)
    assert re.fullmatch(rf"hf download {text} --local-dir models/[\w.-]+", hub_model_command(text))


@pytest.mark.parametrize("text", ["gsm8k", "data/train.jsonl", "/a/b", "./a/b", "a/b/c", "../b", "~/b", "a b/c"])
def test_paths_are_no_names_of_the_hub(text: str) -> None:
    assert not is_hub_name(text)
