"""Reads rows of data files: a prompt with its ground truth, or whatever fields a user's rollout function takes.

Torch-free, so that `--dry-run` and workers read alike. Tokenizing is left to `workers.data.prompt_dataset`; Hub data
sets have become local files before a run starts (`launcher.config.hub`).
"""

import csv
import io
import logging
import math
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from asyncflow.checkpoint_files import content_hash
from asyncflow.errors import ConfigError, one_line
from asyncflow.extras import pip_line
from workers.calls.user_function import excerpt
from workers.data.model_files import eos_token_ids, vocabulary_size
from workers.data.tokenizer import ModelTokenizer
from workers.settings.data import PLACEHOLDER, DataConfig
from workers.settings.run import RunConfig

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DIALECTS = {".csv": "excel", ".tsv": "excel-tab"}

Message = dict[str, Any]  # `role` and `content`, which are texts, and what else the template reads
_ABSENT: Any = object()


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One row of a file, or one task of a source."""

    prompt: str | list[Message]  # text or messages, before any template
    # The field's text as it is (GSM8K: the whole solution), a number as Python prints it, or "" if the data have none
    ground_truth: str
    line: int  # 1-based line of a JSONL file, otherwise the 1-based row number, or the index of the task
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)  # all fields, in file order
    part: int = 0  # index of the source within the mixture
    # For SFT: the messages or the text that is trained after the prompt; None: a response is generated.
    completion: str | list[Message] | None = None

    def describe_place(self, config: DataConfig) -> str:
        """Return the row's location, for messages."""
        return config.place(self.line, self.part)

    @property
    def task(self) -> str:
        """All fields as JSON text: what user rollouts and rewards receive."""
        return msgspec.json.encode(self.fields).decode()


def read_data(config: DataConfig, *, key: str = "data.path", own_rollout: bool = False) -> list[PromptRow]:
    """Read all rows of the file, or of the mixture source by source; see `read_prompt_rows`."""
    rows: list[PromptRow] = []
    for part, one in enumerate(config.parts()):
        name = f"data.mixture.{part}.path" if config.mixture else key
        rows += read_prompt_rows(one.file, one, key=name, own_rollout=own_rollout, part=part)
    return rows


def read_prompt_rows(
    path: Path, config: DataConfig, *, key: str = "data.path", own_rollout: bool = False, part: int = 0
) -> list[PromptRow]:
    """Read all rows of a file, skipping blank lines.

    Args:
        key: the setting that names the file, for errors.
        own_rollout: a user's rollout function gets the rows, so any JSON object is valid.
        part: index of the source within the mixture.

    Raises ConfigError if the file is unreadable (Parquet: as a whole) or has no rows; a row is malformed or lacks a
    field (with file:line).
    """
    if path.exists() and not path.is_file():
        what = "a directory" if path.is_dir() else "not a regular file, though every start must read it again"
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
        raise ConfigError(f"{key}: {path} holds no rows; add some")
    return rows


def _all_fields(path: Path, content: bytes, key: str, config: DataConfig) -> Iterator[tuple[int, Any]]:
    """Yield (line number, or row number if rows are not lines; row)."""
    # The content takes precedence over the file's name: JSON Lines may be called .csv.
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
        raise ConfigError(
            f"{key}: {path} is not a complete Parquet file: {one_line(error)}; download it again"
        ) from error
    given = {name for name in (config.prompt_field, config.ground_truth_field) if name is not None}
    given |= {name.partition(".")[0] for name in given}
    columns: dict[str, list[Any]] = {
        name: _values(table.column(name), f"{path}: {name!r}", named=name in given) for name in names
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _values(column: Any, where: str, *, named: bool) -> list[Any]:
    """Convert an Arrow column to Python values; refuse it if Python cannot represent one."""
    import pyarrow as pa

    # From the nicest to the most tolerant: Python times in microseconds; text for times finer than that (durations
    # become
    # nanoseconds); raw numbers for unknown time zones and for dates outside of Python's range. A column that a
    # setting
    # names never falls back to raw numbers, since these would pass for a ground truth.
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


_OUT_OF_RANGE = "<value out of range"  # Arrow writes this in place of a time before the year -32767 or after 32767


def _without_decimals(value: Any) -> Any:
    """Replace decimals by text with all digits, at any depth."""
    match value:
        case Decimal():
            # `str` would write 0E-10.
            return format(value, "f")
        case dict():
            return {name: _without_decimals(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_without_decimals(inner) for inner in value]
    return value


def _with_times(kind: Any, timestamp: Any, time: Any, duration: Any) -> Any:
    """Replace the time types inside an Arrow type, at any depth; an integer `timestamp` also replaces dates."""
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
                raise ConfigError(
                    f"{path}:{number}: the row and the header differ in their numbers of fields; correct it"
                )
            yield row
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not a table of text: {error}; save it as UTF-8 with a header") from error


def data_hash(path: Path) -> str:
    """Return the xxh3-64 of a file (16 hex digits), which decides the prompts of each group; ConfigError if
    unreadable."""
    try:
        return content_hash(path)
    except OSError as error:
        raise ConfigError(f"data.path: cannot read {path}: {error.strerror}; name a file of rows") from error


def plain_text(prompt: str | list[Message], config: DataConfig) -> str:
    assert isinstance(prompt, str), "messages need a chat template"
    return config.prompt_template.replace(PLACEHOLDER, prompt)


def conversation(prompt: str | list[Message], config: DataConfig) -> list[Message]:
    """Return the messages for the chat template."""
    *before, last = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [*before, {**last, "content": plain_text(last["content"], config)}]
    if config.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return messages


def check_fit(row: PromptRow, num_tokens: int, config: DataConfig) -> bool:
    """Return whether a prompt of `num_tokens` is used. Raises ConfigError if it has no tokens, or is too long and
    `overlong` is `reject` or a source made it."""
    if num_tokens == 0:
        raise ConfigError(
            f"{row.describe_place(config)}: the prompt gives no tokens (the tokenizer knows none of it); remove the row"
        )
    of_source = config.source is not None  # never skipped: its group would have no prompt
    what = "prompt" if row.completion is None else "row"
    if num_tokens > config.max_prompt_tokens and (of_source or config.overlong == "reject"):
        advice = f"shorten the {what}, or set data.overlong to skip"
        if of_source:
            advice = f"or shorten the {what}" if config.is_feed else "or have the source make shorter ones"
        raise ConfigError(
            f"{row.describe_place(config)}: the {what} has {num_tokens} tokens, more than data.max_prompt_tokens "
            f"= {config.max_prompt_tokens}; raise that, {advice}"
        )
    return num_tokens <= config.max_prompt_tokens


def warn_of_long_rows(num_long: int, num_checked: int, num_rows: int, config: DataConfig) -> None:
    """Say how many rows are left out, of those that were checked before a start; the run counts all of them."""
    if num_long:
        of = f"{num_rows} rows" if num_checked == num_rows else f"the first {num_checked} of {num_rows} rows"
        logger.warning("%s", long_rows_text(num_long, of, config))


def long_rows_text(num_long: int, of: str, config: DataConfig) -> str:
    """Return a line that says how many rows are left out; `of`: how many there are, e.g. `7473 rows`."""
    return (
        f"{config.key('path').rpartition('.')[0]}: {num_long} of {of} are longer than data.max_prompt_tokens = "
        f"{config.max_prompt_tokens} and are left out; raise it to keep them"
    )


def ending_text(where: str, end: str) -> ConfigError:
    """Return the error for a prompt whose own text ends with `end`, a token that ends responses."""
    return ConfigError(
        f"{where}: the prompt's text ends with {end}, which ends a response, so none could begin; take it out of the "
        f"text"
    )


def warn_of_marks(found: Sequence[tuple[PromptRow, str]], num_rows: int, config: DataConfig) -> None:
    """Warn of messages whose text contains special tokens, which only the template should write.

    `found`: such rows with one of their tokens; `num_rows`: how many were looked at.
    """
    if found:
        row, mark = found[0]
        logger.warning(
            "data: the messages of %d of the first %d rows hold special tokens in their text, %s of %s first; the "
            "model takes them for the template's own%s",
            len(found), num_rows, mark, row.describe_place(config),
            "" if config.completion_field is None else ", and learns to write those of the assistant",
        )  # fmt: skip


def check_left(rows: Iterable[PromptRow], left: Collection[int], config: DataConfig) -> None:
    """Raise ConfigError if no prompt of some source is short enough, i.e. its part is missing from `left`."""
    for part, one in enumerate(config.parts()):
        if part not in left:
            number, what = sum(row.part == part for row in rows), "prompt" if one.completion_field is None else "row"
            all_of_them = (
                f"the only {what} of {one.name} is" if number == 1 else f"all {number} {what}s of {one.name} are"
            )
            raise ConfigError(
                f"data.max_prompt_tokens: {all_of_them} longer than {config.max_prompt_tokens} tokens; raise it"
            )


def as_row(
    fields: dict[str, Any], line: int, config: DataConfig, *, own_rollout: bool, where: str, part: int = 0
) -> PromptRow:
    """Return a row from the fields of a line or a task.

    Args:
        line: line number, or index of the task.
        own_rollout: a user's rollout function gets the row: prompt and ground truth may be anything, or absent.
        where: location that errors begin with.
        part: index of the source within the mixture.

    Raises ConfigError if the prompt or the ground truth is missing or of the wrong type.
    """
    if own_rollout:
        prompt, ground_truth = (
            _as_text(None if name is None else field_of(fields, name, None))
            for name in (config.prompt_field, config.ground_truth_field)
        )
        return PromptRow(prompt, ground_truth, line, fields, part)
    if config.completion_field is not None:
        given, completion = _prompt_and_completion(fields, config, where)
        return PromptRow(given, "", line, fields, part, completion)
    return PromptRow(*_prompt_and_ground_truth(fields, config, where), line, fields, part)


def _prompt_and_completion(
    row: dict[str, Any], config: DataConfig, where: str
) -> tuple[str | list[Message], str | list[Message]]:
    """Return what is given and what is trained; of a whole conversation nothing is given."""
    name = config.completion_field
    assert name is not None, "the caller looked"
    completion = field_of(row, name)
    if completion is _ABSENT:
        found = ", ".join(sorted(_paths_of(row))) or "none"
        raise ConfigError(f"{where}: no field {name!r}; found: {found}; set data.completion_field to the right one")
    if isinstance(completion, list):
        completion = _messages(completion, name, config, where)
        if not any(one["role"] == "assistant" for one in completion):
            raise ConfigError(f"{where}: {name!r} has no message of the assistant, so nothing is trained; remove it")
        if _is_whole_conversation(completion, field_of(row, config.prompt_field), name, config, where):
            if config.prompt_template != PLACEHOLDER:
                raise ConfigError(
                    f"{where}: {name!r} is a whole conversation, which data.prompt_template is not applied to; leave "
                    f"that out"
                )
            return [], completion
    elif type(completion) is not str:
        raise ConfigError(
            f"{where}: {name!r} is {kind_of(completion)}; data.completion_field must name text or messages"
        )
    elif not completion.strip():
        raise ConfigError(f"{where}: {name!r} is empty, so nothing is trained; remove the row")
    prompt, _ = _prompt_and_ground_truth(row, config.model_copy(update={"ground_truth_field": None}), where)
    return prompt, completion


def _is_whole_conversation(messages: Sequence[Message], prompt: Any, name: str, config: DataConfig, where: str) -> bool:
    """Return whether nothing stands before these messages. One may begin with the assistant's greeting."""
    if messages[0]["role"] != "assistant":
        return True
    if not any(one["role"] == "user" for one in messages):
        return False
    if prompt is not _ABSENT and not isinstance(prompt, list):
        raise ConfigError(
            f"{where}: {name!r} begins with the assistant and goes on with the user, and {config.prompt_field!r} is "
            f"{kind_of(prompt)}, so whether that comes before cannot be told; set data.prompt_field to the messages "
            f"before it, or to a name that no row has"
        )
    return prompt is _ABSENT


def _prompt_and_ground_truth(row: dict[str, Any], config: DataConfig, where: str) -> tuple[str | list[Message], str]:
    prompt = field_of(row, config.prompt_field)
    ground_truth = "" if config.ground_truth_field is None else field_of(row, config.ground_truth_field)
    if prompt is _ABSENT or ground_truth is _ABSENT:
        _refuse_missing(row, where, config)
    if isinstance(prompt, list):
        prompt = _messages(prompt, config.prompt_field, config, where)
        if prompt[-1]["role"] == "assistant":
            raise ConfigError(
                f"{where}: {config.prompt_field!r} ends with the assistant's message; end with a message for it to "
                f"answer"
            )
        if not prompt[-1]["content"].strip():
            raise ConfigError(
                f"{where}: {config.prompt_field!r} ends with an empty message; remove the row or write a prompt"
            )
    elif type(prompt) is not str:
        raise ConfigError(
            f"{where}: {config.prompt_field!r} is {kind_of(prompt)}; {config.key('prompt_field')} must name text or "
            f"messages"
        )
    elif not prompt.strip():
        raise ConfigError(f"{where}: {config.prompt_field!r} is empty; remove the row or write a prompt")
    if isinstance(ground_truth, int | float | Decimal) and _is_number(ground_truth):
        try:
            ground_truth = format(ground_truth, "f") if type(ground_truth) is Decimal else str(ground_truth)
        except ValueError as error:  # Python limits the digits of an integer that it prints
            raise ConfigError(
                f"{where}: {config.ground_truth_field!r} is a number of more than {sys.get_int_max_str_digits()} "
                f"digits; write it as text"
            ) from error
    if type(ground_truth) is not str:
        raise ConfigError(
            f"{where}: {config.ground_truth_field!r} is {kind_of(ground_truth)}; {config.key('ground_truth_field')} "
            f"must name text or a number"
        )
    return prompt, ground_truth


def _is_number(value: float | Decimal) -> bool:
    """Return whether `value` has digits: booleans, infinities and NaN do not."""
    return type(value) is int or (type(value) in (float, Decimal) and math.isfinite(value))


def field_of(row: Mapping[str, Any], name: str, default: Any = _ABSENT) -> Any:
    """Return a field of a row; `a.b` is field b inside of a, unless the row has a field called "a.b"."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def _messages(messages: list[Any], field_name: str, config: DataConfig, where: str) -> list[Message]:
    """Check messages and join contents that consist of parts (`{type: text, text: ...}`)."""
    what = f"{where}: {field_name!r}"
    if not config.chat_template:
        raise ConfigError(f"{what} is a list (of messages); set {config.key('chat_template')} to true, or name a text")
    joined = [_message(one) if isinstance(one, dict) else one for one in messages]
    wrong = "it is an empty list" if not joined else ""
    for number, one in enumerate(joined, start=1):
        if fault := _fault_of(one):
            wrong = f"message {number} of {len(joined)}, {excerpt(_as_text(messages[number - 1]))}, {fault}"
            break
    if wrong:
        raise ConfigError(
            f"{what} must be text, or messages with a role and a content that is text, or a list of parts of type "
            f"text, but {wrong}; correct the row"
        )
    return joined


def _fault_of(message: object) -> str:
    """Return what keeps a template from rendering a message; "": nothing."""
    if not isinstance(message, dict):
        return f"is {kind_of(message)}"
    for name in ("role", "content"):
        value = message.get(name)
        if value is None:
            return f"has no {name}"
        if not isinstance(value, str):
            return f"has a {name} that is {kind_of(value)}"
    return ""


def _message(message: Mapping[str, Any]) -> Message:
    # A column of messages has every key in each of them, and templates ask whether there is one.
    given = {name: value for name, value in message.items() if value is not None}
    calls_only = bool(given.get("tool_calls")) and "content" not in given
    return {**given, "content": "" if calls_only else _content(given.get("content"))}


def _content(content: object) -> object:
    """Join a list of text parts; return any other content unchanged."""
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
    may_be_null = key == "ground_truth_field" and not config.is_held_out
    or_null = ", or to null if your reward needs none" if may_be_null else ""
    raise ConfigError(f"{where}: no field {name!r}; found: {found}; set {config.key(key)} to the right one{or_null}")


def _paths_of(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of all fields, nested ones (one level) as dotted paths."""
    for name, value in row.items():
        yield from (f"{name}.{inner}" for inner in value) if isinstance(value, dict) and value else (name,)


def kind_of(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null" if value is None else f"of type {type(value).__name__}")


# Checks before a run starts (and in `--dry-run`): prompts are accepted, the tokenizer can represent them, and a
# response can begin after them and end. `workers.data.prompt_dataset` makes the prompts of the run with the same
# tokenizer (`workers.data.tokenizer`), so what is checked and shown is what the model gets.

CHUNK = 256
"""Prompts tokenized together. Those of the first chunk are also decoded and compared."""
MAX_LOST = 0.1
"""Share of a prompt's characters that may be lost by encoding and decoding."""
MAX_LOST_SPACES = 0.5
"""The same for runs of white space: some tokenizers merge spaces, or drop them at the ends."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShownPrompt:
    """The first prompt of a file as the model gets it."""

    text: str  # with templates applied
    ground_truth: str
    num_tokens: int | None  # of `text`; None: the user's rollout function makes its own prompt
    num_kept: int | None = None  # how many prompts of the file are short enough; None: not all were checked
    num_trained: int = 0  # of SFT's row: how many of its tokens are trained


@dataclass(frozen=True)
class _Sample:
    row: PromptRow
    text: str
    tokens: Sequence[int]


def check_prompts(
    rows: list[PromptRow], config: DataConfig, *, model_dir: Path, tokenizer: ModelTokenizer | None = None
) -> ShownPrompt:
    """Check the chat template, the lengths, and that tokens represent their prompts; return the first prompt.

    All prompts are checked for `overlong: reject`, and for a sampler, which needs to know how many remain. Otherwise
    the check stops at the first chunk after which every source has a prompt that fits.

    `tokenizer`: one that is already open, since starting its child process takes a second. Raises ConfigError if the
    template is missing or renders at random; a prompt is too long under `overlong: reject`, or all are; a prompt has no
    tokens or ones that the model lacks, loses characters or spaces, ends with a token that ends responses, or begins
    with BOS twice; or no response could end.
    """
    if tokenizer is None:
        key = config.key("chat_template")
        with ModelTokenizer(model_dir, chat=config.chat_template, templates=config.templates, key=key) as tokenizer:
            return _check(rows, config, tokenizer)
    return _check(rows, config, tokenizer)


def check_ends(config: DataConfig, tokenizer: ModelTokenizer) -> None:
    """Raise ConfigError unless a response can end; for when there are no prompts yet."""
    _Borders(tokenizer, config)


def _check(rows: list[PromptRow], config: DataConfig, tokenizer: ModelTokenizer) -> ShownPrompt:
    first, borders = rows[0], _Borders(tokenizer, config)
    shown, left, all_count = None, set[int](), config.overlong == "reject" or config.sampler is not None
    num_checked = num_kept = 0
    for chunk in _samples(rows, config, tokenizer):
        kept = [sample for sample in chunk if check_fit(sample.row, len(sample.tokens), config)]
        check_tokens([(sample.row, sample.tokens) for sample in kept], config, tokenizer.model_dir)
        if shown is None:
            _check_rendering(chunk, config, tokenizer)
            _check_texts(kept, config, tokenizer)
            borders.warn_of_marks(kept)
            shown = ShownPrompt(chunk[0].text, first.ground_truth, len(chunk[0].tokens))
        for sample in kept:
            borders.check(sample)
        num_checked, num_kept = num_checked + len(chunk), num_kept + len(kept)
        left |= {sample.row.part for sample in kept}
        # Each source has a prompt that fits.
        if len(left) == len(config.parts()) and not all_count:
            break
    borders.check_texts(rows)
    check_left(rows, left, config)
    warn_of_long_rows(num_checked - num_kept, num_checked, len(rows), config)
    assert shown is not None, "there is a first row"
    return replace(shown, num_kept=num_kept) if all_count else shown


def _samples(rows: list[PromptRow], config: DataConfig, tokenizer: ModelTokenizer) -> Iterator[list[_Sample]]:
    rest = iter(rows)
    while chunk := list(islice(rest, CHUNK)):
        texts = _render(chunk, config, tokenizer)
        tokens = tokenizer.encode(texts, special=not config.chat_template)
        yield [_Sample(*parts) for parts in zip(chunk, texts, tokens, strict=True)]


def prompts_of(rows: Sequence[PromptRow], config: RunConfig) -> list[str | list[Message]]:
    """Return what a tokenizer makes prompts of: conversations with a chat template, otherwise texts; of an own rollout,
    which makes its prompts itself, and of SFT, whose rows are no prompts, the tasks."""
    if config.rollout.is_own or config.algorithm.is_supervised:
        return [row.task for row in rows]
    if config.data.chat_template:
        return [conversation(row.prompt, config.data) for row in rows]
    return [plain_text(row.prompt, config.data) for row in rows]


def _render(rows: list[PromptRow], config: DataConfig, tokenizer: ModelTokenizer) -> list[str]:
    if not config.chat_template:
        return [plain_text(row.prompt, config) for row in rows]
    return tokenizer.render_conversations([conversation(row.prompt, config) for row in rows])


def check_tokens(rows: Iterable[tuple[PromptRow, Sequence[int]]], config: DataConfig, model_dir: Path) -> None:
    """Refuse tokens that have no embedding in the model; `rows` with their tokens."""
    size = vocabulary_size(model_dir)
    for row, tokens in rows:
        if size is not None and max(tokens) >= size:
            raise ConfigError(
                f"model.path: the tokenizer of {model_dir} gives token {max(tokens)} for "
                f"{row.describe_place(config)}, but the model has {size} tokens (vocab_size in config.json); "
                f"copy the tokenizer that belongs to the model"
            )


def _check_rendering(samples: list[_Sample], config: DataConfig, tokenizer: ModelTokenizer) -> None:
    """Refuse a template that renders at random: a group's prompt would change after a restart."""
    if not config.chat_template:
        return
    again = _render([sample.row for sample in samples], config, tokenizer)
    for sample, text in zip(samples, again, strict=True):
        if sample.text != text:
            raise ConfigError(
                f"{config.key('chat_template')}: the chat template of {tokenizer.model_dir} renders "
                f"{sample.row.describe_place(config)} as {excerpt(sample.text)}, then as {excerpt(text)}; take out "
                f"what it draws at random, since a group must keep its prompt"
            )


def _check_texts(samples: list[_Sample], config: DataConfig, tokenizer: ModelTokenizer) -> None:
    """Refuse a tokenizer that cannot represent the prompts: the model would be asked something else."""
    decoded = tokenizer.decode([sample.tokens for sample in samples])
    for sample, text in zip(samples, decoded, strict=True):
        check_decoded(sample.row, sample.text, text, config, tokenizer.model_dir)


def check_decoded(row: PromptRow, text: str, decoded: str, config: DataConfig, model_dir: Path) -> None:
    """Raise ConfigError if a row's text lost much of itself on the way to tokens and back."""
    given = _characters(text)
    lost, of, what = (given - _characters(decoded)).total(), given.total(), "characters"
    most = MAX_LOST
    if lost <= most * of:
        of, most, what = _num_spaces(text), MAX_LOST_SPACES, "spaces"
        lost = of - _num_spaces(decoded)
    if lost > most * of:
        raise ConfigError(
            f"model.path: the tokenizer of {model_dir} loses {lost} of the {of} {what} of {row.describe_place(config)}:"
            f" {excerpt(text)} comes back as {excerpt(decoded)}; copy the tokenizer that belongs to the model, or "
            f"remove the row"
        )


def _characters(text: str) -> Counter[str]:
    """Count characters, ignoring white space, case and accents, which tokenizers may normalize."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return Counter(char for char in plain if not char.isspace() and not unicodedata.combining(char))


def _num_spaces(text: str) -> int:
    """Count the runs of white space inside of a text."""
    return len(re.findall(r"\s+", text.strip()))


class _Borders:
    """Checks how prompts begin and end, and that some token ends responses (else the constructor raises
    ConfigError)."""

    def __init__(self, tokenizer: ModelTokenizer, config: DataConfig) -> None:
        self._tokenizer, self._config = tokenizer, config
        self._marks = tokenizer.special_marks()
        ends = eos_token_ids(tokenizer.model_dir)
        names = dict(zip(ends, tokenizer.token_names(ends), strict=True))
        self._ends = {token: name for token, name in names.items() if name is not None}
        self._check_ends(names)

    def _check_ends(self, names: dict[int, str | None]) -> None:
        model_dir = self._tokenizer.model_dir
        missing = [token for token, name in names.items() if name is None]
        what = f"eos_token_id {', '.join(map(str, missing))} of {model_dir} is not a token of its tokenizer"
        correct = "correct it in generation_config.json (or config.json, where that has none)"
        if not self._ends:
            raise ConfigError(f"model.path: {what}, so no response would ever end; {correct}")
        if missing:
            logger.warning("model.path: %s, so it ends no response; %s", what, correct)
        meant = self._marks["end"] if self._tokenizer.chat else self._marks["eos"]
        if meant is not None and meant not in self._ends:
            who = "the chat template ends an answer with" if self._tokenizer.chat else "the tokenizer's eos_token is"
            logger.warning(
                "model.path: %s %s, which ends no response here: eos_token_id of %s is %s (%s); unless the "
                "model ends its responses with one of these, add %d in generation_config.json",
                who, self._describe_token(meant), model_dir, ", ".join(map(str, self._ends)),
                ", ".join(self._ends.values()), meant,
            )  # fmt: skip

    def check(self, sample: _Sample) -> None:
        """Refuse a prompt after which no response can begin, and one that begins with two BOS tokens."""
        tokens, bos, config = sample.tokens, self._marks["bos"], self._config
        where, model_dir = sample.row.describe_place(config), self._tokenizer.model_dir
        end = tokens[-1] if tokens[-1] in self._ends else None
        if end is None and config.chat_template:  # many templates write a newline after it
            end = next((token for token, name in self._ends.items() if sample.text.rstrip().endswith(name)), None)
        if end is not None:
            what, advice = self._find_ending(sample, end)
            raise ConfigError(f"{what}, which ends a response, so none could begin; {advice}")
        if bos is not None and list(tokens[:2]) == [bos, bos]:
            who = (
                f"{config.key('chat_template')}: the chat template of {model_dir}"
                if config.chat_template
                else (f"model.path: the tokenizer of {model_dir}, which adds one,")
            )
            raise ConfigError(
                f"{who} begins {where} with two {self._describe_token(bos)}; take one out of it, or of the text"
            )

    def check_texts(self, rows: Sequence[PromptRow]) -> None:
        """Refuse texts that end with an end token, including rows that nobody tokenizes before the start."""
        ends, config = tuple(self._ends.values()), self._config
        for row in rows if not config.chat_template else ():
            text = plain_text(row.prompt, config)
            if text.endswith(ends):
                end = next(token for token, name in self._ends.items() if text.endswith(name))
                raise ending_text(row.describe_place(config), self._describe_token(end))

    def _find_ending(self, sample: _Sample, end: int) -> tuple[str, str]:
        """Return which of template, text and tokenizer ended a prompt, and what to do about it."""
        where, model_dir = sample.row.describe_place(self._config), self._tokenizer.model_dir
        if self._config.chat_template:
            key, token = self._config.key("chat_template"), self._describe_token(end)
            what = f"{key}: the chat template of {model_dir} ends {where} with {token}"
            return what, "have it open the assistant's message where add_generation_prompt is true"
        (own,) = self._tokenizer.encode([sample.text], special=False)
        if own and own[-1] == end:
            raise ending_text(where, self._describe_token(end))
        what = f"model.path: the tokenizer of {model_dir} puts {self._describe_token(end)} behind {where}"
        advice = "take it out of post_processor in tokenizer.json (without that file: set add_eos_token to false)"
        return what, advice

    def warn_of_marks(self, samples: Sequence[_Sample]) -> None:
        """Warn of messages whose text contains special tokens, which only the template should write."""
        found = [
            (sample.row, mark)
            for sample in samples
            if (mark := next((each for each in self._marks["special"] if each in self._row_text(sample.row)), None))
        ]
        warn_of_marks(found, len(samples), self._config)

    def _row_text(self, row: PromptRow) -> str:
        return "\n".join(message["content"] for message in conversation(row.prompt, self._config))

    def _describe_token(self, token: int) -> str:
        return f"{self._tokenizer.token_names([token])[0]} ({token})"
