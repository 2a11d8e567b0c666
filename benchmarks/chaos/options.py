"""What a part of the chaos benchmark is given."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """Of one run of the benchmark.

    Attributes:
        short: fewer kills and steps, to see that everything works.
        seed: of who is killed, and when.
        kills: processes to kill in the part `kills`.
        directory: for runs; exists.
        say: tells progress.
    """

    short: bool
    seed: int
    kills: int
    directory: Path
    say: Callable[[str], None]
