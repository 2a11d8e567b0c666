"""Checks, before a run starts, that its prompts will be accepted, that the tokenizer knows them, and that a response
can begin behind them and end. Torch-free.

`--dry-run` and the start call it. `workers.data.prompt_dataset` makes the prompts of the run; the tokenizer is the same
(`workers.data.tokenizer`), so what is checked and shown is what the model gets.
"""

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from asyncflow.errors import ConfigError
from workers.calls.user_function import excerpt
from workers.data.model_files import eos_token_ids, vocabulary_size
from workers.data.prompt_rows import (
    PromptRow,
    check_fit,
    check_left,
    check_templates,
    conversation,
    ending_text,
    plain_text,
)
from workers.data.tokenizer import ModelTokenizer
from workers.settings.data import DataConfig

CHUNK = 256
"""Prompts tokenized together. Those of the first chunk also go back to text."""
MAX_LOST = 0.1
"""Share of a prompt's characters that a tokenizer may lose."""
MAX_LOST_SPACES = 0.5
"""Share of the places with spaces that it may lose: some write several as one, or none at an end."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShownPrompt:
    """The first prompt of a file as the model gets it.

    Attributes:
        text: templates included.
        ground_truth: of its row.
        num_tokens: of the text; None: a rollout of the user's makes its own.
        num_kept: prompts of the file that are short enough; None: not all were looked at.
    """

    text: str
    ground_truth: str
    num_tokens: int | None
    num_kept: int | None = None


@dataclass(frozen=True)
class _Sample:
    row: PromptRow
    text: str
    tokens: Sequence[int]


def check_prompts(
    rows: list[PromptRow], config: DataConfig, *, model_dir: Path, tokenizer: ModelTokenizer | None = None
) -> ShownPrompt:
    """Check the chat template, the number of tokens, and whether they are the prompts'; return the first prompt.

    With `overlong: reject` every prompt counts, and for a sampler, which is told how many are left. Else the check ends
    with the first chunk in which one is short enough.

    Args:
        rows: of the file.
        config: how they become prompts.
        model_dir: whose tokenizer.
        tokenizer: the model's, if it is open already: its child takes a second to start.

    Raises:
        ConfigError: no chat template though `chat_template` is true, one that renders the same messages in two ways, a
            prompt is too long and `overlong` is `reject`, all prompts are too long, a prompt gives no tokens or one
            that the model does not have, loses characters or spaces, ends with a token that ends responses or begins
            with the first token twice, or no response can end.
    """
    check_templates(config)
    if tokenizer is None:
        with ModelTokenizer(model_dir, chat=config.chat_template, templates=config.templates) as tokenizer:
            return _check(rows, config, tokenizer)
    return _check(rows, config, tokenizer)


def check_ends(config: DataConfig, tokenizer: ModelTokenizer) -> None:
    """Check, where no prompt is there yet, that a response can end.

    Raises:
        ConfigError: it cannot.
    """
    _Borders(tokenizer, config)


def _check(rows: list[PromptRow], config: DataConfig, tokenizer: ModelTokenizer) -> ShownPrompt:
    first, borders = rows[0], _Borders(tokenizer, config)
    shown, num_kept, left, all_count = None, 0, set[int](), config.overlong == "reject" or config.sampler is not None
    for chunk in _samples(rows, config, tokenizer):
        kept = [sample for sample in chunk if check_fit(sample.row, len(sample.tokens), config)]
        _check_tokens(kept, config, tokenizer.model_dir)
        if shown is None:
            _check_rendering(chunk, config, tokenizer)
            _check_texts(kept, config, tokenizer)
            borders.warn_of_marks(kept)
            shown = ShownPrompt(chunk[0].text, first.ground_truth, len(chunk[0].tokens))
        for sample in kept:
            borders.check(sample)
        num_kept, left = num_kept + len(kept), left | {sample.row.part for sample in kept}
        if len(left) == len(config.parts()) and not all_count:
            break
    borders.check_texts(rows)
    check_left(rows, left, config)
    assert shown is not None, "there is a first row"
    return replace(shown, num_kept=num_kept) if all_count else shown


def _samples(rows: list[PromptRow], config: DataConfig, tokenizer: ModelTokenizer) -> Iterator[list[_Sample]]:
    """Yield all rows with their texts and tokens, a chunk at a time."""
    rest = iter(rows)
    while chunk := list(islice(rest, CHUNK)):
        texts = _render(chunk, config, tokenizer)
        tokens = tokenizer.encode(texts, special=not config.chat_template)
        yield [_Sample(*parts) for parts in zip(chunk, texts, tokens, strict=True)]


def _render(rows: list[PromptRow], config: DataConfig, tokenizer: ModelTokenizer) -> list[str]:
    if not config.chat_template:
        return [plain_text(row.prompt, config) for row in rows]
    return tokenizer.render([conversation(row.prompt, config) for row in rows])


def _check_tokens(samples: list[_Sample], config: DataConfig, model_dir: Path) -> None:
    """Refuse tokens for which the model has no embedding."""
    size = vocabulary_size(model_dir)
    for sample in samples:
        if size is not None and max(sample.tokens) >= size:
            raise ConfigError(
                f"model.path: the tokenizer of {model_dir} gives token {max(sample.tokens)} for "
                f"{sample.row.where(config)}, but the model has {size} tokens (vocab_size in config.json); copy "
                f"the tokenizer that belongs to the model"
            )


def _check_rendering(samples: list[_Sample], config: DataConfig, tokenizer: ModelTokenizer) -> None:
    """Refuse a template that draws: a group would have another prompt after a restart."""
    if not config.chat_template:
        return
    again = _render([sample.row for sample in samples], config, tokenizer)
    for sample, text in zip(samples, again, strict=True):
        if sample.text != text:
            raise ConfigError(
                f"data.chat_template: the chat template of {tokenizer.model_dir} renders "
                f"{sample.row.where(config)} as {excerpt(sample.text)}, then as {excerpt(text)}; take out what it "
                f"draws at random, since a group must keep its prompt"
            )


def _check_texts(samples: list[_Sample], config: DataConfig, tokenizer: ModelTokenizer) -> None:
    """Refuse a tokenizer that cannot say the prompts: the model would be asked something else."""
    decoded = tokenizer.decode([sample.tokens for sample in samples])
    for sample, text in zip(samples, decoded, strict=True):
        given = _characters(sample.text)
        lost, of, what = (given - _characters(text)).total(), given.total(), "characters"
        most = MAX_LOST
        if lost <= most * of:
            of, most, what = _num_spaces(sample.text), MAX_LOST_SPACES, "spaces"
            lost = of - _num_spaces(text)
        if lost > most * of:
            raise ConfigError(
                f"model.path: the tokenizer of {tokenizer.model_dir} loses {lost} of the {of} {what} of "
                f"{sample.row.where(config)}: {excerpt(sample.text)} comes back as {excerpt(text)}; copy the "
                f"tokenizer that belongs to the model, or remove the row"
            )


def _characters(text: str) -> Counter[str]:
    """Count a text's characters, but for spaces, case and accents: tokenizers that change these know the text."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return Counter(char for char in plain if not char.isspace() and not unicodedata.combining(char))


def _num_spaces(text: str) -> int:
    """Count the places where spaces or lines part what a text says."""
    return len(re.findall(r"\s+", text.strip()))


class _Borders:
    """Whether a response can begin behind a prompt, and end: how prompts begin and end, and what ends responses."""

    def __init__(self, tokenizer: ModelTokenizer, config: DataConfig) -> None:
        """Look at the tokens that end responses.

        Raises:
            ConfigError: the tokenizer has none of them.
        """
        self._tokenizer, self._config = tokenizer, config
        self._marks = tokenizer.marks()
        ends = eos_token_ids(tokenizer.model_dir)
        names = dict(zip(ends, tokenizer.names(ends), strict=True))
        self._ends = {token: name for token, name in names.items() if name is not None}
        self._check_ends(names)

    def _check_ends(self, names: dict[int, str | None]) -> None:
        model_dir = self._tokenizer.model_dir
        missing = [token for token, name in names.items() if name is None]
        what = f"eos_token_id {', '.join(map(str, missing))} of {model_dir} is no token of its tokenizer"
        correct = "correct it in generation_config.json (or config.json, where that has none)"
        if not self._ends:
            raise ConfigError(f"model.path: {what}, so no response would ever end; {correct}")
        if missing:
            logger.warning("model.path: %s, so it ends no response; %s", what, correct)
        meant = self._marks["end"] if self._tokenizer.chat else self._marks["eos"]
        if meant is not None and meant not in self._ends:
            who = "the chat template ends an answer with" if self._tokenizer.chat else "the tokenizer's eos_token is"
            logger.warning(
                "model.path: %s %s, which ends no response here: eos_token_id of %s is %s (%s); unless that is what "
                "the model says at an end, add %d in generation_config.json",
                who, self._named(meant), model_dir, ", ".join(map(str, self._ends)), ", ".join(self._ends.values()),
                meant,
            )  # fmt: skip

    def check(self, sample: _Sample) -> None:
        """Refuse a prompt behind which there is nothing to say, and one that begins twice."""
        tokens, bos, config = sample.tokens, self._marks["bos"], self._config
        where, model_dir = sample.row.where(config), self._tokenizer.model_dir
        end = tokens[-1] if tokens[-1] in self._ends else None
        if end is None and config.chat_template:  # many write a line's end behind it
            end = next((token for token, name in self._ends.items() if sample.text.rstrip().endswith(name)), None)
        if end is not None:
            what, advice = self._ending(sample, end)
            raise ConfigError(f"{what}, which ends a response, so none could begin; {advice}")
        if bos is not None and list(tokens[:2]) == [bos, bos]:
            who = (
                f"data.chat_template: the chat template of {model_dir}"
                if config.chat_template
                else (f"model.path: the tokenizer of {model_dir}, which adds one,")
            )
            raise ConfigError(f"{who} begins {where} with two {self._named(bos)}; take one out of it, or of the text")

    def check_texts(self, rows: Sequence[PromptRow]) -> None:
        """Refuse texts that end themselves, also of rows that nobody tokenizes before the start."""
        ends, config = tuple(self._ends.values()), self._config
        for row in rows if not config.chat_template else ():
            text = plain_text(row.prompt, config)
            if text.endswith(ends):
                end = next(token for token, name in self._ends.items() if text.endswith(name))
                raise ending_text(row.where(config), self._named(end))

    def _ending(self, sample: _Sample, end: int) -> tuple[str, str]:
        """Say which of template, text and tokenizer put an end to a prompt, and what to do."""
        where, model_dir = sample.row.where(self._config), self._tokenizer.model_dir
        if self._config.chat_template:
            what = f"data.chat_template: the chat template of {model_dir} ends {where} with {self._named(end)}"
            return what, "have it open the assistant's message where add_generation_prompt is true"
        (own,) = self._tokenizer.encode([sample.text], special=False)
        if own and own[-1] == end:
            raise ending_text(where, self._named(end))
        what = f"model.path: the tokenizer of {model_dir} puts {self._named(end)} behind {where}"
        advice = "take it out of post_processor in tokenizer.json (without that file: set add_eos_token to false)"
        return what, advice

    def warn_of_marks(self, samples: Sequence[_Sample]) -> None:
        """Tell of messages whose text has what only the template should write."""
        found = [
            (sample, mark)
            for sample in samples
            if (mark := next((each for each in self._marks["special"] if each in self._said(sample.row)), None))
        ]
        if found:
            sample, mark = found[0]
            logger.warning(
                "data: the messages of %d of the first %d prompts hold special tokens in their text, %s of %s first; "
                "the model takes them for marks of the template",
                len(found), len(samples), mark, sample.row.where(self._config),
            )  # fmt: skip

    def _said(self, row: PromptRow) -> str:
        return "\n".join(message["content"] for message in conversation(row.prompt, self._config))

    def _named(self, token: int) -> str:
        return f"{self._tokenizer.names([token])[0]} ({token})"
