"""Reads data rows from files: a prompt and its ground truth, or whatever a rollout of the user's takes. Torch-free:
`--dry-run` and workers read the same way.

Never tokenizes: that is `workers.data.prompt_dataset`. What lies on the Hub is a file before a run starts
(`launcher.config.hub`).
"""

import csv
import io
import math
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from asyncflow.errors import ConfigError, one_line
from asyncflow.extras import pip_line
from asyncflow.run_files import content_hash
from workers.settings.data import DataConfig

PLACEHOLDER = "{prompt}"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DIALECTS = {".csv": "excel", ".tsv": "excel-tab"}

Message = dict[str, str]  # `role` and `content`
_ABSENT: Any = object()


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One row of the file, or one task of a source.

    Attributes:
        prompt: text, or messages, of the prompt field, before any template.
        ground_truth: text of its field as it is (GSM8K: the whole solution); a number as Python writes it; "":
            the data have none.
        line: line of a JSONL file, else the row's number, from 1; or the task's index.
        fields: all that it has, in its order.
        part: source of the mixture.
    """

    prompt: str | list[Message]
    ground_truth: str
    line: int
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)
    part: int = 0

    def where(self, config: DataConfig) -> str:
        """Return where it is, for messages."""
        return config.place(self.line, self.part)

    @property
    def task(self) -> str:
        """All fields, as JSON text: what rollouts and rewards of the user's get."""
        return msgspec.json.encode(self.fields).decode()


def read_data(config: DataConfig, *, key: str = "data.path", own_rollout: bool = False) -> list[PromptRow]:
    """Read all rows of the file, or of the mixture, source after source; see `read_prompt_rows`."""
    rows: list[PromptRow] = []
    for part, one in enumerate(config.parts()):
        name = f"data.mixture.{part}.path" if config.mixture else key
        rows += read_prompt_rows(one.file, one, key=name, own_rollout=own_rollout, part=part)
    return rows


def read_prompt_rows(
    path: Path, config: DataConfig, *, key: str = "data.path", own_rollout: bool = False, part: int = 0
) -> list[PromptRow]:
    """Read all rows of a file; blank lines are passed over.

    Args:
        path: the file.
        config: its fields and templates.
        key: of the setting that names the file, for errors.
        own_rollout: a rollout of the user's gets the rows, so that any object will do.
        part: source of the mixture.

    Raises:
        ConfigError: the file cannot be read (Parquet: here) or holds no rows; a row is malformed or lacks a field (with
            file:line); or the `data` section contradicts itself.
    """
    check_templates(config)
    if path.exists() and not path.is_file():
        what = "a directory" if path.is_dir() else "no regular file, and every start reads it again"
        raise ConfigError(f"{key}: {path} is {what}; name a file of rows")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}; name a file of rows") from error
    rows = []
    for number, fields in _all_fields(path, content, key, config):
        where = f"{path}:{number}"
        if not isinstance(fields, dict):
            raise ConfigError(f"{where}: the row is {kind_of(fields)}, not a JSON object; write one object a line")
        rows.append(as_row(fields, number, config, own_rollout=own_rollout, where=where, part=part))
    if not rows:
        raise ConfigError(f"{key}: {path} holds no rows; put some into it")
    return rows


def _all_fields(path: Path, content: bytes, key: str, config: DataConfig) -> Iterator[tuple[int, Any]]:
    """Yield each row of a file, with the number of its line, or of the row where a row is no line."""
    content = content.removeprefix(BYTE_ORDER_MARK)
    start = content[:64].lstrip()
    if start.startswith(b"PAR1"):
        yield from enumerate(_parquet(path, content, key, config), start=1)
    elif path.suffix.lower() in _DIALECTS and not start.startswith(b"{"):
        yield from enumerate(_table(path, content), start=1)
    elif re.match(rb"\[\s*[{\]]", start):
        yield from enumerate(_decoded(content, str(path), "an array of objects"), start=1)
    else:
        for number, text in enumerate(content.split(b"\n"), start=1):
            if text.strip():
                yield number, _decoded(text, f"{path}:{number}", "one JSON object a line")


def _decoded(text: bytes, where: str, wanted: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: malformed JSON: {error}; write {wanted}") from error


def _parquet(path: Path, content: bytes, key: str, config: DataConfig) -> list[Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"{key}: {path} is a Parquet file, which needs pyarrow: {pip_line('data')}") from error
    try:
        names: list[str] = parquet.read_schema(pyarrow.BufferReader(content)).names
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"{path}: two columns are called {twice!r}; rename one")
        table = parquet.read_table(pyarrow.BufferReader(content))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{key}: {path} is no whole Parquet file: {one_line(error)}; get it again") from error
    given = {name for name in (config.prompt_field, config.ground_truth_field) if name is not None}
    given |= {name.partition(".")[0] for name in given}
    columns: dict[str, list[Any]] = {
        name: _values(table.column(name), f"{path}: {name!r}", named=name in given) for name in names
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _values(column: Any, where: str, *, named: bool) -> list[Any]:
    """Return a column's values as Python has them, decimal numbers as texts.

    Its times have microseconds; finer ones of Arrow are texts, and durations numbers of nanoseconds. Times of an
    unknown zone, and dates that Python has not, are the numbers of the file.

    Args:
        column: of Arrow.
        where: begins errors.
        named: a setting names it, so that such a number would be taken for a ground truth.

    Raises:
        ConfigError: there is no such value in Python.
    """
    import pyarrow as pa

    kinds = [
        _with_times(column.type, pa.timestamp("us"), pa.time64("us"), pa.duration("us")),
        _with_times(column.type, pa.string(), pa.string(), pa.int64()),
        *([] if named else [_with_times(column.type, pa.int64(), pa.string(), pa.int64())]),
    ]
    failed: Exception | None = None
    for number, kind in enumerate(kinds):
        try:
            values = list(column.cast(kind).to_pylist())
        except (pa.ArrowException, ValueError, OverflowError, KeyError) as error:  # (KeyError: of an unknown zone)
            failed = error
            continue
        if number != 1 or _OUT_OF_RANGE not in str(values):
            return [_without_decimals(value) for value in values] if "decimal" in str(kind) else values
    reason = "a date that Python does not have" if failed is None else one_line(failed)
    raise ConfigError(f"{where} cannot be read: {reason}; save the column as text") from failed


_OUT_OF_RANGE = "<value out of range"
"""In a text that Arrow writes for a time before the year -32767 or after 32767."""


def _without_decimals(value: Any) -> Any:
    """Return a value whose decimal numbers are texts with all their digits (`str` has 0E-10), at any depth."""
    match value:
        case Decimal():
            return format(value, "f")
        case dict():
            return {name: _without_decimals(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_without_decimals(inner) for inner in value]
    return value


def _with_times(kind: Any, timestamp: Any, time: Any, duration: Any) -> Any:
    """Return a type of Arrow with other types for its times, at any depth; numbers for timestamps: for dates, too."""
    import pyarrow as pa

    def inner(of: Any) -> Any:
        return _with_times(of, timestamp, time, duration)

    if pa.types.is_timestamp(kind):
        return pa.timestamp(timestamp.unit, kind.tz) if pa.types.is_timestamp(timestamp) else timestamp
    if pa.types.is_date(kind):
        return kind if timestamp != pa.int64() else pa.int32() if pa.types.is_date32(kind) else pa.int64()
    if pa.types.is_map(kind):
        return pa.map_(inner(kind.key_type), inner(kind.item_type))
    if pa.types.is_time64(kind):
        return time
    if pa.types.is_duration(kind):
        return duration
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(inner(field.type)) for field in kind])
    if pa.types.is_large_list(kind):
        return pa.large_list(inner(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(inner(kind.value_type), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(inner(kind.value_type))
    return kind


def _table(path: Path, content: bytes) -> Iterator[dict[str, str]]:
    csv.field_size_limit(2**31 - 1)
    try:
        text = io.StringIO(content.decode("utf-8-sig"), newline="")
        reader = csv.DictReader(text, dialect=_DIALECTS[path.suffix.lower()])
        names = reader.fieldnames or ()
        if len({*names}) < len(names):
            raise ConfigError(f"{path}: the header has a name twice: {', '.join(names)}; rename one")
        for number, row in enumerate(reader, start=1):
            if None in row or None in row.values():
                raise ConfigError(f"{path}:{number}: the row has not as many fields as the header; correct it")
            yield row
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is no table of text: {error}; save it as UTF-8 with a header") from error


def data_hash(path: Path) -> str:
    """Return the xxh3-64 of a file's content as 16 hex digits: which prompts a group has follows from it.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return content_hash(path)
    except OSError as error:
        raise ConfigError(f"data.path: cannot read {path}: {error.strerror}; name a file of rows") from error


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


def plain_text(prompt: str | list[Message], config: DataConfig) -> str:
    """Return the prompt inside `prompt_template`."""
    assert isinstance(prompt, str), "messages need a chat template"
    return config.prompt_template.replace(PLACEHOLDER, prompt)


def conversation(prompt: str | list[Message], config: DataConfig) -> list[Message]:
    """Return the messages that a chat template renders."""
    *before, last = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [*before, {**last, "content": plain_text(last["content"], config)}]
    if config.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return messages


def check_fit(row: PromptRow, num_tokens: int, config: DataConfig) -> bool:
    """Return whether a prompt of `num_tokens` is trained on.

    Raises:
        ConfigError: it gives no tokens, or is too long and `overlong` is `reject`, or a source made it.
    """
    if num_tokens == 0:
        raise ConfigError(
            f"{row.where(config)}: the prompt gives no tokens (the tokenizer knows none of it); remove the row"
        )
    of_source = config.source is not None  # its group would have no prompt
    if num_tokens > config.max_prompt_tokens and (of_source or config.overlong == "reject"):
        advice = "shorten the prompt, or set data.overlong to skip"
        if of_source:
            advice = "or shorten the prompt" if config.is_feed else "or have the source make shorter ones"
        raise ConfigError(
            f"{row.where(config)}: the prompt has {num_tokens} tokens, more than data.max_prompt_tokens "
            f"= {config.max_prompt_tokens}; raise that, {advice}"
        )
    return num_tokens <= config.max_prompt_tokens


def ending_text(where: str, end: str) -> ConfigError:
    """Return the error for a prompt that ends itself.

    Args:
        where: it is.
        end: the token.
    """
    return ConfigError(
        f"{where}: the prompt's text ends with {end}, which ends a response, so none could begin; take it out of the "
        f"text"
    )


def check_left(rows: Iterable[PromptRow], left: Collection[int], config: DataConfig) -> None:
    """Raise ConfigError where all of the data are too long, or all of a source of the mixture: it is not in `left`."""
    for part, one in enumerate(config.parts()):
        if part not in left:
            raise ConfigError(
                f"data.max_prompt_tokens: all {sum(row.part == part for row in rows)} prompts of {one.name} are longer "
                f"than {config.max_prompt_tokens} tokens; raise it"
            )


def as_row(
    fields: dict[str, Any], line: int, config: DataConfig, *, own_rollout: bool, where: str, part: int = 0
) -> PromptRow:
    """Return a row, from what a line of the file or a source says.

    Args:
        fields: all that it has.
        line: number of the line, or index of the task.
        config: names prompt and ground truth.
        own_rollout: a rollout of the user's gets the row: any prompt and ground truth will do, or none.
        where: begins errors.
        part: source of the mixture.

    Raises:
        ConfigError: it lacks the prompt or the ground truth.
    """
    if own_rollout:
        prompt, ground_truth = (
            _as_text(None if name is None else field_of(fields, name, None))
            for name in (config.prompt_field, config.ground_truth_field)
        )
        return PromptRow(prompt, ground_truth, line, fields, part)
    return PromptRow(*_prompt_and_ground_truth(fields, config, where), line, fields, part)


def _prompt_and_ground_truth(row: dict[str, Any], config: DataConfig, where: str) -> tuple[str | list[Message], str]:
    prompt = field_of(row, config.prompt_field)
    ground_truth = "" if config.ground_truth_field is None else field_of(row, config.ground_truth_field)
    if prompt is _ABSENT or ground_truth is _ABSENT:
        _refuse_missing(row, where, config)
    if isinstance(prompt, list):
        prompt = _messages(prompt, config, where)
    elif type(prompt) is not str:
        raise ConfigError(
            f"{where}: {config.prompt_field!r} is {kind_of(prompt)}; data.prompt_field must name text or messages"
        )
    elif not prompt.strip():
        raise ConfigError(f"{where}: {config.prompt_field!r} is empty; remove the row or write a prompt")
    if isinstance(ground_truth, int | float | Decimal) and _is_number(ground_truth):
        try:
            ground_truth = format(ground_truth, "f") if type(ground_truth) is Decimal else str(ground_truth)
        except ValueError as error:  # Python writes no more digits
            raise ConfigError(
                f"{where}: {config.ground_truth_field!r} is a number of more than {sys.get_int_max_str_digits()} "
                f"digits; write it as text"
            ) from error
    if type(ground_truth) is not str:
        raise ConfigError(
            f"{where}: {config.ground_truth_field!r} is {kind_of(ground_truth)}; data.ground_truth_field must name "
            f"text or a number"
        )
    return prompt, ground_truth


def _is_number(value: float | Decimal) -> bool:
    """Return whether it is one that has digits: no truth value, infinity or NaN."""
    return type(value) is int or (type(value) in (float, Decimal) and math.isfinite(value))


def field_of(row: Mapping[str, Any], name: str, default: Any = _ABSENT) -> Any:
    """Return a field of a row; `reward_model.ground_truth` is one inside of another, unless a field is called so."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def _messages(messages: list[Any], config: DataConfig, where: str) -> list[Message]:
    """Return messages whose contents are texts; those of parts (`{type: text, text: ...}`) are joined.

    Raises:
        ConfigError: no chat template answers them.
    """
    what = f"{where}: {config.prompt_field!r}"
    if not config.chat_template:
        raise ConfigError(f"{what} is a list, of messages; set data.chat_template to true, or name a text")
    joined = [{**one, "content": _content(one.get("content"))} if isinstance(one, dict) else one for one in messages]
    texts = (isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
             for one in joined)  # fmt: skip
    if not joined or not all(texts):
        raise ConfigError(
            f"{what} must be text, or messages with a role and a content that is text, or a list of parts of type "
            f"text; correct the row"
        )
    if joined[-1]["role"] == "assistant":
        raise ConfigError(f"{what} ends with the assistant's message; end with what it answers")
    if not joined[-1]["content"].strip():
        raise ConfigError(f"{what} ends with an empty message; remove the row or write a prompt")
    return joined


def _content(content: object) -> object:
    """Return the text of a content that is a list of text parts, and anything else as it is."""
    if not isinstance(content, list) or not content:
        return content
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    known = [text for text in texts if isinstance(text, str)]
    return "".join(known) if len(known) == len(texts) else content


def _as_text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _refuse_missing(row: dict[str, Any], where: str, config: DataConfig) -> NoReturn:
    key, name = next(
        (key, name)
        for key, name in (("prompt_field", config.prompt_field), ("ground_truth_field", config.ground_truth_field))
        if name is not None and field_of(row, name) is _ABSENT
    )
    found = ", ".join(sorted(_paths_of(row))) or "none"
    or_null = ", or to null if your reward needs none" if key == "ground_truth_field" else ""
    raise ConfigError(f"{where}: no field {name!r}; found: {found}; set data.{key} to the right one{or_null}")


def _paths_of(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields of a row, those inside of others by their paths."""
    for name, value in row.items():
        yield from (f"{name}.{inner}" for inner in value) if isinstance(value, dict) and value else (name,)


def kind_of(value: object) -> str:
    """Return what a value of JSON or Parquet is, in words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null" if value is None else f"of type {type(value).__name__}")
