"""Checks, before a run starts, that its prompts will be accepted: their template and their length. Torch-free.

`--dry-run` and the start call it. `workers.prompt_dataset` makes the prompts of the run, with transformers, and has the
last word; the two agree for tokenizers that are a tokenizer.json (nearly all). For others only the template is checked.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from asyncflow.errors import ConfigError
from workers.chat_template import ChatTemplate
from workers.config import DataConfig
from workers.data import PromptRow, check_fit, check_templates, conversation, nothing_fits, plain_text
from workers.model_files import load_raw_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHUNK = 256
"""Prompts tokenized together."""


def check_prompts(rows: list[PromptRow], config: DataConfig, *, model_dir: Path) -> None:
    """Check the chat template and the number of tokens.

    With `overlong: reject` every prompt counts; with `skip` the check ends at the first prompt that is short enough.

    Raises:
        ConfigError: no chat template though `chat_template` is true, a prompt is too long and `overlong` is `reject`,
            all prompts are too long, or a prompt gives no tokens.
    """
    check_templates(config)
    template = ChatTemplate.load(model_dir) if config.chat_template else None
    if config.chat_template and template is None:
        raise missing_chat_template(model_dir)
    if template is not None:
        template.render(conversation(rows[0].prompt, config))
    tokenizer = load_raw_tokenizer(model_dir)
    if tokenizer is None:
        return
    for row, num_tokens in _lengths(rows, config, tokenizer, template):
        if check_fit(row, num_tokens, config) and config.overlong == "skip":
            return
    if config.overlong == "skip":
        raise nothing_fits(len(rows), config)


def missing_chat_template(model_dir: Path) -> ConfigError:
    """Return the error for a tokenizer without a chat template."""
    return ConfigError(f"data.chat_template: the tokenizer of {model_dir} has none; set it to false")


def _lengths(
    rows: list[PromptRow], config: DataConfig, tokenizer: "Tokenizer", template: ChatTemplate | None
) -> Iterator[tuple[PromptRow, int]]:
    """Yield every row with its number of tokens."""
    rest = iter(rows)
    while chunk := list(islice(rest, CHUNK)):
        if template is None:
            texts = [plain_text(row.prompt, config) for row in chunk]
        else:
            texts = [template.render(conversation(row.prompt, config)) for row in chunk]
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=template is None)
        yield from zip(chunk, (len(encoding.ids) for encoding in encodings), strict=True)
