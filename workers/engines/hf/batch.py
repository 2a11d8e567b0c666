"""Which tokens the next step of the `hf` engine computes: responses that enter, those that run, and where each goes.

A response enters with all its tokens, so one whose keys and values were dropped (new weights) enters like a new one;
its next draw is the same either way. Responses of one prompt that enter together are one document; the keys of the
newest prompts are kept for responses of the group that get a slot later.

Legend of shapes: U rows of logits, V vocabulary, L layers, J key heads, P tokens of a prompt, D head dimension.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.engines.base import GenerateRequest
from workers.engines.hf.attention import Bucket, Entry, StepPlan
from workers.engines.hf.lanes import KeyShape, Lane, alike

MAX_ENTERING_TOKENS = 4096
"""Tokens of documents that enter in one step, or one document: bounds memory, and how long running responses wait."""
_KEPT_PROMPTS = 2
"""Responses begin in the order of their groups, so only the newest prompt has responses to come."""


@dataclass
class Response:
    """A response that enters or runs.

    Attributes:
        request: what was asked for.
        slot: its place in the engine's tensors.
        tokens: prompt and response.
    """

    request: GenerateRequest
    slot: int
    tokens: list[int]

    @property
    def num_tokens(self) -> int:
        """Number of tokens generated, without the prompt's."""
        return len(self.tokens) - self.request.prompt_P.numel()

    @property
    def completes_stop(self) -> bool:
        """Whether the newest token completes a string that ends the response."""
        if (stop := self.request.stop) is None:
            return False
        return stop.are_in(self.tokens[-self.num_tokens :], since=self.num_tokens - 1)


@dataclass
class StepInputs:
    """The model's inputs of a step.

    Attributes:
        tokens: of the packed sequence.
        positions: of each token in its response.
        predictors: where logits are needed.
        plan: of the attention.
        responses: those that get a token.
        logit_rows: of each response, among the logits of this step and those of kept prompts behind them.
        prompts: tokens and slot of each document that is a prompt, and its row of logits.
        kept_logits: of kept prompts.
    """

    plan: StepPlan
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    predictors: list[int] = field(default_factory=list)
    responses: list[Response] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    prompts: list[tuple[tuple[int, ...], int, int]] = field(default_factory=list)
    kept_logits: list[Tensor] = field(default_factory=list)
    _num_logits: int = 0

    def add_responses(self, responses: list[Response]) -> None:
        """Let responses draw from the next row of logits."""
        self.responses += responses
        self.logit_rows += [self._num_logits] * len(responses)
        self._num_logits += 1


@dataclass(frozen=True)
class _KeptPrompt:
    """Keys and values [L, 2, J, P, D], and the logits after the last token [V]."""

    keys: Tensor
    logits_V: Tensor


class RunningBatch:
    """The responses that enter and run."""

    def __init__(self, shape: KeyShape, *, max_new_tokens: int) -> None:
        """Args:
        shape: of the model's keys.
        max_new_tokens: of a response.
        """
        self._shape = shape
        self._max_new_tokens = max_new_tokens
        self._entering: list[Response] = []
        self._running: dict[int, Response] = {}
        self._lanes: list[Lane] = []
        self._kept: OrderedDict[tuple[int, ...], _KeptPrompt] = OrderedDict()

    def enter(self, response: Response) -> None:
        """Queue a response; the next step, or one soon after, computes all its tokens."""
        self._entering.append(response)

    def next_inputs(self) -> StepInputs:
        """Return what the next step computes: the newest token of what runs, and what enters."""
        segments = [(lane, lane.num_rows) for lane in self._lanes]
        for lane in self._lanes:
            lane.advance()
        taken = self._take_entering()
        kept = {tokens: taken.pop(tokens) for tokens in list(taken) if tokens in self._kept}
        documents = sorted(taken.items(), key=lambda document: len(document[0]))
        to_place = [*documents, *kept.items()]
        entries = [self._place(to_place[number:]) for number in range(len(to_place))]
        for tokens, entry in zip(kept, entries[len(documents) :], strict=True):
            entry.lane.paste(entry.rows, self._kept[tokens].keys)
        # masks last: a lane may have moved when responses joined it
        running = tuple((lane, num_rows, lane.mask(num_rows)) for lane, num_rows in segments)
        inputs = StepInputs(StepPlan(_buckets(documents, entries[: len(documents)]), running))
        self._add_documents(inputs, documents)
        self._add_running(inputs, segments)
        for tokens, responses in kept.items():
            inputs.add_responses(responses)
            inputs.kept_logits.append(self._kept[tokens].logits_V)
        return inputs

    def note_logits(self, inputs: StepInputs, logits_UV: Tensor | None) -> Tensor:
        """Keep the newest prompts; return the logits followed by those of kept prompts, as `logit_rows` counts them.

        Args:
            inputs: of the step.
            logits_UV: at its predictors; None: it has none.
        """
        if logits_UV is not None:
            for tokens, slot, row in inputs.prompts[-_KEPT_PROMPTS:]:
                lane = next(lane for lane in self._lanes if slot in lane.slots)
                self._kept[tokens] = _KeptPrompt(lane.copy_of(slot), logits_UV[row].clone())
            while len(self._kept) > _KEPT_PROMPTS:
                self._kept.popitem(last=False)
        parts = [] if logits_UV is None else [logits_UV]
        parts += [logits_V.unsqueeze(0) for logits_V in inputs.kept_logits]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def leave(self, responses: list[Response]) -> None:
        """Take out responses that ended."""
        slots = {response.slot for response in responses}
        for lane in self._lanes if slots else ():
            lane.leave([slot for slot in lane.slots if slot in slots])
        self._lanes = [lane for lane in self._lanes if lane.num_rows]
        for slot in slots:
            del self._running[slot]

    def cancel(self, ticket: int) -> list[Response]:
        """Take out the response with this ticket, whether it runs or waits to enter; return it, if there is one."""
        entering = [response for response in self._entering if response.request.ticket == ticket]
        running = [response for response in self._running.values() if response.request.ticket == ticket]
        self._entering = [response for response in self._entering if response.request.ticket != ticket]
        self.leave(running)
        return entering + running

    def enter_again(self) -> None:
        """Compute the keys and values of running responses anew."""
        self._entering[:0] = self._running.values()
        self._running.clear()
        self._lanes.clear()

    def forget_prompts(self) -> None:
        """Drop the keys of prompts, which other weights computed."""
        self._kept.clear()

    def clear(self) -> None:
        """Forget all responses."""
        self._entering.clear()
        self._running.clear()
        self._lanes.clear()

    def _take_entering(self) -> dict[tuple[int, ...], list[Response]]:
        """Return the responses that enter now, by their tokens, in order."""
        taken: dict[tuple[int, ...], list[Response]] = {}
        num_tokens, number = 0, 0
        for response in self._entering:
            tokens = tuple(response.tokens)
            if tokens not in taken:
                num_tokens += len(tokens)
                if taken and num_tokens > MAX_ENTERING_TOKENS:
                    break
            taken.setdefault(tokens, []).append(response)
            self._running[response.slot] = response
            number += 1
        del self._entering[:number]
        return taken

    def _place(self, to_place: list[tuple[tuple[int, ...], list[Response]]]) -> Entry:
        """Give the responses of the first document rows of a lane, an old one, or a new one with room for those of the
        next documents that will join it."""
        length, responses = len(to_place[0][0]), to_place[0][1]
        lane = next((lane for lane in self._lanes if lane.fits(length)), None)
        if lane is None:
            longest, num_rows = length, 0
            for tokens, joining in to_place:
                if alike(len(tokens), longest):
                    longest, num_rows = max(longest, len(tokens)), num_rows + len(joining)
            lane = Lane(self._shape, num_rows=num_rows, length=longest, max_new_tokens=self._max_new_tokens)
            self._lanes.append(lane)
        first = lane.join([response.slot for response in responses], length)
        return Entry(lane, slice(first, first + len(responses)))

    def _add_documents(self, inputs: StepInputs, documents: list[tuple[tuple[int, ...], list[Response]]]) -> None:
        for tokens, responses in documents:
            inputs.tokens += tokens
            inputs.positions += range(len(tokens))
            inputs.predictors.append(len(inputs.tokens) - 1)
            if not responses[0].num_tokens:
                inputs.prompts.append((tokens, responses[0].slot, len(inputs.predictors) - 1))
            inputs.add_responses(responses)

    def _add_running(self, inputs: StepInputs, segments: list[tuple[Lane, int]]) -> None:
        for lane, num_rows in segments:
            for slot in lane.slots[:num_rows]:
                response = self._running[slot]
                inputs.tokens.append(response.tokens[-1])
                inputs.positions.append(len(response.tokens) - 1)
                inputs.predictors.append(len(inputs.tokens) - 1)
                inputs.add_responses([response])


def _buckets(documents: list[tuple[tuple[int, ...], list[Response]]], entries: list[Entry]) -> tuple[Bucket, ...]:
    """Group documents of one length."""
    by_length: dict[int, list[Entry]] = {}
    for (tokens, _), entry in zip(documents, entries, strict=True):
        by_length.setdefault(len(tokens), []).append(entry)
    return tuple(Bucket(length, tuple(together)) for length, together in by_length.items())
