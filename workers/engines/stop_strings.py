"""Where a stop string ends a response: `stop` of a call, and `rollout.stop`. Pure except for the tokenizer."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

#     drawn     So | Obs | erv | ation: 7 | and on        stop "Observation:"
#     kept      So | Obs | erv | ation: 7                 up to the token that completes the string; trained
#     shown     So                                        what an agent reads: the text before the string
#
# Engines compute with tokens and know no text, so they ask: an engine that draws token by token ends at once, one that
# draws blocks ends after the block. Their callers cut the rest (`Generation.until`), so the tokens are the same
# whichever engine drew them, even one that never asked.

# Tokens before a string that are decoded with it: half a character, or a space that a tokenizer drops at the start.
_SLACK = 8
_ANCHORS = ("", "x", "\n")  # after one of these, a tokenizer encodes a piece of text verbatim


@dataclass(frozen=True)
class Stopped:
    """A response that a string ended."""

    text: str
    num_tokens: int  # of the response, including the one that completes the string
    # Tokens for the text before the string: drawn ones, and substitutes for the first part of a drawn token that also
    # holds part of the string. Never trained.
    shown_ids: list[int]


class StopStrings:
    """Finds a call's stop strings in its response. Special tokens count as their text. Any thread may ask."""

    def __init__(self, tokenizer: "StopTokenizer", texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = tuple(texts)
        self._longest = max(len(text.encode()) for text in self._texts)

    def are_in(self, tokens: Sequence[int], *, since: int = 0) -> bool:
        """Return whether a response so far holds one of the strings; its first `since` tokens hold none."""
        # Decode only the end first, which is cheap; if it holds a string, confirm with the whole text.
        near = tokens[max(0, since - self._longest - _SLACK) :]
        return self._are_in(self._tokenizer.text(near)) and (len(near) == len(tokens) or self._holds(tokens))

    def stopped(self, tokens: Sequence[int]) -> Stopped | None:
        """Return where a string ends the response; None: none of them is in it."""
        if not self._holds(tokens):
            return None
        first = _first(range(1, len(tokens) + 1), lambda number: self._holds(tokens[:number]))
        text = self._tokenizer.text(tokens[:first])
        at, stop = min((text.find(each), each) for each in self._texts if each in text)
        # Keep drawn tokens that lie wholly before the string; encode the rest of the text before it anew.
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
    """A model's tokenizer; `load` is called for the first strings."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._lock = threading.Lock()

    def make_stop_strings(self, texts: Sequence[str]) -> StopStrings | None:
        """Return what finds these strings, each checked by `unusable_stop`; None if there are none."""
        return StopStrings(self, texts) if texts else None

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including special ones."""
        with self._lock:  # fast tokenizers are not thread-safe
            decode = self._tokenizer.decode
            return str(decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def rest_ids(self, tokens: list[int], text: str) -> list[int]:
        """Return tokens that, after `tokens`, complete this text; empty if no tokens do."""
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
    """Return the first number for which `holds` is true; it must be true for the last and for all after the first."""
    low, high = numbers.start, numbers.stop - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
