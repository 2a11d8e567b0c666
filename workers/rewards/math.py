r"""Reward of 1 for the right final answer of a worked solution.

The final answer of a text is, in this order: what the last `\boxed{}` holds, what follows the last `####` (GSM8K), its
last number. Numbers are compared as exact fractions; formulas (`2\sqrt{3}`) as text.
"""

import importlib.util
import logging
import re
from fractions import Fraction

from asyncflow.errors import ConfigError
from asyncflow.extras import pip_line
from workers.rewards.base import Score

MAX_DIGITS = 1000
"""A longer run of digits is not an answer, and Python refuses to convert it."""

_UNSIGNED = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\w)\.\d+)"
_NUMBER = re.compile(rf"(?:(?<![\w)\]])[-+])?{_UNSIGNED}(?:/{_UNSIGNED})?")
"""A minus after a letter, digit or bracket subtracts; elsewhere it is a sign."""
_FRACTION = re.compile(r"(?:([-+])\s*)?\\[dt]?frac\s*\{\s*([-+]?[\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}")
"""Begins with no space: a search in a text of nothing but spaces would take the square of their number."""
_FORMULA = re.compile(r"[\\^_(\[{]")
_NOISE = re.compile(r"\\(?:left|right|text|mathrm|!|,|;|%|\$)|[\s$%{}]")


def math_reward(prompt: str, response: str, ground_truth: str) -> Score:
    """Return 1 when the final answer of `response` equals that of `ground_truth`, else 0."""
    wanted = final_answer(ground_truth, is_reference=True)
    if isinstance(wanted, Fraction):
        correct = final_answer(response) == wanted
    else:
        marked = _marked(response)
        correct = _as_text(response if marked is None else marked) == wanted
    return Score(float(correct), correct)


def final_answer(text: str, *, is_reference: bool = False) -> Fraction | str:
    r"""Return the number or formula that a text ends in; formulas without spaces and dollar signs.

    Args:
        is_reference: the text is a ground truth of the data set: without a mark, all of it may be a formula.
    """
    marked = _marked(text)
    part = text if marked is None else marked
    number = last_number(part)
    is_formula = _FORMULA.search(_plain(part)) and (is_reference or marked is not None)
    return _as_text(part) if number is None or is_formula else number


def last_number(text: str) -> Fraction | None:
    r"""Return the last number of a text: signs, thousands commas, decimals, `a/b` and `\frac{a}{b}`; or None."""
    numbers = _NUMBER.findall(_plain(text))
    return _as_fraction(numbers[-1]) if numbers else None


def _marked(text: str) -> str | None:
    r"""Return what the last closed `\boxed{}` holds, else what follows the last `####` on its line, else None."""
    _, boxed, rest = text.rpartition("\\boxed{")
    depth = 1
    for end, character in enumerate(rest if boxed else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:end]
    _, marker, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0] if marker else None


def _plain(text: str) -> str:
    r"""Return the text with plain minus signs and `a/b` for `\frac{a}{b}`."""
    return _FRACTION.sub(r" \1\2/\3 ", text.replace("−", "-").replace("\\$", "").replace("\\%", ""))


def _as_fraction(number: str) -> Fraction | None:
    if len(number) > MAX_DIGITS:
        return None
    above, _, below = number.replace(",", "").partition("/")
    divisor = Fraction(below or 1)
    return Fraction(above) / divisor if divisor else None


def _as_text(text: str) -> str:
    return _NOISE.sub("", text).rstrip(".").lower()


# Whether a response ends in the right formula, as the library Math-Verify judges it: `0.5` is `\frac{1}{2}`.
#
# https://github.com/huggingface/Math-Verify (Apache-2.0), the extra `math`. What it computes may take for ever, so it
# runs in a child process, whose deadline is the only one (`workers.rewards.pooled`): its own would be 5 s, whatever
# `reward.timeout_s` says, and count as wrong in silence.


class VerifiedMath:
    """Parses response and ground truth, and compares them."""

    def __init__(self) -> None:
        """Import the library, which takes some seconds."""
        import math_verify

        self._library = math_verify
        logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it writes whole responses into the log

    def __call__(self, response: str, ground_truth: str) -> bool:
        r"""Return whether the response's final answer is the ground truth's.

        Args:
            response: its last `\boxed{}` counts, else its last formula or number.
            ground_truth: plain LaTeX, in dollars or boxed, or a worked solution with `#### answer` (GSM8K).
        """
        library = self._library
        _, marker, marked = ground_truth.rpartition("####")
        wanted = marked.strip() if marker else ground_truth.strip()
        if "\\boxed" not in wanted and "$" not in wanted:
            wanted = f"\\boxed{{{wanted}}}"
        gold = library.parse(wanted, extraction_config=[library.LatexExtractionConfig()], parsing_timeout=0)
        given = library.parse(response, parsing_timeout=0)
        return bool(library.verify(gold, given, timeout_seconds=None))


def check_installed() -> None:
    """Check that the library is there.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            f"reward.function: math_verify needs the package math-verify; {pip_line('math')}, or set reward.function "
            f"to math, which compares numbers"
        )
