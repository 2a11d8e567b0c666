"""What starts and ends the ranks of gangs on a host."""

from typing import Protocol

from asyncflow.job import GangSpec


class GangHost(Protocol):
    """One host, or all of them. Called by one thread; ends of gangs are reported elsewhere, as `GangExited`."""

    def start(self, gang: GangSpec, attempt: int) -> None:
        """Start this host's ranks of a gang; returns at once."""

    def kill(self, gang: str) -> None:
        """SIGKILL its ranks here, also those that are only about to start; idempotent, and nothing for one unknown."""

    def dump_stacks(self) -> None:
        """Have every process here write the stacks of its threads into its log."""

    def close(self, timeout_s: float) -> None:
        """Kill what is left and wait until it is gone."""
