r"""Reward of 1 for the right final answer of a worked solution.

The final answer of a text is the content of its last `\boxed{}`, else what follows its last `####` (GSM8K), else its
last number. Numbers are compared as exact fractions, formulas (`2\sqrt{3}`) as text.
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
# A minus after a letter, digit or bracket subtracts; elsewhere it is a sign
_NUMBER = re.compile(rf"(?:(?<![\w)\]])[-+])?{_UNSIGNED}(?:/{_UNSIGNED})?")
# Must not begin with optional space: searching a text of only spaces would take quadratic time
_FRACTION = re.compile(r"(?:([-+])\s*)?\\[dt]?frac\s*\{\s*([-+]?[\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}")
_FORMULA = re.compile(r"[\\^_(\[{]")
_NOISE = re.compile(r"\\(?:left|right|text|mathrm|!|,|;|%|\$)|[\s$%{}]")


def math_reward(prompt: str, response: str, ground_truth: str) -> Score:
    """Return 1 if the final answer of `response` equals that of `ground_truth`, else 0."""
    wanted = final_answer(ground_truth, is_reference=True)
    if isinstance(wanted, Fraction):
        correct = final_answer(response) == wanted
    else:
        marked = _marked(response)
        correct = _as_text(response if marked is None else marked) == wanted
    return Score(float(correct), correct)


def final_answer(text: str, *, is_reference: bool = False) -> Fraction | str:
    r"""Return the number or formula that a text ends in; formulas without spaces and dollar signs. `is_reference`: the
    text is a ground truth, which may be a formula as a whole even without a mark."""
    marked = _marked(text)
    part = text if marked is None else marked
    number = last_number(part)
    is_formula = _FORMULA.search(_plain(part)) and (is_reference or marked is not None)
    return _as_text(part) if number is None or is_formula else number


def last_number(text: str) -> Fraction | None:
    r"""Return the last number of a text, or None: signs, thousands commas, decimals, `a/b` and `\frac{a}{b}`."""
    numbers = _NUMBER.findall(_plain(text))
    return _as_fraction(numbers[-1]) if numbers else None


def _marked(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{}`, else the rest of the line after the last `####`, else None."""
    _, boxed, rest = text.rpartition("\\boxed{")
    depth = 1
    for end, character in enumerate(rest if boxed else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:end]
    _, marker, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0] if marker else None


def _plain(text: str) -> str:
    r"""Normalize minus signs, and write `\frac{a}{b}` as `a/b`."""
    return _FRACTION.sub(r" \1\2/\3 ", text.replace("−", "-").replace("\\$", "").replace("\\%", ""))


def _as_fraction(number: str) -> Fraction | None:
    if len(number) > MAX_DIGITS:
        return None
    above, _, below = number.replace(",", "").partition("/")
    divisor = Fraction(below or 1)
    return Fraction(above) / divisor if divisor else None


def _as_text(text: str) -> str:
    return _NOISE.sub("", text).rstrip(".").lower()


# Whether a response ends in the right formula according to the library Math-Verify, where `0.5` equals `\frac{1}{2}`.
#
# https://github.com/huggingface/Math-Verify (Apache-2.0), the extra `math`. It may compute forever, so it runs in a
# child process with a deadline (`workers.rewards.pooled`). The library's own deadline is off: it would be 5 s whatever
# `reward.timeout_s` says, and silently count as wrong.


class VerifiedMath:
    """Compares response and ground truth as formulas; constructing it imports the library, which takes some seconds."""

    def __init__(self) -> None:
        import math_verify

        self._library = math_verify
        logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs whole responses

    def __call__(self, response: str, ground_truth: str) -> bool:
        r"""Return whether the response's final answer equals the ground truth's.

        Args:
            response: its last `\boxed{}` counts, otherwise its last formula or number.
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
    """Raise ConfigError unless the library is installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            f"reward.function: math_verify needs the package math-verify; {pip_line('math')}, or set reward.function "
            f"to math, which compares numbers"
        )
