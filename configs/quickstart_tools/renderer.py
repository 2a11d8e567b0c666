"""How the quickstart with tools writes a conversation in tokens (`model.renderer`). Torch-free.

    turn 1   <user>37*64<asst>           the policy draws   <call>37*64<eos>
    turn 2   ... <tool>2368<asst>        the policy draws   2368<eos>

The model knows its one tool, `multiply`, without being told: a prompt does not list it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncflow.errors import ConfigError

Message = Mapping[str, Any]
"""As OpenAI's chat API has it."""

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
MARKS = {"system": "<sys>", "user": "<user>", "assistant": "<asst>", "tool": "<tool>"}
"""Begins a message, by role."""
CALL = "<call>"
CHARACTERS = "*0123456789"
VOCABULARY = {token: i for i, token in enumerate((PAD, EOS, UNK, *MARKS.values(), CALL, *CHARACTERS))}
TOOL = "multiply"
_TOKENS = tuple(VOCABULARY)
_CALL = re.compile(rf"{CALL}(\d+)\*(\d+)")


class CalculatorRenderer:
    """Writes conversations in tokens, and reads what the policy drew.

    Every message stands by itself, so a conversation that goes on begins with all tokens that were there before.
    """

    stop_ids = (VOCABULARY[EOS],)

    def __init__(self, tokenizer: object = None) -> None:
        """Take the model's tokenizer, which is not needed: a token is a mark or one character."""

    def render(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> list[int]:
        """Return a conversation's tokens, up to the mark behind which the policy replies.

        Raises:
            ConfigError: another tool than `multiply`, which the model could not call.
        """
        for name in (tool["function"]["name"] for tool in tools or ()):
            if name != TOOL:
                raise ConfigError(f"rollout.tools: this model can call {TOOL} only, not {name}; remove it")
        return [*(token for message in messages for token in _message(message)), VOCABULARY[MARKS["assistant"]]]

    def parse(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return what the policy drew as a message. A call that is cut short, or malformed, is text."""
        text = "".join(_TOKENS[token] for token in token_ids)
        if (call := _CALL.fullmatch(text.removesuffix(EOS))) is None or not text.endswith(EOS):
            return {"role": "assistant", "content": text.removesuffix(EOS)}
        arguments = json.dumps({"a": int(call[1]), "b": int(call[2])})
        function = {"name": TOOL, "arguments": arguments}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
        }

    def bridge(
        self, previous_ids: Sequence[int], new_messages: Sequence[Message], tools: Sequence[Message] | None = None
    ) -> list[int]:
        """Return the next prompt's tokens: an earlier prompt and what was drawn behind it, as they are, and more."""
        end = [] if previous_ids[-1] in self.stop_ids else list(self.stop_ids)
        return [*previous_ids, *end, *self.render(new_messages, tools)]


def encode(text: str) -> list[int]:
    """Return a text's tokens, one a character; a run of characters that the model does not know is one `<unk>`."""
    known = re.sub(rf"[^{re.escape(CHARACTERS)}]+", "?", text)
    return [VOCABULARY.get(character, VOCABULARY[UNK]) for character in known]


def _message(message: Message) -> list[int]:
    tokens = [VOCABULARY[MARKS[message["role"]]], *encode(message.get("content") or "")]
    for call in message.get("tool_calls") or ():
        numbers = re.findall(r"\d+", call["function"]["arguments"])
        tokens += [VOCABULARY[CALL], *encode("*".join(numbers))]
    if message["role"] == "assistant":
        tokens.append(VOCABULARY[EOS])
    return tokens
