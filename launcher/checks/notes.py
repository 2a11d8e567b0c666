"""What the start of a run says although it is no error: settings that are allowed, and rarely meant. Pure.

`--dry-run` shows the same lines. What would train on something else than the user meant is refused instead,
by the other checks.
"""

from collections.abc import Iterator, Sequence

from asyncflow.job import GangSpec
from launcher.checks.algorithms import settings_without_effect
from launcher.checks.devices import Devices
from workers.settings.run import RunConfig

_MOST_PROCESSES_PER_CORE = 16
"""The quickstart's seventeen processes are fine on two cores: they mostly wait."""


def start_notes(config: RunConfig, gangs: Sequence[GangSpec], devices: Devices, *, num_cores: int) -> tuple[str, ...]:
    """Return a line for each thing worth knowing.

    Args:
        config: resolved.
        gangs: of the run, placed.
        devices: of each node.
        num_cores: of this node.
    """
    return (
        *_outside_roles(config),
        *_crowded_nodes(gangs, devices, num_cores),
        *_small_micro_batches(config),
        *_filtered_draws(config),
        *filter(None, [settings_without_effect(config)]),
    )


def _outside_roles(config: RunConfig) -> Iterator[str]:
    for role in config.outside_roles:
        yield (
            f"roles: {role}:0 starts no {role} here, so the run waits for processes outside that do its work "
            f"(docs/outside.md)"
        )


def _crowded_nodes(gangs: Sequence[GangSpec], devices: Devices, num_cores: int) -> Iterator[str]:
    nodes = {node for gang in gangs for node in gang.nodes}
    most = max((sum(gang.nodes.count(node) for gang in gangs) for node in nodes), default=0)
    if most > _MOST_PROCESSES_PER_CORE * num_cores:
        cores = f"{num_cores} core{'s' * (num_cores != 1)}"
        where = "all of them compute on these" if devices.kind == "cpu" else "each needs some of their time"
        yield f"roles: {most} processes share {cores} of a node, and {where}; launch fewer ranks"


def _small_micro_batches(config: RunConfig) -> Iterator[str]:
    for role in sorted({"actor", "critic"} & config.roles.keys()):
        budget, longest = getattr(config, role).max_tokens_per_micro_batch, config.rollout.max_response_tokens
        if 0 < budget < longest:
            yield (
                f"{role}.max_tokens_per_micro_batch: {budget} is less than one response may have "
                f"(rollout.max_response_tokens {longest}), so many micro-batches hold a single sample; raise it to a "
                f"multiple of that"
            )


def _filtered_draws(config: RunConfig) -> Iterator[str]:
    for name, off in (("top_p", 1), ("top_k", 0)):
        if (value := getattr(config.rollout, name)) != off:
            yield (
                f"rollout.{name} {value:g} draws from a part of the distribution, and the trainer computes with the "
                f"whole: what it leaves out is never explored, and gradients are those of other samples; "
                f"rollout.{name} {off} is what the formulas assume"
            )
