"""Renders the chat template of a model directory in a child process, by the tokenizer that makes the prompts of a run
(`workers.data.prompt_dataset`). So `--dry-run` counts what the model will see, and the launcher stays without torch.

Templates come with models from strangers. Transformers runs them in jinja2's sandbox; one that never ends is killed.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from asyncflow.errors import ConfigError, UserCodeFailed
from workers.calls.callee import Callee
from workers.calls.pool import CallPool, Entry
from workers.data.tokenizer import load_tokenizer

Conversation = list[dict[str, str]]
_DEADLINE_S = 60.0
"""Of one call, which renders a chunk of prompts."""


class ChatTemplate:
    """The template of a model directory. Use it as a context manager: leaving it ends the child."""

    def __init__(self, model_dir: Path) -> None:
        """Begin to start the child."""
        self._pool = CallPool(
            Entry("workers.data.chat_template:renderer", {"model_dir": str(model_dir)}),
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
