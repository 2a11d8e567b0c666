"""Random conversations with a session, and a log at the engine's door to compare its samples with."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from msgspec.structs import replace

from workers.agents.rendering import TOOL, Renderer
from workers.agents.session import PromptOf, Session
from workers.agents.turns import Message, Tools
from workers.agents.wire import Drawn, SampleTokens


@dataclass(frozen=True)
class Draw:
    """What the engine was asked, and drew. Token k of all draws has log-probability k."""

    prompt_ids: list[int]
    token_ids: list[int]
    first: int


class FakeEngine:
    """Draws at random: words, tool calls, thoughts, byte by byte as no tokenizer would cut them, or any tokens at all.

    Attributes:
        door: all that was drawn.
    """

    def __init__(self, renderer: Renderer, tokenizer: Any, random: Random) -> None:
        self.door: list[Draw] = []
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._random = random
        self._num_tokens = 0

    def draw(self, prompt: PromptOf, *, tools: Tools = None) -> Drawn:
        """Draw a reply, which ends with an end mark or is cut."""
        stops = list(self._renderer.stop_ids)
        ids = self._ids(with_call=bool(tools) and self._random.random() < 0.6)
        ids = [token for token in ids if token not in stops] or [5]
        if self._random.random() < 0.8:
            ids.append(self._random.choice(stops))
        self.door.append(Draw(prompt.ids, ids, self._num_tokens))
        log_probs = [float(self._num_tokens + k) for k in range(len(ids))]
        self._num_tokens += len(ids)
        return Drawn(0, ids, log_probs, [len(self.door)] * len(ids), truncated=False)

    def _ids(self, *, with_call: bool) -> list[int]:
        draw = self._random
        if draw.random() < 0.2:
            return [draw.randrange(len(self._tokenizer)) for _ in range(draw.randrange(1, 20))]
        text = draw.choice(["", "<think>\nlet me see\n</think>\n\n", "<think>cut"]) + "seven times six\n\n is 42 é"
        if with_call:
            arguments = json.dumps({"key": draw.randrange(100), "b": [1.5, None, "x\n"]}, indent=draw.choice([None, 1]))
            call = f'{{"name": "probe_tool", "arguments": {arguments}}}'
            llama = call.replace("arguments", "parameters")
            text = draw.choice(
                [f"So: <tool_call>{call}</tool_call>" * 2, f"[TOOL_CALLS] [{call}]", llama, "<tool_call>{"]
            )
        marks = {"<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "</think>"}
        size = draw.choice([1, 2, 100])
        parts = [text] if any(mark in text for mark in marks) and size == 100 else _cut(text, size)
        return [token for part in parts for token in self._tokenizer.encode(part, add_special_tokens=False)]


def converse(
    session: Session, engine: FakeEngine, random: Random, *, turns: int, append_only: bool, tools: bool
) -> int:
    """Have a conversation, as a client does that gets messages and gives messages; return the number of turns.

    Unless it is `append_only`, it forks, starts sub-agents, forgets, rewrites, and calls by token ids.
    """
    offered = [TOOL] if tools else None
    start: list[Message] = [{"role": "user", "content": f"Question {random.randrange(1000)}?"}]
    if random.random() < 0.5:
        start.insert(0, {"role": "system", "content": "Be brief."})
    talks = [start]
    for _ in range(turns):
        talk = random.choice(talks)
        prompt = session.make_prompt(talk, offered)
        drawn = engine.draw(prompt, tools=offered)
        if random.random() < 0.2:
            drawn = replace(drawn, shown=drawn.token_ids[: random.randrange(len(drawn.token_ids))])
        _, message = session.record_reply(prompt, drawn)
        longer = [*talk, _as_sent_back(message, random)]
        calls = message.get("tool_calls", [])
        for call in calls:
            longer.append({"role": "tool", "tool_call_id": call["id"], "content": str(random.randrange(10**6))})
        if not calls:
            longer.append({"role": "user", "content": random.choice(["And now?", "  Why?\n\n", "é <think> 42"])})
        if append_only or random.random() < 0.6:
            talks.remove(talk)  # else the same request is sent again: a fork
        talks.append(longer)
        if not append_only and random.random() < 0.2:
            talks.append(random.choice([start, longer[:1] + longer[-1:], [{"role": "user", "content": "Sum up."}]]))
        if not append_only and random.random() < 0.2:
            more = session.prompt_of_ids([*prompt.ids, *drawn.token_ids, 7, 8][: random.choice([-2, -1, None])])
            session.record_reply(more, engine.draw(more))
    return session.num_turns


def count_changed(door: Sequence[Draw], samples: Sequence[SampleTokens]) -> int:
    """Return how many drawn tokens are missing in what is trained, are in it twice, or differ there: in themselves, in
    their log-probability or version, or in what stands before them."""
    at_door = {
        draw.first + k: (draw, number) for number, draw in enumerate(door, 1) for k in range(len(draw.token_ids))
    }
    seen, wrong = Counter[int](), 0
    for sample in samples:
        places = [at for at, trained in enumerate(sample.response_mask) if trained]
        assert len(places) == len(sample.log_probs) == len(sample.versions)
        assert len(sample.token_ids) == len(sample.response_mask)
        for at, log_prob, version in zip(places, sample.log_probs, sample.versions, strict=True):
            draw, number = at_door[int(log_prob)]
            k = int(log_prob) - draw.first
            same = sample.token_ids[at] == draw.token_ids[k] and version == number
            here = at == len(draw.prompt_ids) + k
            before = k > 0 or sample.token_ids[:at] == draw.prompt_ids
            wrong += not (same and here and before)
            seen[int(log_prob)] += 1
    return wrong + sum(abs(seen[token] - 1) for token in at_door)


def _as_sent_back(message: Message, random: Random) -> Message:
    """Return a message as clients give it back: without reasoning, and written otherwise."""
    sent: Message = {"role": "assistant", "content": message["content"] or random.choice([None, ""])}
    if sent["content"] and random.random() < 0.3:
        sent["content"] = [{"type": "text", "text": part} for part in _cut(message["content"], 5)]
    if "tool_calls" in message:
        sent["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": _otherwise(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return sent | {"refusal": None}


def _otherwise(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True, indent=2)


def _cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]
