r"""Whether what a regular expression finds in a response is the reference answer.

reward: {function: regex, pattern: '<answer>(.*?)</answer>'}
"""

import re

from asyncflow.errors import ConfigError


class LastMatch:
    """Compares the last match: its first group if it has one, else all of it."""

    def __init__(self, pattern: str) -> None:
        """Compile; `.` matches line ends, too."""
        self._pattern = compile_pattern(pattern)

    def __call__(self, response: str, answer: str) -> bool:
        """Return whether it is there, and equal to the answer but for space around both."""
        matches = list(self._pattern.finditer(response))
        if not matches:
            return False
        found = matches[-1]
        text = found.group(1) if self._pattern.groups else found.group()
        return text is not None and text.strip() == answer.strip()


def compile_pattern(pattern: str | None) -> re.Pattern[str]:
    """Compile `reward.pattern`.

    Raises:
        ConfigError: it is missing, or no regular expression.
    """
    if pattern is None:
        raise ConfigError(
            "reward.pattern: missing; reward.function regex compares what it finds: set it to an expression"
        )
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"reward.pattern: {pattern!r} is no regular expression: {error}; correct it") from error
