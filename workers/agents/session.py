"""The calls of one rollout as a tree of tokens. Pure: no engine, no clock; for one thread.

A node is one call of the model: the ids that its prompt adds to its parent's, and what was drawn.

    prompt p1 | drawn d1 --- tool result t | drawn d2          appended: p1 d1 t d2 is one sample
                        \\-- tool result t | drawn d3           the same request again: a fork
    prompt p4 | drawn d4                                       a sub-agent, or a rewritten history: another tree

Every path from a root to a leaf is a sample, and each drawn token is trained on once: in the first sample that has it.
Ids from the engine are only ever copied.
"""

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from workers.agents.rendering import Renderer
from workers.agents.rollout_errors import BadAgentRequest
from workers.agents.turns import Message, Tools, call_id, canonical, normalized
from workers.agents.wire import Drawn, SampleTokens


@dataclass(frozen=True)
class PromptOf:
    """A call that may be sent to the engine."""

    ids: list[int]  # the whole prompt
    parent: int | None  # the node that it extends (`ids` begin with all ids of that node); None: a new sample begins
    seed: int  # for the engine's random numbers
    history: bytes | None = None  # key of the conversation before the reply; None: a call by token ids


@dataclass
class _Node:
    parent: int | None
    prompt_ids: list[int]
    drawn: Drawn
    children: list[int] = field(default_factory=list)
    num_extended: int = 0


class Session:
    """Records the calls of one rollout.

        make_prompt(messages) -> the engine draws -> record_reply(prompt, drawn) ... collect_samples()

    Attributes:
        num_turns: recorded calls.
        num_bridge_failures: prompts that follow a recorded reply, but had to be rendered from scratch.
    """

    def __init__(self, renderer: Renderer, *, seed: int) -> None:
        self.num_turns = 0
        self.num_bridge_failures = 0
        self._renderer = renderer
        self._seed = seed
        self._nodes: list[_Node] = []
        self._roots: list[int] = []
        self._replies: dict[bytes, list[int]] = {}
        self._asked: Counter[bytes] = Counter()

    def make_prompt(self, messages: Sequence[Message], tools: Tools = None, replies: Collection[int] = ()) -> PromptOf:
        """Return the prompt of a conversation.

        It extends the longest recorded history that these messages begin with. A new conversation, or one where a
        bridge is impossible, is rendered from scratch. Raises BadAgentRequest if a message is unusable, the last is the
        assistant's, or the template refuses them.
        """
        messages = normalized(messages)
        if messages and messages[-1]["role"] == "assistant":
            raise BadAgentRequest(
                "messages", "the last one is the assistant's; end with a message that the policy should answer"
            )
        histories, goes_on = _histories(messages, tools), False
        # The longest known history first; shorter ones are not tried.
        for end in range(len(messages) - 1, 0, -1):
            nodes = self._replies.get(histories[end])
            if nodes is None:
                continue
            # Several nodes can have the same history (the same request drawn twice): a chat goes on with its own,
            # whose reward it may know; otherwise spread follow-ups over them.
            node = min(nodes, key=lambda each: (each not in replies, self._nodes[each].num_extended))
            ids = self._renderer.bridge(self.node_token_ids(node), messages[end:], tools)
            if ids is not None:
                self._nodes[node].num_extended += 1
                return PromptOf(ids, node, self._next_seed(ids), histories[-1])
            goes_on = True
            break
        ids = self._renderer.render(messages, tools)
        # Even a fresh rendering may begin with recorded tokens.
        parent = self._extended_by(ids)
        self.num_bridge_failures += int(goes_on and parent is None)
        return PromptOf(ids, parent, self._next_seed(ids), histories[-1])

    def prompt_of_ids(self, token_ids: Sequence[int]) -> PromptOf:
        """Return token ids as a prompt; it extends the longest recorded path that they begin with."""
        ids = list(token_ids)
        return PromptOf(ids, self._extended_by(ids), self._next_seed(ids))

    def record_reply(self, prompt: PromptOf, drawn: Drawn) -> tuple[int, Message]:
        """Add what was drawn for a prompt; return its node, and the assistant's message."""
        assert len(drawn.token_ids) == len(drawn.log_probs) == len(drawn.versions), "one number per token each"
        node = len(self._nodes)
        known = 0
        if prompt.parent is None:
            self._roots.append(node)
        else:
            self._nodes[prompt.parent].children.append(node)
            known = len(self.node_token_ids(prompt.parent))
        self._nodes.append(_Node(prompt.parent, prompt.ids[known:], drawn))
        self.num_turns += 1
        message = self._renderer.parse(drawn.token_ids if drawn.shown is None else drawn.shown)
        if prompt.history is not None:
            for index, call in enumerate(message.get("tool_calls", ())):
                call["id"] = call_id([*prompt.ids, *drawn.token_ids, prompt.seed], index)
            self._replies.setdefault(_after(prompt.history, message), []).append(node)
        return node, message

    def node_token_ids(self, node: int) -> list[int]:
        """Return a node's prompt and what was drawn."""
        return [token for each in self._path_to(node) for token in (*each.prompt_ids, *each.drawn.token_ids)]

    def collect_samples(self, nodes: Sequence[int] | None = None) -> list[SampleTokens]:
        """Return a sample per path from a root to one of `sample_ends(nodes)`. Take all samples of a rollout from one
        call: a drawn token is trained on in the first that has it."""
        turns = {node: turn for turn, node in enumerate(self.trained_turns(nodes))}
        trained: set[int] = set()
        return [self._make_sample(end, trained, turns) for end in self.sample_ends(nodes)]

    def trained_turns(self, nodes: Sequence[int] | None = None) -> list[int]:
        """Return the nodes whose tokens `collect_samples` has, in the order in which they were recorded."""
        return sorted({node for end in self.sample_ends(nodes) for node in self._numbers_to(end)})

    def sample_ends(self, nodes: Sequence[int] | None = None) -> list[int]:
        """Return those of `nodes` (None: all leaves) at which a sample ends, without duplicates and inner nodes of
        other paths. Raises BadAgentRequest if there is no such node."""
        if nodes is None:
            nodes = [number for number, node in enumerate(self._nodes) if not node.children]
        if not all(0 <= node < len(self._nodes) for node in nodes):
            raise BadAgentRequest("sample", f"this rollout has no pieces {list(nodes)}, only {len(self._nodes)}")
        inner = {id(node) for end in nodes for node in self._path_to(end)[:-1]}
        return [end for end in dict.fromkeys(nodes) if id(self._nodes[end]) not in inner]

    def _make_sample(self, end: int, trained: set[int], turns: Mapping[int, int]) -> SampleTokens:
        sample = SampleTokens([], [], [], [], [])
        for number in self._numbers_to(end):
            node, mine = self._nodes[number], number not in trained
            trained.add(number)
            sample.token_ids.extend([*node.prompt_ids, *node.drawn.token_ids])
            sample.response_mask.extend([0] * len(node.prompt_ids) + [int(mine)] * len(node.drawn.token_ids))
            if mine:
                sample.log_probs.extend(node.drawn.log_probs)
                sample.versions.extend(node.drawn.versions)
                sample.turn_ids.extend([turns[number]] * len(node.drawn.token_ids))
        return sample

    def _path_to(self, node: int) -> list[_Node]:
        """Return the nodes from the root to `node`."""
        return [self._nodes[number] for number in self._numbers_to(node)]

    def _numbers_to(self, node: int) -> list[int]:
        path, parent = [node], self._nodes[node].parent
        while parent is not None:
            path.append(parent)
            parent = self._nodes[parent].parent
        return path[::-1]

    def _extended_by(self, ids: list[int]) -> int | None:
        """Return the node with the longest path that `ids` begin with."""
        longest: tuple[int, int | None] = (0, None)
        waiting = [(node, 0) for node in self._roots]
        while waiting:
            number, at = waiting.pop()
            node = self._nodes[number]
            own = [*node.prompt_ids, *node.drawn.token_ids]
            end = at + len(own)
            if ids[at:end] == own:
                waiting.extend((child, end) for child in node.children)
                longest = max(longest, (end, number), key=lambda each: each[0])
        return longest[1]

    def _next_seed(self, ids: list[int]) -> int:
        key = _digest(ids)
        self._asked[key] += 1
        return call_seed(self._seed, ids, self._asked[key] - 1)


def call_seed(rollout_seed: int, prompt_ids: Sequence[int], repetition: int) -> int:
    """Mix (rollout's seed, prompt, how often this prompt was asked before) into 64 bits. Concurrent calls draw the same
    tokens in whatever order they arrive."""
    head = struct.pack("<QQ", rollout_seed % 2**64, repetition)
    return int.from_bytes(hashlib.blake2b(head + _digest(prompt_ids), digest_size=8).digest())


def _digest(ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(struct.pack(f"<{len(ids)}Q", *ids), digest_size=16).digest()


def _histories(messages: Sequence[Message], tools: Tools) -> list[bytes]:
    """Return the keys of the conversations of no message, the first, the first two, ..."""
    names = [json.dumps(tools or [], sort_keys=True).encode()]
    for message in messages:
        names.append(_after(names[-1], message))
    return names


def _after(history: bytes, message: Message) -> bytes:
    return hashlib.blake2b(history + canonical(message).encode(), digest_size=16).digest()
