"""What a part of the benchmark is given."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """Of one run of the benchmark.

    Attributes:
        model_bytes: size of the synthetic model on the wire.
        bucket_bytes: of the weight path where transfers are timed.
        long: more rounds.
        kills: processes to kill.
        trace: where to write a Chrome trace.
        directory: for a model; exists.
        say: tells progress.
        link_gbit: of the limited link between two nodes (Gb/s).
    """

    model_bytes: int
    bucket_bytes: int
    long: bool
    kills: int
    trace: Path | None
    directory: Path
    say: Callable[[str], None]
    link_gbit: float = 10.0

    def rounds(self, usual: int) -> int:
        """Return how many rounds to measure."""
        return 3 * usual if self.long else usual
