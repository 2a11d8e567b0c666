"""The weights that one engine computes with, and how newer ones take their place: wait, ask for a turn, load.

Used by the one thread of a role that follows the policy. What arrives and is checked is `weightsync.receiver`'s part.
"""

import time
from collections.abc import Callable, Mapping

from torch import Tensor

from asyncflow.errors import WeightsLate
from weightsync.receiver import WeightReceiver
from weightsync.version import Version
from workers.context import WorkerContext

_TURN_PATIENCE_S = 1.0
"""How long a wait for a turn to swap lasts before it looks again whether the run stops (s)."""


class HeldWeights:
    """Knows the version that is loaded."""

    def __init__(
        self,
        context: WorkerContext,
        receiver: WeightReceiver,
        load: Callable[[Mapping[str, Tensor]], None],
        *,
        loaded: Callable[[Version], None] = lambda _: None,
    ) -> None:
        """Args:
        receiver: has newer versions ready; closed here.
        load: has the engine take weights.
        loaded: is called after each swap.
        """
        self.version: Version | None = None
        self._context = context
        self._receiver = receiver
        self._load = load
        self._loaded = loaded
        self._timeout_s = context.config.weightsync.timeout_s

    @property
    def step(self) -> int:
        """Step of the weights that are loaded; 0 before the first."""
        return 0 if self.version is None else self.version.step

    @property
    def newer_at_hand(self) -> bool:
        """Whether there is something newer to load."""
        return self._receiver.newest not in (None, self.version)

    @property
    def abandoned(self) -> bool:
        """Whether the trainer went back to an earlier checkpoint, so that what these weights compute is for nothing."""
        newest = self._receiver.newest
        return newest is not None and self.version is not None and newest.lineage > self.version.lineage

    def load_newest(self, *, patience_s: float = 0.0) -> bool:
        """Load the ready version, if it is this engine's turn; returns whether it was."""

        def load(weights: Mapping[str, Tensor]) -> None:
            with self._context.timeline.span("load weights"):
                self._load(weights)

        version = self._receiver.load(load, newer_than=self.version, patience_s=patience_s)
        if version is None:
            return False
        self.version = version
        self._loaded(version)
        return True

    def wait_for(self, needed: Version) -> None:
        """Load weights of `needed` or later; returns without them only when the run stops.

        Raises:
            WeightsLate: they do not come.
        """
        context, timeout_s = self._context, self._timeout_s
        deadline = time.monotonic() + timeout_s
        while (self.version is None or self.version < needed) and not context.stopping.is_set():
            context.report("waiting for weights")
            with context.timeline.span("wait for weights", step=needed.step):
                if not self._receiver.wait_for(
                    needed.step, lineage=needed.lineage, timeout_s=timeout_s, stop=context.stopping
                ):
                    return
                loaded = self.load_newest(patience_s=_TURN_PATIENCE_S)
            if not loaded and time.monotonic() > deadline:
                raise WeightsLate(
                    f"weights of {needed} are at hand, but no turn to load them came within {timeout_s:g} s: an "
                    f"instance that swaps does not end"
                )

    def close(self) -> None:
        """Leave the weight agent."""
        self._receiver.close()
