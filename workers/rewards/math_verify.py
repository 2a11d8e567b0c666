r"""Whether a response ends in the right formula, as the library Math-Verify judges it: `0.5` is `\frac{1}{2}`.

https://github.com/huggingface/Math-Verify (Apache-2.0), the extra `math`. What it computes may take for ever, so it
runs in a child process, whose deadline is the only one (`workers.rewards.pooled`): its own would be 5 s, whatever
`reward.timeout_s` says, and count as wrong in silence.
"""

import importlib.util
import logging

from asyncflow.errors import ConfigError
from asyncflow.extras import pip_line


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
