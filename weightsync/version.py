"""Which weights: (lineage, step). A newer lineage beats a newer step."""

from typing import NamedTuple


class Version(NamedTuple):
    """Ordered: the newest weights compare greatest."""

    lineage: int  # number of actor restores before these weights
    step: int  # whose update made them; 0 is the initial model

    def __str__(self) -> str:
        return f"step {self.step}" + (f" of lineage {self.lineage}" if self.lineage else "")
