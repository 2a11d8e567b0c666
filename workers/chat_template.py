"""Renders the chat template of a model directory without transformers, so that `--dry-run` can count tokens.

Finds and renders as transformers' `apply_chat_template` does, which makes the prompts of a run
(`workers.prompt_dataset`). Templates come with models from strangers: they run in jinja2's sandbox.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from asyncflow.errors import ConfigError
from workers.model_files import TOKENIZER_SETTINGS, read_object

JINJA_FILE = "chat_template.jinja"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Message = Mapping[str, str]


class ChatTemplate:
    """A compiled template with the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, model_dir: Path) -> None:
        """Compile `source`; raises ConfigError when it is not a template."""
        import jinja2
        import jinja2.ext
        import jinja2.nodes
        import jinja2.sandbox

        class Generation(jinja2.ext.Extension):
            """`{% generation %} ... {% endgeneration %}` marks what the model says; here it is its content."""

            tags = {"generation"}  # noqa: RUF012  jinja2 wants a plain set

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return jinja2.nodes.Scope(body, lineno=line)

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
        self._model_dir = model_dir
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"model.path: the chat template of {model_dir} is broken: {error}; repair it") from error

    @staticmethod
    def load(model_dir: Path) -> "ChatTemplate | None":
        """Return the template of a model directory, or None when there is none.

        Raises:
            ConfigError: a file that should hold it cannot be read, or it is not a template.
        """
        file = model_dir / TOKENIZER_SETTINGS
        settings = read_object(file, "the tokenizer's settings") if file.is_file() else {}
        source = _find_source(model_dir, settings)
        if not source:
            return None
        tokens = {name: _text_of(settings[name]) for name in _SPECIAL_TOKENS if settings.get(name)}
        return ChatTemplate(source, tokens, model_dir=model_dir)

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text in front of the model's answer.

        Raises:
            ConfigError: the template refuses the messages (many refuse a system message) or fails.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except Exception as error:
            raise ConfigError(
                f"data.chat_template: the chat template of {self._model_dir} fails: {error}; "
                "leave out what it does not know (a system prompt?), or repair it"
            ) from error


def _find_source(model_dir: Path, settings: Mapping[str, Any]) -> str | None:
    file = model_dir / JINJA_FILE
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"model.path: cannot read {file}: {error}; copy it from the model again") from error
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _text_of(token: Any) -> str:
    """Return a special token's text; files hold it plain or as {"content": ...}."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Stand in for jinja2's filter, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)
