"""A renderer of the package `renderers` (extra `agents`), behind the protocol of `workers.agents.rendering`."""

import importlib.util
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from asyncflow.errors import ConfigError, one_line
from asyncflow.extras import pip_line
from workers.agents.errors import BadAgentRequest
from workers.agents.messages import Message, Tools, call_id, normalized
from workers.settings.data import TemplateSettings

_HELLO = {"role": "user", "content": "Hello"}


class PackageRenderer:
    """A renderer of the package `renderers` (extra `agents`), by its name there."""

    def __init__(self, tokenizer: Any, name: str, templates: TemplateSettings = TemplateSettings()) -> None:  # noqa: B008
        """Args:
        tokenizer: the model's.
        name: of the renderer.
        templates: what renderers are told besides the messages.

        Raises:
        ConfigError: the package is missing, has no such renderer, or the tokenizer does not fit it.
        """
        if importlib.util.find_spec("renderers") is None:
            raise ConfigError(f"model.renderer: {name!r} needs the package renderers: {pip_line('agents')}")
        from renderers import config_from_name, create_renderer

        try:
            config = config_from_name(name)
            if config is None or name == "default":
                raise ValueError("it never bridges; leave model.renderer out")
            self._renderer = create_renderer(tokenizer, _with_options(config, templates.options))
            if hasattr(self._renderer, "config"):
                self._renderer.config = _at_time(self._renderer.config, templates.time)
            opened, plain = ([*self._ids([_HELLO], prompt)] for prompt in (True, False))
        except Exception as error:  # (a package's, for any name or tokenizer)
            raise ConfigError(f"model.renderer: {name!r} of the package renderers: {one_line(error)}") from error
        self._lock = threading.RLock()
        self._opening = opened[len(plain) :]

    @property
    def stop_ids(self) -> Sequence[int]:
        """See `Renderer`."""
        return tuple(self._renderer.get_stop_token_ids())

    def render(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """See `Renderer`."""
        with self._lock:
            try:
                return self._ids(messages, True, tools)
            except Exception as error:  # (as a template, it may refuse messages in its own way)
                raise BadAgentRequest("messages", f"the renderer fails: {one_line(error)}") from error

    def parse(self, token_ids: Sequence[int]) -> Message:
        """See `Renderer`. Calls that it cannot read stay content."""
        with self._lock:
            parsed = self._renderer.parse_response(list(token_ids), prompt_ids=self._opening)
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        calls: list[dict[str, Any]] = []
        for each in parsed.tool_calls:
            if each.status != "ok" or not each.name:
                message["content"] = f"{message['content']}{each.raw}"
                continue
            given = each.arguments if isinstance(each.arguments, str) else json.dumps(each.arguments or {})
            function = {"name": each.name, "arguments": given}
            calls.append({"id": each.id or call_id(token_ids, len(calls)), "type": "function", "function": function})
        return message | ({"tool_calls": calls} if calls else {})

    def bridge(self, previous_ids: Sequence[int], new_messages: Sequence[Message], tools: Tools) -> list[int] | None:
        """See `Renderer`."""
        before, drawn = self._split(previous_ids)
        with self._lock:
            bridged = self._renderer.bridge_to_next_turn(
                before, drawn, normalized(new_messages, arguments="object"), tools=list(tools) if tools else None
            )
        ids = None if bridged is None else list(bridged.token_ids)
        return ids if ids is not None and ids[: len(previous_ids)] == list(previous_ids) else None

    def _ids(self, messages: Sequence[Message], prompt: bool, tools: Tools = None) -> list[int]:
        plain = normalized(messages, arguments="object")
        return list(
            self._renderer.render_ids(plain, tools=list(tools) if tools else None, add_generation_prompt=prompt)
        )

    def _split(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Part the last prompt from what was drawn: behind the last opening of an assistant's message."""
        size = len(self._opening)
        for at in range(len(ids) - size, -1, -1):
            if list(ids[at : at + size]) == self._opening:
                return list(ids[: at + size]), list(ids[at + size :])
        return list(ids), []


def _at_time(config: Any, template_time: str | None) -> Any:
    """Fix the day that a renderer writes, today's without this."""
    if template_time is None or "conversation_start_date" not in type(config).model_fields:
        return config
    return config.model_copy(update={"conversation_start_date": template_time.partition("T")[0]})


def _with_options(config: Any, options: Mapping[str, Any]) -> Any:
    """Set `data.chat_template_options`, and let a bridge keep earlier reasoning, as the template's bridge does."""
    known = type(config).model_fields
    if unknown := sorted(options.keys() - known.keys()):
        raise ValueError(f"it has no option {unknown[0]!r} (data.chat_template_options); it has {' '.join(known)}")
    kept = {"thinking_retention": "all"} if "thinking_retention" in known else {}
    return type(config)(**kept | dict(options))
