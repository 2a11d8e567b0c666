"""What puts the rows of a run: a client like any other, in the lead's process, which is told what the lead knows."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncflow.process import ServiceThreads
from tq.control.events import GroupRemoved, Lost
from tq.refill import AdmissionMark, Refill


class Admission(Protocol):
    """Puts new rows, and lost ones again."""

    @property
    def started(self) -> bool:
        """Whether `start` was called."""

    @property
    def admitted_groups(self) -> int:
        """Ids of groups below this were given out."""

    @property
    def refills(self) -> Sequence[Refill]:
        """Which groups were replaced so far, in order; durable, so that a later incarnation begins with the same."""

    def start(self, known_rows: Mapping[int, Collection[int]] | None) -> None:
        """Begin.

        Args:
            known_rows: after a restart, per partition, the rows that exist or are finished; None: the first start.
        """

    def add(self, event: int | Lost | GroupRemoved) -> None:
        """Weights of a version were published, rows were lost, or a group left its partition."""

    def close(self) -> None:
        """Stop; idempotent."""


@dataclass(frozen=True)
class AdmissionPlace:
    """What a controller gives its admission.

    Attributes:
        starts: of the controller, this one included.
        mark: where an earlier incarnation stood; None: there was none.
        version: newest weights that were published; the mark may know of older ones only.
        save: makes a mark durable; returns when it is.
        threads: the controller's: it fails with a thread of admission.
    """

    starts: int
    mark: AdmissionMark | None
    version: int
    save: Callable[[AdmissionMark], None]
    threads: ServiceThreads


MakeAdmission = Callable[[AdmissionPlace], Admission]
