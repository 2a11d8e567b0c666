"""Where the documents of a packed sequence lie, and which tokens each may see. Pure.

A document is a run of tokens that attend causally to themselves. It may continue another one, its prompt: then its
tokens also see all of the prompt's. So a prompt is computed once for all its responses, which never see each other:

    sequence    p p p p | s s s s s | a a | b b b         p: a prompt, a and b: responses to it, s: a sample alone
    lengths     4         5           2     3             prompts  -1 -1 0 0

    a sees      p p p p   a a          (as if its tokens followed the prompt's)

Source: shared-prompt attention, arXiv 2511.18871, section 4.3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

ALONE = -1
"""In `PackedLayout.prompts`: the document continues no other."""


class Block(NamedTuple):
    """Neighbouring queries that one call of an attention kernel computes.

    Attributes:
        start: first token of the queries.
        documents: how many, each of `length` tokens.
        length: of one.
        keys: first token of the keys.
        num_keys: of each document: `length` of its own, or those of the one prompt (then `documents` is 1).
    """

    start: int
    documents: int
    length: int
    keys: int
    num_keys: int


@dataclass(frozen=True)
class PackedLayout:
    """The documents of a packed sequence; passed to the model as the keyword argument `packed_layout`.

    Attributes:
        lengths: tokens of each document, at least 1, in the order of the sequence.
        prompts: for each document the position of the one that it continues, which lies before it and continues none;
            `ALONE`: it continues none.
    """

    lengths: tuple[int, ...]
    prompts: tuple[int, ...]

    @staticmethod
    def alone(lengths: Sequence[int]) -> "PackedLayout":
        """Return the layout of documents of which none continues another."""
        return PackedLayout(tuple(lengths), (ALONE,) * len(lengths))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First token of each document."""
        return tuple(accumulate(self.lengths, initial=0))[:-1]

    @cached_property
    def key_lengths(self) -> tuple[int, ...]:
        """Tokens that the last token of each document sees."""
        return tuple(
            length if prompt == ALONE else self.lengths[prompt] + length
            for length, prompt in zip(self.lengths, self.prompts, strict=True)
        )

    @property
    def longest(self) -> int:
        """Positions of the longest document, with its prompt."""
        return max(self.key_lengths)

    @cached_property
    def own_blocks(self) -> tuple[Block, ...]:
        """Every document to itself, causally: neighbours of one length together. They cover each token once."""
        blocks = []
        for length, run in groupby(range(len(self.lengths)), key=lambda document: self.lengths[document]):
            documents = list(run)
            start = self.starts[documents[0]]
            blocks.append(Block(start, len(documents), length, start, length))
        return tuple(blocks)

    @cached_property
    def prompt_blocks(self) -> tuple[Block, ...]:
        """Documents to the prompt that they continue, without a mask: neighbours with one prompt together."""
        blocks = []
        for prompt, run in groupby(range(len(self.lengths)), key=lambda document: self.prompts[document]):
            documents = list(run)
            if prompt != ALONE:
                length = sum(self.lengths[document] for document in documents)
                blocks.append(Block(self.starts[documents[0]], 1, length, self.starts[prompt], self.lengths[prompt]))
        return tuple(blocks)

    def key_index(self) -> Tensor | None:
        """Return int64 [K]: which tokens each document sees, one document after another, its own ones last.

        None: the sequence itself. For kernels that want every document's keys in one piece.
        """
        if not self.prompt_blocks:
            return None
        pieces = []
        for document, prompt in enumerate(self.prompts):
            for part in (document,) if prompt == ALONE else (prompt, document):
                pieces.append(torch.arange(self.starts[part], self.starts[part] + self.lengths[part]))
        return torch.cat(pieces)
