"""Reads a request's JSON. Fields that the gateway does not translate are refused by name, so that no agent trains with
settings that have no effect.

    sampling   temperature, top_p, top_k, min_p, seed: replaced by the run's, with one warning per process
    neutral    values that equal the API's default behavior (`n: 1`, `logit_bias: {}`); null counts as absent, too
    ignored    fields that do not change the answer (`user`, `metadata`, `store`, ...)

docs/agents.md lists them all.
"""

import functools
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from workers.agents.rollout_errors import BadAgentRequest
from workers.agents.turns import Message
from workers.settings.rollout import unusable_stop

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
_IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
_KINDS = {str: "a text", int: "a whole number", bool: "true or false", list: "a list", dict: "an object"}


class Fields:
    """One JSON object, found in the field `name` ("": the body); `end` refuses fields that were not taken."""

    def __init__(self, value: object, name: str = "") -> None:
        if not isinstance(value, dict):
            raise BadAgentRequest(name or "body", "must be an object")
        self._left: dict[str, Any] = {field: held for field, held in value.items() if held is not None}
        self._name = name

    def name(self, field: str) -> str:
        """Return the field's full name, e.g. `tools[0].function`."""
        return f"{self._name}.{field}" if self._name else field

    def take_value(self, field: str, kind: type[T]) -> T | None:
        """Take a field's value, or None if it is absent."""
        value = self._left.pop(field, None)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise BadAgentRequest(self.name(field), f"must be {_KINDS[kind]}")
        return value

    def peek_value(self, field: str, kind: type[T]) -> T | None:
        """Return a field's value if it has this type; it still must be taken."""
        value = self._left.get(field)
        return value if isinstance(value, kind) else None

    def take_required(self, field: str, kind: type[T]) -> T:
        value = self.take_value(field, kind)
        if value is None:
            raise BadAgentRequest(self.name(field), f"is missing; it must be {_KINDS[kind]}")
        return value

    def take_objects(self, field: str) -> "list[Fields]":
        """Take a list of objects; an absent list is empty."""
        return [
            Fields(value, f"{self.name(field)}[{place}]")
            for place, value in enumerate(self.take_value(field, list) or ())
        ]

    def stop_strings(self, field: str) -> tuple[str, ...]:
        """Take a stop string or a list of them."""
        value = self._left.pop(field, None)
        values = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(values, list):
            raise BadAgentRequest(self.name(field), "must be a text or a list of texts")
        for text in values:
            if wrong := unusable_stop(text):
                raise BadAgentRequest(self.name(field), wrong)
        return tuple(values)

    def take_limit(self, field: str) -> int | None:
        value = self.take_value(field, int)
        if value is not None and value < 1:
            raise BadAgentRequest(self.name(field), "must be at least 1")
        return value

    def text(self, field: str, *kinds: str) -> str:
        """Take a content: text, or a list of blocks `{"type": one of kinds, "text": ...}`, which are joined."""
        if self.peek_value(field, list) is None:
            return self.take_value(field, str) or ""
        return "".join(block.block_text(*kinds) for block in self.take_objects(field))

    def block_text(self, *kinds: str) -> str:
        kind = self.take_required("type", str)
        if kind not in kinds:
            raise BadAgentRequest(self.name("type"), f"{kind!r} is not served; contents are {' or '.join(kinds)}")
        text = self.take_required("text", str)
        self.end("cache_control", annotations=[], logprobs=[])
        return text

    def end(self, *ignored: str, **neutral: object) -> None:
        """Refuse fields that were not taken, except `ignored` ones and those that have their `neutral` value."""
        for field, value in self._left.items():
            if field in neutral and value != neutral[field]:
                raise BadAgentRequest(self.name(field), f"must be {neutral[field]!r} here; leave it out")
            if field not in neutral and field not in ignored:
                raise BadAgentRequest(self.name(field), "is not supported in training; leave it out")

    def end_of_body(self, **neutral: object) -> None:
        """`end` for a whole request."""
        if any(field in self._left for field in _SAMPLING):
            warn_of_sampling()
        self.end("model", *_SAMPLING, *_IGNORED, **neutral)


@functools.cache
def warn_of_sampling() -> None:
    """Warn once that requests' sampling settings are overridden."""
    logger.warning(
        "agents set %s; these are ignored in favor of the run's settings (rollout.temperature ...); shown once",
        ", ".join(_SAMPLING),
    )


def function_tool(function: Fields, parameters: str) -> Message:
    """Return a tool in OpenAI's chat format; `parameters` names the field with its JSON schema. `strict` is not
    enforced."""
    tool = {
        "name": function.take_required("name", str),
        "description": function.take_value("description", str),
        "parameters": function.take_value(parameters, dict),
    }
    function.end("strict", "cache_control")
    return {"type": "function", "function": {field: value for field, value in tool.items() if value is not None}}


def tool_call(call_id: str, name: str, arguments: str) -> Mapping[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def one_system_message(messages: list[Message]) -> list[Message]:
    """Join the system messages at the start of a history: most chat templates accept only one."""
    texts: list[str] = []
    for message in messages:
        if message["role"] != "system":
            break
        texts.append(message["content"])
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[len(texts) :]] if texts else messages
