"""What a run is thought to take: never less than was measured, and not many times more."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from asyncflow.errors import ConfigError
from asyncflow.job import GangSpec
from launcher.checks.placement import Devices, place_gangs
from launcher.checks.preflight import Preflight, check_run
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.doctor.doctor_child import resolve
from launcher.doctor.estimate import (
    channels_of,
    checkpoint_bytes,
    descriptors,
    engines_of,
    memory_parts,
    needs_of,
    num_checkpoints,
    queue_bytes,
    threads,
)
from launcher.doctor.findings import Order
from launcher.request.request import Accepted, Request
from workers.settings.algorithms import DistillConfig

WriteConfig = Callable[..., Path]
PARAMETERS = 1_000_000
RESPONSES = 294_912
"""Bytes of the rows that the quickstart keeps alive: 1024 of 12 tokens of 24 bytes."""


def preflight(*overrides: str, roles: str | None = None, recipe: str = "quickstart") -> Preflight:
    config = load_config(find_recipe(recipe), overrides=("launcher.device=cpu", *overrides), roles=roles)
    return replace(check_run(config), num_parameters=PARAMETERS)


def gang(gangs: tuple[GangSpec, ...], name: str) -> GangSpec:
    return next(each for each in gangs if each.name == name)


MEASURED = [
    # roles, units, controllers; channels of controller-0, storage-0; descriptors of both, of the launcher; threads
    ("rollout:2,actor:1,ref:1", 2, 1, (10, 6), (60, 39, 114), 161),
    ("rollout:3,actor:2,ref:1", 4, 2, (16, 9), (78, 50, 184), 339),
    ("rollout:8,actor:4,ref:2", 2, 1, (20, 14), (89, 66, 241), 398),
    ("rollout:6,actor:2,ref:1,reward:2,evaluate:1", 8, 2, (25, 14), (112, 65, 310), 666),
]


@pytest.mark.parametrize(("roles", "units", "controllers", "channels", "open_files", "all_threads"), MEASURED)
def test_what_was_measured_fits_into_the_estimate(
    roles: str,
    units: int,
    controllers: int,
    channels: tuple[int, int],
    open_files: tuple[int, int, int],
    all_threads: int,
) -> None:
    checked = preflight(f"tq.num_storage_units={units}", f"tq.num_controllers={controllers}", roles=roles)
    for name, measured in zip(("controller-0", "storage-0"), channels, strict=True):
        assert measured <= channels_of(gang(checked.gangs, name), checked.gangs) <= 4 * measured
    assert max(open_files) <= descriptors(checked.gangs) <= 2 * max(open_files)
    assert all_threads <= threads(checked) <= 2 * all_threads


def test_the_launcher_has_most_descriptors_in_a_large_run() -> None:
    ranks = tuple(GangSpec(f"rollout-{k}", "rollout", k, 1, ("cpu",)) for k in range(64))
    services = (
        GangSpec("controller-0", "controller", 0, 1, ("cpu",)),
        GangSpec("storage-0", "storage", 0, 1, ("cpu",)),
    )
    assert descriptors(services + ranks) == 40 + 16 * 66 > 1024


def test_memory_is_counted_where_it_is() -> None:
    parts = memory_parts(preflight(roles="rollout:2,actor:1,ref:1"))
    assert parts["weight slots"] == 3 * PARAMETERS * 4
    assert parts["actor"] == 16 * PARAMETERS
    assert (parts["rollout"], parts["ref"]) == (2 * PARAMETERS * 4, PARAMETERS * 4)
    assert parts["broadcasts"] == 0
    assert parts["processes"] == 400e6 + 4 * 40e6 + 4 * 80e6


def test_element_types_and_the_path_of_weights_count() -> None:
    broadcast = preflight("weightsync.path=broadcast", "model.dtype=bfloat16", roles="rollout:2,actor:1,ref:1")
    parts = memory_parts(broadcast)
    assert parts["weight slots"] == 3 * PARAMETERS * 2
    assert (parts["rollout"], parts["ref"]) == (4 * PARAMETERS * 2, PARAMETERS * 2), "the next version comes meanwhile"
    wide = memory_parts(preflight("weightsync.dtype=float32", "model.dtype=bfloat16"))
    assert wide["weight slots"] == 3 * PARAMETERS * 4


@pytest.mark.parametrize(
    ("roles", "changes", "num_bytes"),
    [
        ("rollout:1,actor:1,ref:1", ("actor.autocast=bfloat16",), 18),
        ("rollout:1,actor:2,ref:1", ("actor.autocast=bfloat16",), 16),
        ("rollout:1,actor:1,ref:1", ("algorithm.name=ppo", "actor.autocast=bfloat16"), 18 + 16),
        ("rollout:1,actor:2,critic:1,ref:1", ("algorithm.name=ppo", "critic.autocast=bfloat16"), 16 + 18),
        ("rollout:1,actor:2,ref:1", ("algorithm.name=ppo", "critic.autocast=bfloat16"), 16 + 16),
    ],
)
def test_one_rank_in_bfloat16_has_a_copy_of_its_weights(roles: str, changes: tuple[str, ...], num_bytes: int) -> None:
    parts = memory_parts(preflight(*changes, roles=roles))
    assert parts["actor"] + parts.get("critic", 0) == num_bytes * PARAMETERS


def test_policies_that_the_actor_keeps_count() -> None:
    """One for a step's later updates, the reference; without weights also one that may be older."""
    changes, roles = ("actor.tri_model=true", "actor.num_mini_batches=2"), "rollout:2,actor:1"
    assert memory_parts(preflight(*changes, roles=roles))["actor"] == (16 + 2 * 4) * PARAMETERS
    without_weights = preflight(*changes, "algorithm.off_policy.method=none", roles=roles)
    assert memory_parts(without_weights)["actor"] == (16 + 3 * 4) * PARAMETERS


def test_a_reference_that_the_actor_hosts_counts_for_each_of_its_ranks() -> None:
    assert memory_parts(preflight(roles="rollout:1,actor:2"))["actor"] == (16 + 2 * 4) * PARAMETERS


def test_models_on_a_device_take_no_host_memory() -> None:
    checked = preflight(roles="rollout:2,actor:1,ref:1")
    devices = Devices("cuda", 4)
    parts = memory_parts(replace(checked, devices=devices, gangs=place_gangs(checked.config, devices)))
    assert not parts.keys() & {"actor", "rollout", "ref"}
    assert parts["weight slots"] > 0
    assert parts["processes"] == 400e6 + 4 * 40e6 + 4 * 2e9


def test_what_sleeps_waits_in_host_memory() -> None:
    """Of a generator that is the base to which versions add an adapter; a whole version replaces all of it."""
    found = []
    for changes in ((), ("lora={rank: 2}", "weightsync.lora=merged"), ("lora={rank: 2}", "weightsync.lora=adapter")):
        checked = preflight(*changes, roles="rollout+actor:2")
        devices = Devices("cuda", 2)
        found.append(memory_parts(replace(checked, devices=devices, gangs=place_gangs(checked.config, devices))))
    assert found[0]["actor asleep"] == (16 + 2 * 4) * PARAMETERS > found[1]["actor asleep"] > 0
    assert [parts["bases asleep"] for parts in found] == [0, 0, 2 * 4 * (PARAMETERS + checked.trained.total)]


def test_processes_of_vllm_count() -> None:
    checked = preflight(
        "rollout.engine=vllm", "vllm.dtype=bfloat16", "vllm.tensor_parallel_size=4", roles="rollout:8,actor:1"
    )
    vllm = checked.config.vllm.model_copy(update={"tensor_parallel_size": 1})
    plain = place_gangs(checked.config.model_copy(update={"vllm": vllm}), Devices("npu", 9))
    shared = place_gangs(checked.config, Devices("npu", 9))
    alone, together = (replace(checked, devices=Devices("npu", 9), gangs=gangs) for gangs in (plain, shared))
    assert memory_parts(together)["vllm slots"] == 0, "its ranks read the agent's memory"
    difference = memory_parts(together)["processes"] - memory_parts(alone)["processes"]
    assert difference == (2 + 2 * 5 - 8 - 8) * 2 * 10**9, "a rollout, an engine and four ranks, against a rollout each"


def test_a_simulated_model_is_as_large_as_it_says() -> None:
    engines = ("rollout.engine=sim", "actor.engine=sim", "ref.engine=sim", "sim.parameters=1000")
    assert memory_parts(preflight(*engines))["weight slots"] == 3 * 1000 * 4


def test_rows_of_the_queue() -> None:
    config = preflight().config  # 32 x 16 rows a step, one step ahead, 8 + 4 tokens
    assert queue_bytes(config) == 512 * 2 * 12 * 24
    assert queue_bytes(preflight("tq.max_live_bytes=1000").config) == 1000
    likeliest = preflight("algorithm={name: dppo, divergence_top_k: 16, kl_coef: 0.1}").config  # 8 bytes each
    assert queue_bytes(likeliest) == 512 * 2 * (12 * 24 + 4 * 16 * 8)
    retained = preflight("tq.retain_until_checkpoint=true", "checkpoint.interval=5").config
    assert queue_bytes(retained) == 512 * (2 + 5) * 12 * 24
    spilled = preflight("tq.retain_until_checkpoint=true", "tq.spill_directory=/tmp").config
    assert queue_bytes(spilled) == 512 * 2 * 12 * 24
    kept = preflight("rollout.keep_sampling_mask=true", "rollout.top_k=10").config
    assert queue_bytes(kept) == 512 * 2 * (12 * 24 + 4 * 4 * 10)
    taught = config.model_copy(update={"algorithm": DistillConfig(top_k=16)})
    assert queue_bytes(taught) == 512 * 2 * (12 * 24 + 4 * 8 * 16)


@pytest.mark.parametrize(
    ("overrides", "size"),
    [
        ((), 13 * PARAMETERS + 7 + RESPONSES),
        (("checkpoint.export_hf=false",), 13 * PARAMETERS + RESPONSES),
        (("algorithm.ref_update_interval=2",), 13 * PARAMETERS + 14 + RESPONSES),
    ],
)
def test_a_checkpoint_has_weights_moments_and_exports(overrides: tuple[str, ...], size: int) -> None:
    assert checkpoint_bytes(preflight(*overrides), model_bytes=7) == size


def test_a_checkpoint_of_an_adapter_has_it_beside_the_exported_model_and_as_the_reference() -> None:
    own = preflight("lora={rank: 2}")
    trained = own.trained.total
    assert checkpoint_bytes(own, model_bytes=7) == (13 + 4) * trained + 7 + RESPONSES
    moving = ("lora={rank: 2}", "algorithm.ref_update_interval=2")
    adapters, models = (preflight(*moving, f"weightsync.lora={sent}") for sent in ("adapter", "merged"))
    assert checkpoint_bytes(adapters, model_bytes=7) == (13 + 4 + 4) * trained + 7 + RESPONSES
    assert checkpoint_bytes(models, model_bytes=7) == (13 + 4) * trained + 14 + RESPONSES


@pytest.mark.parametrize(
    ("overrides", "number"),
    [
        ((), 3),
        (("steps=20",), 1),
        (("checkpoint.interval=0",), 1),
        (("checkpoint.keep_last=9",), 3),
        (("steps=200", "checkpoint.keep_every=50"), 5),
    ],
)
def test_checkpoints_at_the_same_time(overrides: tuple[str, ...], number: int) -> None:
    assert num_checkpoints(preflight(*overrides).config) == number


def test_engines_are_those_of_what_runs() -> None:
    assert engines_of(preflight().config) == {"": ("hf", "fsdp")}
    sims = ("rollout.engine=sim", "actor.engine=sim", "algorithm.kl_coef=0")
    assert engines_of(preflight(*sims, roles="rollout:1,actor:1").config) == {"": ("sim",)}


def test_needs_are_split_over_nodes(tmp_path: Path) -> None:
    accepted = Accepted(find_recipe("quickstart"), tmp_path / "run", preflight(), None)
    one, two = (needs_of(accepted, model_bytes=7, num_nodes=number) for number in (1, 2))
    assert one.processes == 2 * two.processes == 8
    assert one.memory_bytes == pytest.approx(2 * two.memory_bytes, abs=10)
    assert one.descriptors == two.descriptors
    assert one.memory_parts.startswith("processes 880 MB, actor 16 MB, ")
    assert (one.run_dir, one.device, one.backend, one.num_checkpoints) == (str(tmp_path / "run"), "cpu", "memory", 3)


def test_parts_that_are_empty_are_not_named(write_config: WriteConfig) -> None:
    accepted = Request(str(write_config())).accept_run()
    assert "broadcasts" not in needs_of(accepted, model_bytes=0, num_nodes=1).memory_parts


@pytest.mark.parametrize("run_dir", [None, "shared"])
def test_configuration_is_placed_on_as_many_nodes_as_there_are(
    run_dir: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.checks.preflight.find_devices", lambda _: Devices("npu", 5))
    given = None if run_dir is None else str(tmp_path / run_dir)
    order = Order("quickstart", "rollout:6,actor:2,ref:1", ("weightsync.path=staged",), given)
    assert resolve(replace(order, num_nodes=2)).needs.num_nodes == 2
    with pytest.raises(ConfigError):  # nine ranks, five devices
        resolve(order)
