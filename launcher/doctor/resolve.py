"""Finds out what is to run here: the configuration as `asyncflow-launch` reads it, or nothing in particular."""

from dataclasses import replace
from pathlib import Path

from asyncflow.errors import ConfigError
from asyncflow.size_text import size_text
from launcher.doctor.finding import Finding, reason
from launcher.doctor.messages import RESOLVE, Order, Refused, Resolved
from launcher.doctor.needs import Needs, needs_of_machine


def resolve(order: Order) -> Resolved | Refused:
    """Resolve and check, unless that was done; writes nothing."""
    if order.needs is not None:
        return Resolved(order.needs, Finding.ok(RESOLVE, "known"))
    try:
        needs = needs_of_machine(order.run_dir, num_nodes=order.num_nodes)
        if order.config is None:
            return Resolved(_with_run_dir(needs, order), Finding.ok(RESOLVE, "none given: any run, on this machine"))
        needs = _needs_of_run(order)
    except ConfigError as error:
        return Refused(str(error))
    except Exception as error:  # noqa: BLE001 (the boundary: with packages missing, the checks are what is wanted)
        text = f"cannot be read here ({reason(error)}), so this looks at the machine alone"
        remedy = "do first what the other findings say, `packages` above all"
        return Resolved(needs, Finding.error(RESOLVE, text, remedy))
    text = (
        f"{order.config}: {needs.processes} workers on {needs.device}, up to {needs.threads} threads, "
        f"{needs.descriptors} files a process, {size_text(needs.memory_bytes)} of memory"
    )
    return Resolved(needs, Finding.ok(RESOLVE, text))


def _needs_of_run(order: Order) -> Needs:
    from launcher.doctor.estimate import needs_of
    from launcher.node_options import ONE_NODE, NodePlace
    from launcher.request import Request
    from launcher.rundir import RUNS

    place, run_dir = ONE_NODE, order.run_dir
    if order.num_nodes > 1:
        place, run_dir = NodePlace(order.num_nodes), order.run_dir or str(RUNS / "where-nodes-meet")  # it is not made
    accepted = Request(order.config, order.roles, order.overrides, run_dir, place=place).accept()
    model_dir = Path(accepted.checked.config.model.path)
    model_bytes = sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    return needs_of(accepted, model_bytes=model_bytes, num_nodes=order.num_nodes)


def _with_run_dir(needs: Needs, order: Order) -> Needs:
    from launcher.paths import user_path

    return needs if order.run_dir is None else replace(needs, run_dir=str(user_path(order.run_dir, "--run-dir")))
