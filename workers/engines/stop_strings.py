"""Where a response ends for a string: `stop` of a call, and `rollout.stop`. Pure but for the tokenizer.

    drawn     So | Obs | erv | ation: 7 | and on        stop "Observation:"
    kept      So | Obs | erv | ation: 7                 up to the token that completes the string; trained
    shown     So                                        what an agent reads: the text before the string

Engines compute with tokens and know no text, so they ask: one that draws token by token ends at once, one that draws
blocks ends behind the block. Their callers cut what is beyond (`Generation.until`), so the tokens are the same whatever
engine drew them, also one that never asked.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_SLACK = 8
"""Tokens before a string that are decoded with it: half a character, or a space that a tokenizer drops in front."""
_ANCHORS = ("", "x", "\n")
"""Behind one of these a tokenizer writes a piece of text as it stands."""


@dataclass(frozen=True)
class Stopped:
    """A response that a string ended.

    Attributes:
        text: the string.
        num_tokens: of the response, with the one that completes the string.
        shown_ids: tokens whose text is what stands before the string: drawn ones, and where a drawn one holds both,
            others for its first part. Never trained.
    """

    text: str
    num_tokens: int
    shown_ids: list[int]


class StopStrings:
    """Finds the strings of a call in its response. Special tokens count as their text. Any thread may ask."""

    def __init__(self, tokenizer: "StopTokenizer", texts: Sequence[str]) -> None:
        """See `StopTokenizer.strings`."""
        self._tokenizer = tokenizer
        self._texts = tuple(texts)
        self._longest = max(len(text.encode()) for text in self._texts)

    def are_in(self, tokens: Sequence[int], *, since: int = 0) -> bool:
        """Return whether a response holds one of the strings.

        Args:
            tokens: of the whole response so far.
            since: so many first ones were asked about before: only what is newer completes a string.
        """
        near = tokens[max(0, since - self._longest - _SLACK) :]
        return self._are_in(self._tokenizer.text(near)) and (len(near) == len(tokens) or self._holds(tokens))

    def stopped(self, tokens: Sequence[int]) -> Stopped | None:
        """Return where a response ends, None if none of the strings is in it."""
        if not self._holds(tokens):
            return None
        first = _first(range(1, len(tokens) + 1), lambda number: self._holds(tokens[:number]))
        text = self._tokenizer.text(tokens[:first])
        at, stop = min((text.find(each), each) for each in self._texts if each in text)
        whole = first - 1
        while whole and not text[:at].startswith(self._tokenizer.text(tokens[:whole])):
            whole -= 1
        shown = list(tokens[:whole])
        return Stopped(stop, first, shown + self._tokenizer.rest_ids(shown, text[:at]))

    def _holds(self, tokens: Sequence[int]) -> bool:
        return self._are_in(self._tokenizer.text(tokens))

    def _are_in(self, text: str) -> bool:
        return any(each in text for each in self._texts)


class StopTokenizer:
    """A model's tokenizer, loaded with the first strings."""

    def __init__(self, load: Callable[[], Any]) -> None:
        """Args:
        load: returns the tokenizer, of transformers.
        """
        self._load = load
        self._lock = threading.Lock()

    def strings(self, texts: Sequence[str]) -> StopStrings | None:
        """Return what finds these strings, None if there are none; each is checked by `unusable_stop`."""
        return StopStrings(self, texts) if texts else None

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones too."""
        with self._lock:  # fast tokenizers are not safe across threads
            decode = self._tokenizer.decode
            return str(decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def rest_ids(self, tokens: list[int], text: str) -> list[int]:
        """Return tokens behind which, with `tokens` before, the text is this one; none if no tokens write it so."""
        rest = text[len(self.text(tokens)) :]
        for anchor in _ANCHORS if rest else ():
            with self._lock:
                before, both = (
                    self._tokenizer.encode(each, add_special_tokens=False) for each in (anchor, anchor + rest)
                )
            ids = list(both[len(before) :])
            if self.text([*tokens, *ids]) == text:
                return ids
        return []

    @cached_property
    def _tokenizer(self) -> Any:
        return self._load()


def _first(numbers: range, holds: Callable[[int], bool]) -> int:
    """Return the first number for which something holds; it holds for the last, and for all behind the first."""
    low, high = numbers.start, numbers.stop - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
