"""What SFT trains of a row: its tokens, and a mask of those that the model shall learn to write. Torch-free.

    prompt and completion    3+5= | 8 <end>                                      text, with an end token behind it
    messages                 <user> 3+5 <end> <assistant> | 8 <end>              by the chat template
    a conversation           ... <assistant> | 8 <end> | <user> ... <assistant> | 9 <end>

Which tokens of a conversation are the assistant's, the template says itself if it has `{% generation %}` blocks.
Otherwise they are what the template writes for the message after `add_generation_prompt`, up to its end token. That
holds only for a template that writes a message in the same way whatever follows it; any other one is refused.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncflow.errors import ConfigError, UserCodeFailed
from workers.calls.pool import CallPool, Entry
from workers.calls.user_function import Callee, excerpt
from workers.data.model_files import eos_token_ids
from workers.data.prompt_rows import (
    CHUNK,
    Message,
    PromptRow,
    ShownPrompt,
    check_decoded,
    check_fit,
    check_left,
    check_tokens,
    conversation,
    plain_text,
    warn_of_long_rows,
    warn_of_marks,
)
from workers.data.tokenizer import load_tokenizer, missing_chat_template
from workers.settings.data import DataConfig

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# What TRL's data call the functions that a conversation may call; passed to the template.
_TOOLS = "tools"


@dataclass(frozen=True)
class TokenizedRow:
    """A row as the model gets it."""

    text: str  # with templates applied
    tokens: Sequence[int]
    mask: Sequence[int] | None = None  # as long as `tokens`, 1: trained; None: a prompt, nothing of it is trained


class SupervisedTokens:
    """Tokenizes rows with completions, with a `transformers` tokenizer."""

    def __init__(self, config: DataConfig, *, model_dir: Path, tokenizer: Any) -> None:
        self._config, self._model_dir, self._tokenizer = config, model_dir, tokenizer
        self._ends = eos_token_ids(model_dir)
        own = tokenizer.eos_token_id
        self._end = own if own in self._ends else self._ends[0]
        self._end_texts = [text for text in tokenizer.convert_ids_to_tokens(list(self._ends)) if text is not None]
        self._special = [str(added) for added in tokenizer.added_tokens_decoder.values() if added.special]
        template = tokenizer.get_chat_template() if config.chat_template else ""
        self._has_blocks = bool(_GENERATION_BLOCK.search(template))

    def tokenize_row(self, row: PromptRow) -> TokenizedRow:
        """Return a row's tokens and mask; the mask has ones, but not at the first token, which nothing predicts.

        Raises ConfigError if nothing is trained, the template cannot tell the assistant's tokens, or tokens of the
        prompt and of the completion cannot be told apart, or the row begins with BOS twice.
        """
        if not self._config.chat_template:
            text, tokens, mask = self._of_texts(row)
        else:
            text, tokens, mask = self._of_messages(row)
        mask[:1] = [0] * len(tokens[:1])
        bos = self._tokenizer.bos_token_id
        if bos is not None and tokens[:2] == [bos, bos]:
            raise ConfigError(
                f"{self._place(row)}: begins with two {self._tokenizer.bos_token}, of which the tokenizer of "
                f"{self._model_dir} or its chat template writes one; take the other out of the text"
            )
        if 1 not in mask:
            advice = "or have the chat template write it" if self._config.chat_template else "or complete it"
            raise ConfigError(
                f"{self._place(row)}: none of its {len(tokens)} tokens is trained, since the completion gives none; "
                f"remove the row, {advice}"
            )
        return TokenizedRow(text, tokens, mask)

    def find_mark(self, row: PromptRow) -> str | None:
        """Return a special token that stands in the text of a row's messages, as if the template had written it."""
        if not self._config.chat_template:
            return None
        text = "\n".join(message["content"] for message in self._messages(row)[1])
        return next((mark for mark in self._special if mark in text), None)

    def _of_texts(self, row: PromptRow) -> tuple[str, list[int], list[int]]:
        assert isinstance(row.completion, str), "messages need a chat template"
        prompt = plain_text(row.prompt, self._config)
        text = prompt + row.completion
        tokens, ((begin, end),) = self._tokens_with_spans(row, text, [(len(prompt), len(text))], special=True)
        tokens = self._with_end(tokens[:end])  # without what the tokenizer puts behind a text
        return text, tokens, [0] * begin + [1] * (len(tokens) - begin)

    def _of_messages(self, row: PromptRow) -> tuple[str, list[int], list[int]]:
        given, messages = self._messages(row)
        if self._has_blocks:
            text, spans = self._marked_spans(row, messages, given)
        else:
            text = self._render(row, messages)
            spans = list(self._assistant_spans(row, messages, given, text))
        tokens, found = self._tokens_with_spans(row, text, spans, special=False)
        mask = [0] * len(tokens)
        for begin, end in found:
            mask[begin:end] = [1] * (end - begin)
        # A model that never sees an end never ends.
        for place in range(1, len(tokens)):
            if tokens[place] in self._ends and mask[place - 1] and tokens[place - 1] not in self._ends:
                mask[place] = 1
        if mask[-1:] == [1]:
            tokens = self._with_end(tokens)
            mask += [1] * (len(tokens) - len(mask))
        return text, tokens, mask

    def _messages(self, row: PromptRow) -> tuple[int, list[Message]]:
        """Return how many messages are given, none of a whole conversation, and all of them."""
        completion = row.completion
        rest = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion or ())
        if row.prompt:
            given = conversation(row.prompt, self._config)
            return len(given), [*given, *rest]
        if self._config.system_prompt is not None and rest[0]["role"] != "system":
            rest.insert(0, {"role": "system", "content": self._config.system_prompt})
        return 0, rest

    def _marked_spans(self, row: PromptRow, messages: list[Message], given: int) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and where in it the template's blocks are, each with the end token right behind it. (Not the
        mask that `apply_chat_template` gives: what it takes for a block's last token differs by version.)"""
        from transformers.utils.chat_template_utils import render_jinja_template

        options = self._options(row)
        template = self._tokenizer.get_chat_template(tools=options.get("tools"))
        with self._template_at(row):
            texts, found = render_jinja_template(
                [messages], chat_template=template, return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map, **options,
            )  # fmt: skip
        text = str(texts[0])
        before = self._render(row, messages[:given], opens=True) if given else ""
        if not text.startswith(before):
            raise self._unlike(row, messages[given - 1])
        spans = []
        for begin, end in found[0]:
            ends = [len(one) for one in self._end_texts if text.startswith(one, end)]
            spans.append((max(begin, len(before)), end + max(ends, default=0)))
        return text, [(begin, end) for begin, end in spans if begin < end]  # earlier answers are not trained

    def _assistant_spans(
        self, row: PromptRow, messages: list[Message], given: int, text: str
    ) -> Iterator[tuple[int, int]]:
        """Yield where in the text the template wrote what the assistant says, its end token included."""
        for place, message in enumerate(messages):
            if place < given or message["role"] != "assistant":
                continue
            until = self._render(row, messages[: place + 1])
            before = self._render(row, messages[:place], opens=True) if place else self._opening(row, until)
            if not (until.startswith(before) and text.startswith(until)):
                raise self._unlike(row, message)
            ends = [until.rfind(end, len(before)) + len(end) for end in self._end_texts if end in until[len(before) :]]
            yield len(before), max(ends, default=len(until))

    def _opening(self, row: PromptRow, greeting: str) -> str:
        """Return what stands before a first message's content; many templates cannot be asked without a message."""
        question: list[Message] = [{"role": "user", "content": "?"}]
        opens = self._render(row, question, opens=True).removeprefix(self._render(row, question))
        return greeting[: greeting.find(opens) + len(opens)] if opens in greeting else ""

    def _unlike(self, row: PromptRow, message: Message) -> ConfigError:
        return ConfigError(
            f"data.chat_template: the chat template of {self._model_dir} writes {self._place(row)} in another way up "
            f"to {excerpt(str(message.get('content')))} than as a whole, so the assistant's tokens cannot be told; "
            f"mark them in the template with {{% generation %}} ... {{% endgeneration %}}, or end each row with the "
            f"message to train"
        )

    def _tokens_with_spans(
        self, row: PromptRow, text: str, spans: Sequence[tuple[int, int]], *, special: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the text's tokens and, for each span of characters, the span of its tokens."""
        borders = sorted({place for span in spans for place in span})
        if getattr(self._tokenizer, "is_fast", False):
            whole = self._tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
            ids, offsets = list(whole["input_ids"]), whole["offset_mapping"]
            found = token_borders(offsets, borders)
            if found is not None and all(
                self._tokenizer(text[:border], add_special_tokens=special)["input_ids"][:count] == ids[:count]
                for border, count in found.items()
                if 0 < count < len(ids) and offsets[count - 1][1] < offsets[count][0]  # whose is what lies between?
            ):
                return ids, [(found[begin], found[end]) for begin, end in spans]
        # A token would span a border: a generating model reads the prompt's own tokens, and so the pieces are tokenized
        # apart.
        pieces = [text[begin:end] for begin, end in zip([0, *borders], [*borders, len(text)], strict=True)]
        tokens: list[int] = []
        places: dict[int, int] = {}
        for number, piece in enumerate(pieces):
            tokens += self._tokenizer(piece, add_special_tokens=special and number == 0)["input_ids"]
            places |= {borders[number]: len(tokens)} if number < len(borders) else {}
        whole_ids = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        if self._tokenizer.decode(tokens) != self._tokenizer.decode(whole_ids):
            raise ConfigError(
                f"{self._place(row)}: the tokenizer of {self._model_dir} makes one token of the prompt's end and the "
                f"completion's begin, and reads them apart as another text; begin the completion with a space, or end "
                f"the prompt with one"
            )
        return tokens, [(places[begin], places[end]) for begin, end in spans]

    def _with_end(self, tokens: Sequence[int]) -> list[int]:
        return [*tokens] if tokens[-1:] and tokens[-1] in self._ends else [*tokens, self._end]

    def _render(self, row: PromptRow, messages: list[Message], *, opens: bool = False) -> str:
        with self._template_at(row):
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=opens, **self._options(row)
                )
            )

    @contextmanager
    def _template_at(self, row: PromptRow) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self._place(row)}: the chat template of {self._model_dir} fails: {error}; correct the row, or the "
                f"template"
            ) from error

    def _options(self, row: PromptRow) -> dict[str, Any]:
        tools = row.fields.get(_TOOLS)
        if isinstance(tools, str) and tools:  # TRL takes them as JSON, too
            try:
                tools = msgspec.json.decode(tools)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{self._place(row)}: {_TOOLS!r} is not a JSON list: {error}; correct it") from error
        if tools and not isinstance(tools, list):
            raise ConfigError(f"{self._place(row)}: {_TOOLS!r} is {tools!r}, and not a list; correct it")
        return {"tools": tools} if tools else {}

    def _place(self, row: PromptRow) -> str:
        return row.describe_place(self._config)


def token_borders(offsets: Sequence[tuple[int, int]], borders: Sequence[int]) -> dict[int, int] | None:
    """Return, by border (a place in the text), how many tokens lie before it; None if a token lies across one.

    `offsets`: where in the text each token begins and ends; what the tokenizer adds by itself is empty, (0, 0). What
    lies between two tokens is taken for the later one's: many tokenizers leave a token's space out of its place.
    """
    found = {}
    for border in borders:
        before = [k for k, (begin, end) in enumerate(offsets) if begin < end <= border]
        count = before[-1] + 1 if before else next((k for k, (_, end) in enumerate(offsets) if end), len(offsets))
        if count < len(offsets) and (offsets[count - 1][1] if count else 0) < border < offsets[count][1]:
            return None
        found[border] = count
    return found


_DEADLINE_S = 60.0  # for one call, i.e. about a chunk of rows


def check_supervised(rows: Sequence[PromptRow], config: DataConfig, *, model_dir: Path) -> ShownPrompt:
    """Check rows before a start, in a child process, which loads the run's tokenizer; return the first one.

    All are checked for `overlong: reject`; otherwise the check stops at the first chunk after which every source has a
    row that fits. Raises ConfigError as `SupervisedTokens` does, and for rows that differ from one rendering to the
    next, are too long, or have tokens that the model lacks.
    """
    settings = {"model_dir": str(model_dir), "data": config.model_dump(mode="json")}
    pool = CallPool(
        Entry("workers.data.supervised_rows:supervised_in_child", settings),
        what=f"data.completion_field: {config.completion_field}",
        limit="the deadline",
        timeout_s=_DEADLINE_S,
        concurrency=1,
    )
    try:
        pool.until_ready()
        return _check(rows, config, model_dir, pool)
    except UserCodeFailed as error:
        raise ConfigError(str(error)) from error
    finally:
        pool.close()


def _check(rows: Sequence[PromptRow], config: DataConfig, model_dir: Path, pool: CallPool) -> ShownPrompt:
    shown, left, num_checked, num_kept = None, set[int](), 0, 0
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start : start + CHUNK]
        made = _ask(pool, chunk)
        kept = [
            (row, tokens)
            for row, (_, tokens, _, _) in zip(chunk, made, strict=True)
            if check_fit(row, len(tokens), config)
        ]
        check_tokens(kept, config, model_dir)
        if shown is None:
            if (again := _ask(pool, chunk)) != made:
                place = next(row for row, one, other in zip(chunk, made, again, strict=True) if one != other)
                raise ConfigError(
                    f"data.chat_template: the chat template of {model_dir} renders {place.describe_place(config)} "
                    f"differently each time; take out what it draws at random"
                )
            warn_of_marks([(row, one[3]) for row, one in zip(chunk, made, strict=True) if one[3]], len(chunk), config)
            text, tokens, mask, _ = made[0]
            shown = ShownPrompt(text, "", len(tokens), num_trained=sum(mask))
        num_checked, num_kept = num_checked + len(chunk), num_kept + len(kept)
        left |= {row.part for row, _ in kept}
        if len(left) == len(config.parts()) and config.overlong != "reject":
            break
    check_left(rows, left, config)
    warn_of_long_rows(num_checked - num_kept, num_checked, len(rows), config)
    assert shown is not None, "there is a first row"
    return shown


def _ask(pool: CallPool, rows: Sequence[PromptRow]) -> list[tuple[str, list[int], list[int], str | None]]:
    """Return text, tokens, mask, and a special token in the messages' text of each row."""
    answer = pool.call_and_wait([asdict(row) for row in rows], on=f"{len(rows)} rows")
    if isinstance(answer, str):
        raise ConfigError(answer)
    return [(text, tokens, mask, mark) for text, tokens, mask, mark in answer]


def supervised_in_child(model_dir: str, data: Mapping[str, Any]) -> Callee:
    """Load the tokenizer in the child process; it answers as `_ask` says, or with what is wrong."""
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # blocks the import, which takes several seconds
    config, path = DataConfig.model_validate(data), Path(model_dir)
    tokenizer = load_tokenizer(path, config.templates)
    if config.chat_template and not tokenizer.chat_template:
        raise missing_chat_template(path)
    made = SupervisedTokens(config, model_dir=path, tokenizer=tokenizer)

    def tokenize(rows: Sequence[Mapping[str, Any]]) -> list[Any] | str:
        try:
            given = [PromptRow(**row) for row in rows]
            found = [made.tokenize_row(row) for row in given]
            for row, one in zip(given, found, strict=True):
                check_decoded(row, one.text, tokenizer.decode(one.tokens), config, path)
        except ConfigError as error:
            return str(error)
        return [(one.text, one.tokens, one.mask, made.find_mark(row)) for row, one in zip(given, found, strict=True)]

    return Callee(tokenize)
