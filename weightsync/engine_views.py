"""Which parts of a version an engine wants, under its own names; found once per plan."""

from collections.abc import Mapping

from torch import Tensor

from asyncflow.transport.connection import Connection
from weightsync.connections import fetch_plan
from weightsync.plan import Need, Piece, match_needs
from weightsync.region import Region, RegionLayout


class EngineViews:
    """Matches plans with one engine's needs."""

    def __init__(self, needs: Mapping[str, Need] | None, *, whole: bool) -> None:
        """Args:
        needs: what the engine wants, by its own names; None: everything, by the trainer's.
        whole: the engine takes the whole model; False: its ranks share it.
        """
        self._needs = needs
        self._whole = whole
        self._known: dict[str, tuple[RegionLayout, dict[str, Piece]]] = {}

    def layout(self, digest: str, connection: Connection) -> RegionLayout:
        """Return a plan's layout, the same object every time.

        Args:
            digest: of the plan.
            connection: to an agent that knows it.

        Raises:
            PlanError: the engine does not fit the trainer.
            TransportError: the plan was not known here, and the agent is gone.
        """
        if digest not in self._known:
            plan, needs = fetch_plan(connection, digest), self._needs
            if needs is None:
                needs = {name: Need(tensor.shape) for name, tensor in plan.tensors.items()}
            self._known.setdefault(digest, (RegionLayout(plan), match_needs(plan, needs, whole=self._whole)))
        return self._known[digest][0]

    def of(self, region: Region) -> dict[str, Tensor]:
        """Return the engine's views of a region whose layout is from here."""
        return region.views(self._known[region.layout.plan.digest()][1])
