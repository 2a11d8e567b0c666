"""Reading prompts: rows, their errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from asyncflow.errors import ConfigError
from workers.data.prompt_rows import PromptRow, read_prompt_rows
from workers.settings.data import DataConfig
from workers.settings.run import EvaluateConfig


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_rows_keep_their_line_numbers_over_blank_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path, '{"prompt": "1+1=", "answer": "2"}\n\n  \r\n{"prompt": "é", "answer": 3.5, "more": null}\r\n'
    )
    assert read_prompt_rows(path, DataConfig(path="rows.jsonl")) == [
        PromptRow("1+1=", "2", 1),
        PromptRow("é", "3.5", 4),
    ]


def test_field_names_come_from_the_config(tmp_path: Path) -> None:
    path = write(tmp_path, '{"question": "6*7?", "answer": "6*7\\n#### 42"}')
    rows = read_prompt_rows(path, DataConfig(path="rows.jsonl", prompt_field="question"))
    assert rows == [PromptRow("6*7?", "6*7\n#### 42", 1)]


def test_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path, b'\xef\xbb\xbf{"prompt": "a", "answer": 1}')
    assert read_prompt_rows(path, DataConfig(path="rows.jsonl")) == [PromptRow("a", "1", 1)]


GOOD = '{"prompt": "a", "answer": "b"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + '{"prompt": "a", "answer": \n', r"rows.jsonl:2: malformed JSON: .*; write one JSON object a line"),
        (GOOD + "\n{'prompt': 1}", r"rows.jsonl:3: malformed JSON"),
        (b'{"prompt": "\xff", "answer": ""}', r"rows.jsonl:1: malformed JSON"),
        ("[\n", r"rows.jsonl:1: malformed JSON"),
        (GOOD + "[1]", r"rows.jsonl:2: the row is a list, not a JSON object"),
        (
            '{"question": "a", "answer": "b"}',
            r"rows.jsonl:1: no field 'prompt'; found: answer, question; set data.prompt_field",
        ),
        (GOOD + '{"prompt": "a"}', r"rows.jsonl:2: no field 'answer'; found: prompt; set data.ground_truth_field"),
        ('{"prompt": 3, "answer": "b"}', r"rows.jsonl:1: 'prompt' is a number; data.prompt_field must name text"),
        ('{"prompt": " ", "answer": "b"}', r"rows.jsonl:1: 'prompt' is empty"),
        ('{"prompt": "a", "answer": true}', r"rows.jsonl:1: 'answer' is true or false"),
        (
            '{"prompt": "a", "answer": null}',
            r"rows.jsonl:1: 'answer' is null; data.ground_truth_field must name text or a",
        ),
        ('{"prompt": "a", "answer": ["b"]}', r"rows.jsonl:1: 'answer' is a list"),
        ('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", r"rows.jsonl:1: malformed JSON"),
        ("", r"rows.jsonl holds no rows"),
        ("\n \n", r"rows.jsonl holds no rows"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_prompt_rows(write(tmp_path, content), DataConfig(path="rows.jsonl"))
    assert "\n" not in str(caught.value)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    config = DataConfig(path="rows.jsonl")
    with pytest.raises(ConfigError, match=r"data.path: cannot read .*missing.jsonl: No such file"):
        read_prompt_rows(tmp_path / "missing.jsonl", config)
    with pytest.raises(ConfigError, match=r"data.path: .* is a directory; name a file of rows"):
        read_prompt_rows(tmp_path, config)


def test_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"data.path: .*pipe is not a regular file"):
        read_prompt_rows(tmp_path / "pipe", DataConfig(path="rows.jsonl"))


def test_contradicting_templates_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"it lacks \{prompt\}, where the prompt goes; put it in"):
        DataConfig(path="rows.jsonl", prompt_template="Solve")
    with pytest.raises(ValidationError, match=r"sets.sums.prompt_template\n.*it lacks \{prompt\}"):
        EvaluateConfig.model_validate({"sets": {"sums": {"path": "rows.jsonl", "prompt_template": "1+1="}}})
    with pytest.raises(ValidationError, match=r"system_prompt\n.*data.chat_template is false"):
        DataConfig(path="rows.jsonl", system_prompt="Be brief.")


def test_checks_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, workers.data.prompt_rows, workers.data.model_files, workers.data.prompt_rows;"
        "import workers.rewards.load_reward, workers.engines.hf.gguf;"
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
