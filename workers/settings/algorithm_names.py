"""Which algorithms there are, and the settings of section `algorithm`, whose `name` chooses its class. Torch-free."""

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import AfterValidator, ConfigDict, Discriminator, Tag

from asyncflow.registry import Registry
from workers.settings.algorithms import (
    CISPOConfig,
    DAPOConfig,
    DPPOConfig,
    GRPOConfig,
    GSPOConfig,
    KlLossConfig,
    PolicyConfig,
    PPOConfig,
    ReinforcePlusPlusConfig,
    RLOOConfig,
)
from workers.settings.dataflow import Task

ALGORITHMS: Mapping[str, type[PolicyConfig]] = MappingProxyType(
    {
        "grpo": GRPOConfig,
        "dapo": DAPOConfig,
        "rloo": RLOOConfig,
        "reinforce_plus_plus": ReinforcePlusPlusConfig,
        "gspo": GSPOConfig,
        "cispo": CISPOConfig,
        "dppo": DPPOConfig,
        "ppo": PPOConfig,
    }
)
"""Name -> settings, which name the class."""

NAMES = Registry("asyncflow.algorithms", {name: kind.implementation for name, kind in ALGORITHMS.items()})
"""What `algorithm.name` may say."""


class OutsideConfig(KlLossConfig):
    """An algorithm of your own: a class outside the package, with settings of its own beside those of every algorithm.

    The launcher has a child import it and ask its `Config` (`workers.roles.own_classes`); here is what that answered.
    """

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, AfterValidator(NAMES.resolve)] = "module:Class"
    """`module:Class`, a `workers.algorithms.algorithm.Algorithm`."""
    dataflow: tuple[Task, ...] = ()
    """Its tasks; leave it out: its `Config` says so (`tasks`)."""
    needs_group_size: int = 1
    """Responses per prompt that it needs to compare; leave it out: its `Config` says so (`min_group_size`)."""
    needs_whole_step: bool = False
    """Whether nothing trains before the step's last row is there; leave it out: the class says so (`whole_step`)."""

    @property
    def min_group_size(self) -> int:
        """As its `Config` says."""
        return self.needs_group_size

    @property
    def whole_step(self) -> bool:
        """As the class says."""
        return self.needs_whole_step

    def tasks(self, *, old_log_probs: bool = False) -> tuple[Task, ...]:
        """As its `Config` says of this run."""
        assert self.dataflow, "the launcher has its child ask for them first"
        return self.dataflow


def _name_of(section: Any) -> Any:
    """Return the algorithm that a section is of; without a name it is GRPO."""
    name = section.get("name", "grpo") if isinstance(section, Mapping) else getattr(section, "name", None)
    with contextlib.suppress(ValueError):  # a name that does not exist has no settings, either
        return "outside" if isinstance(name, str) and ":" in NAMES.resolve(name) else name
    return name


if TYPE_CHECKING:
    AlgorithmConfig = PolicyConfig
else:
    _kinds = {**ALGORITHMS, "outside": OutsideConfig}
    AlgorithmConfig = Annotated[
        Union[tuple(Annotated[kind, Tag(name)] for name, kind in _kinds.items())],  # noqa: UP007
        Discriminator(_name_of),
    ]
    """Objective of the actor: one of the settings above."""
