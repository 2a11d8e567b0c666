"""Reads data rows from a JSONL file: a prompt and its reference answer, or whatever a rollout of the user's takes.
Torch-free: `--dry-run` and workers read the same way.

Never tokenizes: that is `workers.data.prompt_dataset`. For a file of another format it says which command converts it.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from asyncflow.errors import ConfigError
from workers.checkpoint.files import content_hash
from workers.data.config import DataConfig

PLACEHOLDER = "{prompt}"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DUMP = "[print(json.dumps(row, default=str)) for "
_PARQUET = (
    "import json, sys, pyarrow.parquet as parquet; "
    f"{_DUMP}batch in parquet.ParquetFile(sys.argv[1]).iter_batches() for row in batch.to_pylist()]"
)
_CSV = (
    "import csv, json, sys; csv.field_size_limit(2**31 - 1); "
    f'{_DUMP}row in csv.DictReader(open(sys.argv[1], newline="", encoding="utf-8-sig"), dialect="DIALECT")]'
)
_ARRAY = f"import json, sys; {_DUMP}row in json.load(open(sys.argv[1]))]"
_HUB = 'import sys; from datasets import load_dataset; load_dataset(*sys.argv[2:], split="train").to_json(sys.argv[1])'
_DIALECTS = {".csv": "excel", ".tsv": "excel-tab"}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One line of the file, or one task of a source.

    Attributes:
        prompt: text of the prompt field, before any template.
        ground_truth: text of the answer field as it is (GSM8K: the whole solution); a number as Python writes it.
        line: line number in the file, from 1, or the task's index.
        fields: all that it has, in its order.
    """

    prompt: str
    ground_truth: str
    line: int
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def task(self) -> str:
        """All fields, as JSON text: what a rollout of the user's gets."""
        return msgspec.json.encode(self.fields).decode()


def read_prompt_rows(
    path: Path, config: DataConfig, *, key: str = "data.path", own_rollout: bool = False
) -> list[PromptRow]:
    """Read all rows; blank lines are passed over.

    Args:
        path: the file.
        config: its fields and templates.
        key: of the setting that names the file, for errors.
        own_rollout: a rollout of the user's gets the rows, so that any object will do.

    Raises:
        ConfigError: the file cannot be read or holds no rows; a row is malformed or lacks a field (with file:line);
            or the `data` section contradicts itself.
    """
    check_templates(config)
    if path.exists() and not path.is_file():
        what = "a directory" if path.is_dir() else "no regular file, and every start reads it again"
        raise ConfigError(f"{key}: {path} is {what}; name a JSONL file")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}; name a JSONL file") from error
    other = other_format(path, content)
    if other is not None:
        raise ConfigError(f"{key}: {path} is {other}")
    lines = content.removeprefix(BYTE_ORDER_MARK).split(b"\n")
    rows = [_read_row(text, path, i, config, own_rollout) for i, text in enumerate(lines, start=1) if text.strip()]
    if not rows:
        raise ConfigError(f"{key}: {path} holds no rows; write one JSON object a line")
    return rows


def data_hash(path: Path) -> str:
    """Return the xxh3-64 of a file's content as 16 hex digits: which prompts a group has follows from it.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return content_hash(path)
    except OSError as error:
        raise ConfigError(f"data.path: cannot read {path}: {error.strerror}; name a JSONL file") from error


def check_templates(config: DataConfig) -> None:
    """Raise ConfigError when the fields around the prompt contradict each other."""
    if PLACEHOLDER not in config.prompt_template:
        raise ConfigError(
            f"data.prompt_template: {config.prompt_template!r} lacks {PLACEHOLDER}, where the prompt goes; put it in"
        )
    if config.system_prompt is not None and not config.chat_template:
        raise ConfigError(
            "data.system_prompt: is set, but data.chat_template is false; set that to true or remove this"
        )


def plain_text(prompt: str, config: DataConfig) -> str:
    """Return the prompt inside `prompt_template`."""
    return config.prompt_template.replace(PLACEHOLDER, prompt)


def conversation(prompt: str, config: DataConfig) -> list[dict[str, str]]:
    """Return the messages that a chat template renders."""
    messages = [{"role": "user", "content": plain_text(prompt, config)}]
    if config.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return messages


def check_fit(row: PromptRow, num_tokens: int, config: DataConfig) -> bool:
    """Return whether a prompt of `num_tokens` is trained on.

    Raises:
        ConfigError: it gives no tokens, or is too long and `overlong` is `reject`, or a source made it.
    """
    if num_tokens == 0:
        raise ConfigError(
            f"{config.place(row.line)}: the prompt gives no tokens (the tokenizer knows none of it); remove the row"
        )
    of_source = config.source is not None  # its group would have no prompt
    if num_tokens > config.max_prompt_tokens and (of_source or config.overlong == "reject"):
        advice = (
            "have the source make shorter ones" if of_source else "shorten the prompt, or set data.overlong to skip"
        )
        raise ConfigError(
            f"{config.place(row.line)}: the prompt has {num_tokens} tokens, more than data.max_prompt_tokens "
            f"= {config.max_prompt_tokens}; raise that, {'or ' if of_source else ''}{advice}"
        )
    return num_tokens <= config.max_prompt_tokens


def nothing_fits(num_rows: int, config: DataConfig) -> ConfigError:
    """Return the error for a data set of which nothing is left."""
    return ConfigError(
        f"data.max_prompt_tokens: all {num_rows} prompts of {config.path or config.source} are longer than "
        f"{config.max_prompt_tokens} tokens; raise it"
    )


def _read_row(text: bytes, path: Path, line: int, config: DataConfig, own_rollout: bool) -> PromptRow:
    where = f"{path}:{line}"
    try:
        row = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: malformed JSON: {error}; write one JSON object a line") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: the row is {kind_of(row)}, not a JSON object; write one object a line")
    return as_row(row, line, config, own_rollout=own_rollout, where=where)


def as_row(fields: dict[str, Any], line: int, config: DataConfig, *, own_rollout: bool, where: str) -> PromptRow:
    """Return a row, from what a line of the file or a source says.

    Args:
        fields: all that it has.
        line: number of the line, or index of the task.
        config: names prompt and answer.
        own_rollout: a rollout of the user's gets the row: any prompt and answer will do, or none.
        where: begins errors.

    Raises:
        ConfigError: it lacks the prompt or the reference answer.
    """
    if own_rollout:
        prompt, answer = (_as_text(fields.get(name)) for name in (config.prompt_field, config.answer_field))
        return PromptRow(prompt, answer, line, fields)
    return _prompt_row(fields, line, config, where)


def _prompt_row(row: dict[str, Any], line: int, config: DataConfig, where: str) -> PromptRow:
    try:
        prompt, answer = row[config.prompt_field], row[config.answer_field]
    except KeyError:
        _refuse_missing(row, where, config)
    if type(prompt) is not str:
        raise ConfigError(f"{where}: {config.prompt_field!r} is {kind_of(prompt)}; data.prompt_field must name text")
    if not prompt.strip():
        raise ConfigError(f"{where}: {config.prompt_field!r} is empty; remove the row or write a prompt")
    if type(answer) is int or type(answer) is float:
        answer = str(answer)
    if type(answer) is not str:
        raise ConfigError(
            f"{where}: {config.answer_field!r} is {kind_of(answer)}; data.answer_field must name text or a number"
        )
    return PromptRow(prompt, answer, line, row)


def _as_text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _refuse_missing(row: dict[str, Any], where: str, config: DataConfig) -> NoReturn:
    key, name = next(
        (key, name)
        for key, name in (("prompt_field", config.prompt_field), ("answer_field", config.answer_field))
        if name not in row
    )
    found = ", ".join(sorted(row)) or "none"
    raise ConfigError(f"{where}: no field {name!r}; found: {found}; set data.{key} to the right one")


def kind_of(value: object) -> str:
    """Return what a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def other_format(path: Path, content: bytes) -> str | None:
    """Return what a file is instead of JSONL, with the command that converts it; None: nothing that is known."""
    start = content[:64].lstrip()
    if start.startswith(b"PAR1"):
        return f"a Parquet file; convert it: pip install pyarrow && {_to_file(_PARQUET, path)}"
    if path.suffix.lower() in _DIALECTS and not start.startswith(b"{"):
        script = _CSV.replace("DIALECT", _DIALECTS[path.suffix.lower()])
        return f"a table of text; convert it: {_to_file(script, path)}"
    if re.match(rb"\[\s*\{", start):
        return f"one JSON array; convert it: {_to_file(_ARRAY, path)}"
    return None


def is_hub_name(text: str) -> bool:
    """Return whether a text may be a name on the Hugging Face Hub, OWNER/NAME, rather than a path to a file."""
    return _HUB_NAME.fullmatch(text) is not None and not re.search(r"\.(jsonl?|txt|csv|tsv|parquet|gguf)$", text)


def hub_data_command(name: str) -> str:
    """Return the command that writes a Hub's data set, its part `train`, into a JSONL file here."""
    target = f"{name.rpartition('/')[2]}.jsonl"
    return f"pip install datasets && python -c {shlex.quote(_HUB)} {target} {name}"


def hub_model_command(name: str) -> str:
    """Return the command that downloads a Hub's model into a directory."""
    return f"hf download {name} --local-dir models/{name.rpartition('/')[2]}"


def _to_file(script: str, path: Path) -> str:
    target = path.with_suffix(".jsonl")
    return f"python -c {shlex.quote(script)} {shlex.quote(str(path))} > {shlex.quote(str(target))}"
