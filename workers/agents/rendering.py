"""Turns conversations into token ids, and drawn ids into messages. Torch-free; needs only the tokenizer.

What the model drew is never tokenized again. The next turn's prompt is the earlier ids, token by token, followed by the
template's text of only the new messages (the bridge):

    render    <|im_start|>user 6*7?<|im_end|> <|im_start|>assistant
    drawn                                                           42<|im_end|>
    bridge    earlier prompt + drawn                                             <|im_start|>user Sure?<|im_end|> ...

So the model keeps seeing what a template would strip from the history (usually reasoning). Renderers are called by
`workers.agents.session`, from any thread.
"""

import importlib.util
import json
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from asyncflow.errors import ConfigError, one_line
from asyncflow.extras import pip_line
from workers.agents.rollout_errors import BadAgentRequest
from workers.agents.turns import Message, Tools, call_id, normalized
from workers.calls.user_function import load_function
from workers.data.model_files import eos_token_ids
from workers.data.tokenizer import load_tokenizer
from workers.settings.data import TemplateSettings

# Parses a reply's text into reasoning, tool calls and content. Pure.
#
# A malformed call stays content, so that the agent can tell the model. A policy may draw anything, and the session
# service parses it in its event loop: the time must be linear in the length of the text.

MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>")
"""Texts that the parser needs; tokenizers may have special tokens for them."""

_OPEN, _CLOSE = MARKS[:2]
_LIST = re.compile(r"\[TOOL_CALLS\]\s*(?=\[)")
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which JSON can escape but no message may contain


class CallForm(StrEnum):
    HERMES = "hermes"
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, at the end."""
    LLAMA = "llama"
    """`{"name": ..., "parameters": {...}}` as the whole reply."""

    @staticmethod
    def of_template(template: str) -> "CallForm":
        """Guess the form from a chat template; Hermes if it knows no tools."""
        if "<tool_call>" in template:
            return CallForm.HERMES
        if "[TOOL_CALLS]" in template:
            return CallForm.MISTRAL
        return CallForm.LLAMA if '"parameters"' in template else CallForm.HERMES


def read_reply(text: str, form: CallForm, *, thinks: bool = False) -> Message:
    """Return the assistant's message for a drawn text (without end marks); its calls have no ids yet. `thinks`: the
    prompt has already opened the reasoning."""
    reasoning, content = _split_reasoning(text, thinks)
    content, calls = _READERS[form](content)
    message: Message = {"role": "assistant", "content": content.strip()}
    if reasoning.strip():
        message["reasoning_content"] = reasoning.strip()
    return message | ({"tool_calls": calls} if calls else {})


def _split_reasoning(text: str, thinks: bool) -> tuple[str, str]:
    begun = text.lstrip()
    if not thinks and not begun.startswith("<think>"):
        return "", text
    reasoning, _, content = begun.removeprefix("<think>").partition("</think>")
    return reasoning, content


def _read_hermes(text: str) -> tuple[str, list[Message]]:
    *closed, last = text.split(_CLOSE)
    kept: list[str] = []
    calls: list[Message] = []
    behind_call = False
    for part in closed:
        part = part.lstrip() if behind_call else part
        content, _, body = part.partition(_OPEN)
        read = _calls(body)
        calls += read
        kept.append(content if read else part + _CLOSE)
        behind_call = bool(read)
    kept.append(last.lstrip() if behind_call else last)
    return "".join(kept), calls


def _read_mistral(text: str) -> tuple[str, list[Message]]:
    found = _LIST.search(text)
    calls = _calls(text[found.end() :]) if found else []
    return text[: found.start()] if found and calls else text, calls


def _read_llama(text: str) -> tuple[str, list[Message]]:
    body = text.strip().removeprefix("<|python_tag|>").lstrip()
    calls = _calls(body) if body.startswith("{") else []
    return "" if calls else text, calls


_READERS: Mapping[CallForm, Callable[[str], tuple[str, list[Message]]]] = {
    CallForm.HERMES: _read_hermes,
    CallForm.MISTRAL: _read_mistral,
    CallForm.LLAMA: _read_llama,
}


def _calls(text: str) -> list[Message]:
    """Return the calls in a JSON text: all of them or, if any is malformed, none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls: list[Message] = []
    for each in value if isinstance(value, list) else [value]:
        name = each.get("name") if isinstance(each, dict) else None
        given = each.get("arguments", each.get("parameters")) if isinstance(each, dict) else None
        if not isinstance(name, str) or not isinstance(given, dict) or _SURROGATE.search(name):
            return []
        function = {"name": name, "arguments": json.dumps(given)}
        calls.append({"type": "function", "function": function})
    return calls


logger = logging.getLogger(__name__)


class Renderer(Protocol):
    """Knows how a model writes conversations. Any thread may call it."""

    @property
    def stop_ids(self) -> Sequence[int]:
        """Tokens that end an assistant's message; the template's own comes first."""

    def render(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return the prompt: the conversation up to where the assistant's next message begins. Raises BadAgentRequest
        if the template refuses the messages."""

    def parse(self, token_ids: Sequence[int]) -> Message:
        """Return the assistant's message (content, tool_calls, reasoning_content) for drawn tokens."""

    def bridge(self, previous_ids: Sequence[int], new_messages: Sequence[Message], tools: Tools) -> list[int] | None:
        """Return the next turn's prompt, which begins with exactly `previous_ids`, or None if that is impossible.

        Args:
            previous_ids: the earlier prompt and what was drawn, possibly cut off before its end mark.
            new_messages: what followed; none is the assistant's.
        """


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Looks something up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
SHAPES = (("user",), ("tool",), ("tool", "tool"), ("tool", "user"))
"""Roles of new messages that `prove` tries."""
_MARK = "qzReplyEndsHereqz"


class TemplateRenderer:
    """Renders with the tokenizer's own chat template.

    A bridge is what the template writes after the assistant's end mark when the new messages follow a dummy
    conversation. Each sequence of roles is first proven on another dummy conversation: there, the same text must follow
    the end mark, tokenize identically on its own, and leave the earlier part unchanged.

    Args:
        tokenizer: from transformers, for this renderer alone: fast tokenizers are not thread-safe.
        stop_ids: tokens that end a response in addition to the tokenizer's end of sequence.

    Raises ConfigError if there is no chat template, or it cannot render a single user message.
    """

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.RLock()
        self._proven: dict[tuple[tuple[str, ...], bool], bool] = {}
        self._takes_tools: bool | None = None
        if not tokenizer.chat_template:
            raise ConfigError(f"model.path: the tokenizer of {tokenizer.name_or_path} has no chat template; add one")
        try:
            opening = self._render_text([_user("x")], None, prompt=True)
        except BadAgentRequest as error:
            raise ConfigError(f"model.path: {error}") from error
        self._thinks = opening.rstrip().endswith("<think>")
        self._call_form = CallForm.of_template(str(tokenizer.chat_template))
        self._stop_ids = self._find_stop_ids(stop_ids)
        names = {mark: tokenizer.decode([mark], skip_special_tokens=False) for mark in self._stop_ids}
        self._stop_texts = [text for text in names.values() if text]
        marks = {tokenizer.convert_tokens_to_ids(mark) for mark in MARKS}
        # Special tokens are not shown, except for those that the parser needs.
        self._hidden = (_special_ids(tokenizer) | set(self._stop_ids)) - marks

    @property
    def stop_ids(self) -> Sequence[int]:
        return self._stop_ids

    def render(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """See `Renderer`; raises ConfigError if there are tools but the template ignores them."""
        if tools:
            self._check_tools()
        return self._encode_text(self._render_text(messages, tools, prompt=True))

    def parse(self, token_ids: Sequence[int]) -> Message:
        shown = [token for token in token_ids if token not in self._hidden]
        with self._lock:
            text = str(self._tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        return read_reply(text, self._call_form, thinks=self._thinks)

    def bridge(self, previous_ids: Sequence[int], new_messages: Sequence[Message], tools: Tools) -> list[int] | None:
        roles = tuple(str(message["role"]) for message in new_messages)
        if not roles or "assistant" in roles or not previous_ids or not self._is_proven(roles, bool(tools)):
            return None
        suffix = self._encode_suffix(new_messages, tools)
        if suffix is None:
            return None
        # A reply that was cut off gets the template's end mark, which is not trained on.
        return [*previous_ids, *(suffix[1:] if previous_ids[-1] in self._stop_ids else suffix)]

    def _encode_suffix(self, new_messages: Sequence[Message], tools: Tools) -> list[int] | None:
        """Return the ids from a dummy reply's end mark on when `new_messages` follow it, if the template allows it."""
        mark = _MARK
        # The mark must not occur in the messages themselves.
        while mark in str(new_messages):
            mark += "z"
        dummies = [_user("x"), _reply(new_messages, mark)]
        try:
            return self._split_at_mark(self._render_text([*dummies, *new_messages], tools, prompt=True), mark)[1]
        except BadAgentRequest:
            return None

    def _split_at_mark(self, text: str, mark: str) -> tuple[str, list[int] | None]:
        """Split a rendered conversation at the end mark of the reply with `mark`: (text before, ids after or None
        without one)."""
        before, found, behind = text.rpartition(mark)
        cuts = [cut for cut in map(behind.find, self._stop_texts) if cut >= 0]
        if not found or not cuts:
            return text, None
        ids = self._encode_text(behind[min(cuts) :])
        return before + mark + behind[: min(cuts)], ids if ids[0] in self._stop_ids else None

    def _is_proven(self, roles: tuple[str, ...], with_tools: bool) -> bool:
        # Runs of one role count like two in a row, so that there are few shapes to prove.
        shape = tuple(role for at, role in enumerate(roles) if at < 2 or roles[at - 2 : at] != (role, role))
        key = shape, with_tools
        with self._lock:
            if key not in self._proven:
                self._proven[key] = self._prove_bridge(*key)
                if not self._proven[key]:
                    logger.warning(
                        "the chat template of %s rewrites the conversation before new messages of %s%s: there each "
                        "turn begins a new sample",
                        self._tokenizer.name_or_path,
                        " and ".join(key[0]),
                        " with tools" if with_tools else "",
                    )
            return self._proven[key]

    def _prove_bridge(self, roles: Sequence[str], with_tools: bool) -> bool:
        tools = [TOOL] if with_tools else None
        asked = [_user("What is 6*7?"), {"role": "assistant", "content": "42."}, _user("And 37*64?")]
        new = dummy_messages(roles)
        try:
            histories = tuple(self._render_text(asked, tools, prompt=prompt) for prompt in (True, False))
            whole = self._render_text([*asked, _reply(new, f"Well, {_MARK}"), *new], tools, prompt=True)
        except BadAgentRequest:
            return False
        first, suffix = self._split_at_mark(whole, _MARK)
        # Earlier messages must render the same whether or not new ones follow.
        if suffix is None or suffix != self._encode_suffix(new, tools) or not whole.startswith(histories):
            return False
        says_all = all(message["content"] in whole[len(first) :] for message in new)
        return says_all and self._encode_text(whole) == [*self._encode_text(first), *suffix]

    def _find_stop_ids(self, given: Sequence[int]) -> tuple[int, ...]:
        """Return the end mark of a dummy reply, then the other tokens that end a response."""
        tokenizer = self._tokenizer
        ends = dict.fromkeys([*given, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])])
        try:
            whole = self._render_text([_user("x"), _reply([], _MARK)], None, prompt=False)
        except BadAgentRequest:
            whole = ""
        behind = self._encode_text(whole.rpartition(_MARK)[2])
        special = ends.keys() | _special_ids(tokenizer)
        own = next((token for token in behind if token in special), None)
        if own is None and not ends:
            raise ConfigError(
                f"model.path: the chat template of {tokenizer.name_or_path} writes no end mark behind the assistant's "
                f"message, and the tokenizer has no eos_token; add one"
            )
        return tuple(dict.fromkeys([*([] if own is None else [own]), *ends]))

    def _check_tools(self) -> None:
        if self._takes_tools is None:
            plain = [_user("x")]
            self._takes_tools = self._render_text(plain, [TOOL], prompt=True) != self._render_text(
                plain, None, prompt=True
            )
        if not self._takes_tools:
            raise ConfigError(
                f"model.path: the chat template of {self._tokenizer.name_or_path} ignores tools, so the model would "
                f"not learn about them; describe them in a system message, or give the model a template that has them"
            )

    def _render_text(self, messages: Sequence[Message], tools: Tools, *, prompt: bool) -> str:
        with self._lock:
            try:
                return str(
                    self._tokenizer.apply_chat_template(
                        normalized(messages, arguments="object"),
                        tools=list(tools) if tools else None,
                        add_generation_prompt=prompt,
                        tokenize=False,
                    )
                )
            except BadAgentRequest:
                raise
            except Exception as error:  # (a template may raise anything)
                where = self._tokenizer.name_or_path
                raise BadAgentRequest("messages", f"the chat template of {where} fails: {one_line(error)}") from error

    def _encode_text(self, text: str) -> list[int]:
        with self._lock:
            legal = text.encode(errors="replace").decode()  # JSON may escape a lone surrogate ("\\ud800")
            return list(self._tokenizer.encode(legal, add_special_tokens=False))


def load_renderer(
    model_path: Path,
    name: str | None,
    templates: TemplateSettings = TemplateSettings(),  # noqa: B008
) -> Renderer:
    """Return the renderer of a model directory.

    `name`: `model.renderer`: a renderer of the package `renderers`; or `module:Class`, called with the tokenizer; None:
    the chat template. Raises ConfigError if there is no such renderer, or the tokenizer or its template is unusable.
    """
    tokenizer = load_tokenizer(model_path, TemplateSettings() if name and ":" not in name else templates)
    if name is None:
        return TemplateRenderer(tokenizer, eos_token_ids(model_path))
    if ":" not in name:
        return PackageRenderer(tokenizer, name, templates)
    made: Callable[[Any], Renderer] = load_function(name, field="model.renderer", arguments=["tokenizer"])
    return made(tokenizer)


def prove(renderer: Renderer, tokenizer: Any, tools: Tools) -> list[str]:
    """Compare bridges with full renders of dummy conversations, for any renderer, at preflight.

    Returns:
        What the renderer cannot do, in words, for a warning. Where it cannot bridge, each turn begins a new sample.

    Raises ConfigError if the template ignores `tools`, no response could begin or end, or a bridge differs from a full
    render.
    """
    asked, missing = [_user("What is 6*7?")], []
    prompt = renderer.render(asked, tools)
    _check_borders(prompt, renderer, tokenizer)
    for roles in SHAPES:
        new = dummy_messages(roles)
        drawn = [*tokenizer.encode("42.", add_special_tokens=False), renderer.stop_ids[0]]
        bridged = renderer.bridge([*prompt, *drawn], new, tools)
        if bridged is None:
            missing.append(f"bridge new messages of {' and '.join(roles)}")
            continue
        try:
            whole = renderer.render([*asked, _reply(new, "42."), *new], tools)
        except BadAgentRequest:  # a template may refuse several calls in one reply
            continue
        added = bridged[len(prompt) + len(drawn) :]
        if bridged[: len(prompt) + len(drawn)] != [*prompt, *drawn] or not added or whole[-len(added) :] != added:
            shown = [tokenizer.decode(ids) for ids in (added, whole[-len(added) :])]
            raise ConfigError(
                f"model.renderer: the bridge of {type(renderer).__name__} writes {shown[0]!r} for new messages of "
                f"{' and '.join(roles)}, where a full render ends with {shown[1]!r}; repair its bridge()"
            )
    return missing + ([] if not tools or _reads_calls(renderer, asked, tools) else ["read tool calls"])


def _check_borders(prompt: Sequence[int], renderer: Renderer, tokenizer: Any) -> None:
    """Refuse prompts after which no response can begin, two BOS tokens, and responses that cannot end."""
    where, bos = tokenizer.name_or_path, tokenizer.bos_token_id
    names = {token: _token_text(tokenizer, token) for token in renderer.stop_ids}
    if not any(names.values()):
        raise ConfigError(
            f"model.path: eos_token_id {', '.join(map(str, names))} of {where} is not a token of its tokenizer, so no "
            f"response would ever end; correct it in generation_config.json"
        )
    said = tokenizer.decode(list(prompt), skip_special_tokens=False).rstrip()
    end = next((text for text in names.values() if text and said.endswith(text)), None)
    if end is not None:
        raise ConfigError(
            f"model.path: the chat template of {where} ends a prompt with {end}, which ends a response, so none could "
            f"begin; have it open the assistant's message where add_generation_prompt is true"
        )
    if bos is not None and list(prompt[:2]) == [bos, bos]:
        raise ConfigError(
            f"model.path: the chat template of {where} begins a prompt with two {tokenizer.bos_token}; take one out"
        )


def _token_text(tokenizer: Any, token: int) -> str:
    return str(tokenizer.convert_ids_to_tokens(token) or "") if token < len(tokenizer) else ""


def _reads_calls(renderer: Renderer, asked: Sequence[Message], tools: Tools) -> bool:
    result = dummy_messages(["tool"])
    try:
        whole = renderer.render([*asked, _reply(result, "42."), *result], tools)
    except BadAgentRequest:
        return False
    drawn = whole[len(renderer.render(asked, tools)) :]
    ended = next((at for at, token in enumerate(drawn) if token in renderer.stop_ids), len(drawn))
    calls = renderer.parse(drawn[:ended]).get("tool_calls", [])
    return [call["function"]["name"] for call in calls] == ["probe_tool"]


def dummy_messages(roles: Sequence[str]) -> list[Message]:
    """Return messages with these roles that may follow a reply."""
    return [
        {"role": role, "content": f"A{at} b: {{1}}"} | ({"tool_call_id": call_id([7], at)} if role == "tool" else {})
        for at, role in enumerate(roles)
    ]


def _special_ids(tokenizer: Any) -> set[int]:
    # `all_special_ids` lacks most of them.
    return {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _reply(followers: Sequence[Message], content: str) -> Message:
    """Return a reply that `followers` may follow: with one call per tool message."""
    arguments = json.dumps({"key": content})
    calls = [
        {
            "id": message.get("tool_call_id") or call_id([0], at),
            "type": "function",
            "function": {"name": message.get("name") or "probe_tool", "arguments": arguments},
        }
        for at, message in enumerate(followers)
        if message["role"] == "tool"
    ]
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


# Renderers of the package `renderers` (extra `agents`) behind the `Renderer` protocol.

_HELLO = {"role": "user", "content": "Hello"}


class PackageRenderer:
    """A renderer of the package `renderers` (extra `agents`), by its name there. Raises ConfigError if the package is
    missing, has no such renderer, or does not support the tokenizer."""

    def __init__(self, tokenizer: Any, name: str, templates: TemplateSettings = TemplateSettings()) -> None:  # noqa: B008
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
            opened, plain = ([*self._render_ids([_HELLO], prompt)] for prompt in (True, False))
        except Exception as error:  # (the package may raise anything)
            raise ConfigError(f"model.renderer: {name!r} of the package renderers: {one_line(error)}") from error
        self._lock = threading.RLock()
        self._opening = opened[len(plain) :]

    @property
    def stop_ids(self) -> Sequence[int]:
        return tuple(self._renderer.get_stop_token_ids())

    def render(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        with self._lock:
            try:
                return self._render_ids(messages, True, tools)
            except Exception as error:  # (like a template, it may raise anything)
                raise BadAgentRequest("messages", f"the renderer fails: {one_line(error)}") from error

    def parse(self, token_ids: Sequence[int]) -> Message:
        with self._lock:
            parsed = self._renderer.parse_response(list(token_ids), prompt_ids=self._opening)
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        calls: list[dict[str, Any]] = []
        for each in parsed.tool_calls:
            # A malformed call stays content, so that the agent can tell the model.
            if each.status != "ok" or not each.name:
                message["content"] = f"{message['content']}{each.raw}"
                continue
            given = each.arguments if isinstance(each.arguments, str) else json.dumps(each.arguments or {})
            function = {"name": each.name, "arguments": given}
            calls.append({"id": each.id or call_id(token_ids, len(calls)), "type": "function", "function": function})
        return message | ({"tool_calls": calls} if calls else {})

    def bridge(self, previous_ids: Sequence[int], new_messages: Sequence[Message], tools: Tools) -> list[int] | None:
        before, drawn = self._split_at_opening(previous_ids)
        with self._lock:
            bridged = self._renderer.bridge_to_next_turn(
                before, drawn, normalized(new_messages, arguments="object"), tools=list(tools) if tools else None
            )
        ids = None if bridged is None else list(bridged.token_ids)
        return ids if ids is not None and ids[: len(previous_ids)] == list(previous_ids) else None

    def _render_ids(self, messages: Sequence[Message], prompt: bool, tools: Tools = None) -> list[int]:
        plain = normalized(messages, arguments="object")
        return list(
            self._renderer.render_ids(plain, tools=list(tools) if tools else None, add_generation_prompt=prompt)
        )

    def _split_at_opening(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Split ids into the last prompt and what was drawn, after the last opening of an assistant's message."""
        size = len(self._opening)
        for at in range(len(ids) - size, -1, -1):
            if list(ids[at : at + size]) == self._opening:
                return list(ids[: at + size]), list(ids[at + size :])
        return list(ids), []


def _at_time(config: Any, template_time: str | None) -> Any:
    """Fix the date that a renderer writes, which defaults to today."""
    if template_time is None or "conversation_start_date" not in type(config).model_fields:
        return config
    return config.model_copy(update={"conversation_start_date": template_time.partition("T")[0]})


def _with_options(config: Any, options: Mapping[str, Any]) -> Any:
    """Apply `data.chat_template_options`."""
    known = type(config).model_fields
    if unknown := sorted(options.keys() - known.keys()):
        raise ValueError(f"it has no option {unknown[0]!r} (data.chat_template_options); it has {' '.join(known)}")
    # A bridge keeps earlier reasoning, as the template's bridge does.
    kept = {"thinking_retention": "all"} if "thinking_retention" in known else {}
    return type(config)(**kept | dict(options))
