"""Loads the tokenizer of a model directory, as cheaply as its files allow; decodes with it."""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from asyncflow.errors import ConfigError

GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Tokenizer classes that are tokenizer.json and nothing more; `AutoTokenizer` would take ten times as long."""


def load_tokenizer(model_dir: Path) -> Any:
    """Return the transformers tokenizer in `model_dir`; never asks the network.

    Raises:
        ConfigError: there is none, or transformers cannot read it.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loader: Any = PreTrainedTokenizerFast if _is_generic(model_dir) else AutoTokenizer
    try:
        return loader.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"model.path: cannot load the tokenizer of {model_dir}: {reason}") from error


class TextDecoder:
    """Turns tokens into text without special tokens. Any thread may call it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._prompt = lru_cache(maxsize=4096)(self._decode)

    def prompt(self, tokens: Sequence[int]) -> str:
        """Return a prompt's text; all responses of a group ask for the same one."""
        return self._prompt(tuple(tokens))

    def response(self, tokens: Sequence[int]) -> str:
        """Return a response's text."""
        return self._decode(tokens)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def _is_generic(model_dir: Path) -> bool:
    settings = model_dir / "tokenizer_config.json"
    if not settings.is_file() or not (model_dir / "tokenizer.json").is_file():
        return False
    try:
        return json.loads(settings.read_bytes()).get("tokenizer_class") in GENERIC_CLASSES
    except ValueError as error:
        raise ConfigError(f"model.path: {settings} is malformed JSON: {error}; copy it from the model again") from error
