"""Loads the tokenizer of a model directory, as cheaply as its files allow; decodes, and renders chat templates."""

import json
import os
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

from asyncflow.errors import ConfigError, UserCodeFailed
from workers.calls.pool import CallPool, Entry
from workers.calls.user_function import Callee

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


Conversation = list[dict[str, str]]
_DEADLINE_S = 60.0
"""Of one call, which renders a chunk of prompts."""


class ChatTemplate:
    """The chat template of a model directory, rendered in a child process by the tokenizer that makes a run's prompts
    (`workers.data.prompt_dataset`). So `--dry-run` counts what the model will see, and the launcher has no torch.

    Templates come with models from strangers. Transformers runs them in jinja2's sandbox; one that never ends is
    killed. Use it as a context manager: leaving it ends the child.
    """

    def __init__(self, model_dir: Path) -> None:
        """Begin to start the child."""
        self._pool = CallPool(
            Entry("workers.data.tokenizer:renderer", {"model_dir": str(model_dir)}),
            what=f"data.chat_template: the chat template of {model_dir}",
            limit="the deadline",
            timeout_s=_DEADLINE_S,
            concurrency=1,
        )

    def __enter__(self) -> "ChatTemplate":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()

    def render(self, conversations: Sequence[Conversation]) -> list[str]:
        """Return, of each conversation, the text in front of the model's response.

        Raises:
            ConfigError: the model has no tokenizer or no template; the template is broken, refuses the messages (many
                refuse a system message), or takes too long.
        """
        try:
            self._pool.until_ready()
            rendered = self._pool.call(conversations, on=f"{len(conversations)} prompts")
        except UserCodeFailed as error:
            raise ConfigError(str(error)) from error
        if isinstance(rendered, str):
            raise ConfigError(rendered)
        return list(rendered)


def missing_chat_template(model_dir: Path) -> ConfigError:
    """Return the error for a tokenizer without a chat template."""
    return ConfigError(f"data.chat_template: the tokenizer of {model_dir} has none; set it to false")


def renderer(model_dir: str) -> Callee:
    """Load the tokenizer, in the child; what it makes is a list of texts, or what is wrong with the template.

    Raises:
        ConfigError: there is no tokenizer, or it has no template.
    """
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # not to be imported: that takes several seconds
    tokenizer = load_tokenizer(Path(model_dir))
    if not tokenizer.chat_template:
        raise missing_chat_template(Path(model_dir))

    def render(conversations: Sequence[Conversation]) -> list[str] | str:
        from jinja2 import TemplateSyntaxError

        try:
            return [
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                for messages in conversations
            ]
        except TemplateSyntaxError as error:
            return f"model.path: the chat template of {model_dir} is broken: {error}; repair it"
        except Exception as error:  # noqa: BLE001 (a stranger's template raises what it likes)
            advice = "leave out what it does not know (a system prompt?), or repair it"
            return f"data.chat_template: the chat template of {model_dir} fails: {error}; {advice}"

    return Callee(render)
