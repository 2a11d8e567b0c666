"""Checks, before a run starts, that its prompts will be accepted and that the tokenizer knows them. Torch-free.

`--dry-run` and the start call it. `workers.data.prompt_dataset` makes the prompts of the run, with transformers. Chat
templates are rendered by the same tokenizer, in a child process; tokens are counted here, with the tokenizer.json that
nearly all models have. For others only the template is checked.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from asyncflow.errors import ConfigError
from workers.calls.user_function import excerpt
from workers.data.config import DataConfig
from workers.data.prompt_rows import PromptRow, check_fit, check_left, check_templates, conversation, plain_text
from workers.data.tokenizer import ChatTemplate
from workers.engines.model_files import load_raw_tokenizer, vocabulary_size

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHUNK = 256
"""Prompts tokenized together. Those of the first chunk also go back to text."""
MAX_LOST = 0.1
"""Share of a prompt's characters that a tokenizer may lose."""


@dataclass(frozen=True)
class ShownPrompt:
    """The first prompt of a file as the model gets it.

    Attributes:
        text: templates included.
        ground_truth: of its row.
        num_tokens: of the text; None: the tokenizer is no tokenizer.json.
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
    rows: list[PromptRow], config: DataConfig, *, model_dir: Path, template: ChatTemplate | None = None
) -> ShownPrompt:
    """Check the chat template, the number of tokens, and whether they are the prompts'; return the first prompt.

    With `overlong: reject` every prompt counts, and for a sampler, which is told how many are left. Else the check ends
    with the first chunk in which one is short enough.

    Args:
        rows: of the file.
        config: how they become prompts.
        model_dir: whose tokenizer.
        template: the model's, if it is open already, and `config.chat_template`: its child takes seconds to start.

    Raises:
        ConfigError: no chat template though `chat_template` is true, a prompt is too long and `overlong` is `reject`,
            all prompts are too long, a prompt gives no tokens or one that the model does not have, or loses more than
            `MAX_LOST` of its characters.
    """
    check_templates(config)
    if template is None and config.chat_template:
        with ChatTemplate(model_dir) as template:
            return _check(rows, config, model_dir, template)
    return _check(rows, config, model_dir, template)


def _check(rows: list[PromptRow], config: DataConfig, model_dir: Path, template: ChatTemplate | None) -> ShownPrompt:
    first, tokenizer = rows[0], load_raw_tokenizer(model_dir)
    if tokenizer is None:
        return ShownPrompt(_render([first], config, template)[0], first.ground_truth, None)
    shown, num_kept, left, all_count = None, 0, set[int](), config.overlong == "reject" or config.sampler is not None
    for chunk in _samples(rows, config, tokenizer, template):
        kept = [sample for sample in chunk if check_fit(sample.row, len(sample.tokens), config)]
        _check_tokens(kept, config, model_dir)
        if shown is None:
            _check_texts(kept, config, tokenizer, model_dir)
            shown = ShownPrompt(chunk[0].text, first.ground_truth, len(chunk[0].tokens))
        num_kept, left = num_kept + len(kept), left | {sample.row.part for sample in kept}
        if len(left) == len(config.parts()) and not all_count:
            break
    check_left(rows, left, config)
    assert shown is not None, "there is a first row"
    return replace(shown, num_kept=num_kept) if all_count else shown


def _samples(
    rows: list[PromptRow], config: DataConfig, tokenizer: "Tokenizer", template: ChatTemplate | None
) -> Iterator[list[_Sample]]:
    """Yield all rows with their texts and tokens, a chunk at a time."""
    rest = iter(rows)
    while chunk := list(islice(rest, CHUNK)):
        texts = _render(chunk, config, template)
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=template is None)
        tokens = (encoding.ids for encoding in encodings)
        yield [_Sample(*parts) for parts in zip(chunk, texts, tokens, strict=True)]


def _render(rows: list[PromptRow], config: DataConfig, template: ChatTemplate | None) -> list[str]:
    if template is None:
        return [plain_text(row.prompt, config) for row in rows]
    return template.render([conversation(row.prompt, config) for row in rows])


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


def _check_texts(samples: list[_Sample], config: DataConfig, tokenizer: "Tokenizer", model_dir: Path) -> None:
    """Refuse a tokenizer that cannot say the prompts: the model would be asked something else."""
    decoded = tokenizer.decode_batch([sample.tokens for sample in samples], skip_special_tokens=False)
    for sample, text in zip(samples, decoded, strict=True):
        given = _characters(sample.text)
        lost = (given - _characters(text)).total()
        if lost > MAX_LOST * given.total():
            raise ConfigError(
                f"model.path: the tokenizer of {model_dir} loses {lost} of the {given.total()} characters of "
                f"{sample.row.where(config)}: {excerpt(sample.text)} comes back as {excerpt(text)}; copy the "
                f"tokenizer that belongs to the model, or remove the row"
            )


def _characters(text: str) -> Counter[str]:
    """Count a text's characters, but for spaces, case and accents: tokenizers that change these know the text."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return Counter(char for char in plain if not char.isspace() and not unicodedata.combining(char))
