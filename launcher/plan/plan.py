"""What the search finds: one way to use the devices, with the run as it was simulated. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.plan.simulation import Simulated
from workers.settings.dataflow import roles_on_device
from workers.settings.run import RunConfig


@dataclass(frozen=True)
class Plan:
    """One way to use the devices, simulated.

    Attributes:
        config: with its roles, layouts and batches.
        changes: of the configuration, beside the roles, as `--set` takes them.
        bound_s: a step takes at least so long.
        step_s, tokens_per_s: of the simulated run; tokens of responses.
        idle: role -> share of the time in which its workers do not compute.
        headroom_gb: device memory that the fullest rank leaves; None: not known.
        simulated: the run.
    """

    config: RunConfig
    changes: tuple[str, ...]
    bound_s: float
    step_s: float
    tokens_per_s: float
    idle: Mapping[str, float]
    headroom_gb: float | None
    simulated: Simulated

    @property
    def num_devices(self) -> int:
        """Devices that it takes."""
        return devices_of(self.config)

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens of responses per second and device."""
        return self.tokens_per_s / self.num_devices

    def values(self) -> dict[str, Any]:
        """Return it as `--json` and plan.json have it."""
        return {
            "roles": self.config.roles,
            "set": list(self.changes),
            "devices": self.num_devices,
            "step_s": self.step_s,
            "bound_s": self.bound_s,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "idle_fraction": dict(self.idle),
            "memory_headroom_gb": self.headroom_gb,
        }

    @property
    def roles_text(self) -> str:
        """As `--roles` takes them."""
        return ",".join(f"{role}:{number}" for role, number in self.config.roles.items())


def devices_of(config: RunConfig) -> int:
    """Return the devices that its roles take."""
    taking = roles_on_device(reward_model=config.reward.model is not None)
    return sum(number for role, number in config.roles.items() if role in taking)
