"""The project on `late`, the fake accelerator of `tests/device`: waits, planted mistakes, memory, whole runs."""

import os
import shutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

# By name: the modules of tests/device are scripts for ranks, which mypy is not told of.
plants: Any = import_module("tests.device.plants")
processes: Any = import_module("tests.device.processes")
whole_runs: Any = import_module("tests.device.whole_runs")

SCHEDULES = ("copies", "kernels")
TOLERANCE = 1e-5
_MEMORY_S = 3600
"""Deadline: bfloat16 products take eight times as long here as float32 ones."""


def run(**_: int) -> dict[str, float]:
    """Return the figures; what is wrong is printed to stderr."""
    work = Path(tempfile.mkdtemp(prefix="late-"))
    try:
        env = processes.environment(processes.build_late(work))
        return (
            _waits(env, work)
            | _megatron_waits(env, work)
            | _missed(env, work)
            | _memory_error(env, work)
            | _failed_runs(env, work)
        )
    finally:
        shutil.rmtree(work)


def _said(env: dict[str, str], work: Path, mode: str, schedule: str = "copies", **options: Any) -> list[Any] | None:
    directory = Path(tempfile.mkdtemp(dir=work)) / mode
    said: list[Any] | None = processes.run_ranks(env, directory, mode, schedule, **options)
    return said


def _waits(env: dict[str, str], work: Path) -> dict[str, float]:
    """Of the step of a single-update GRPO, but for the first micro-batch of an engine."""
    found = (_said(env, work, "steps") or [{}])[0]["grpo"]
    return {
        "syncs_per_micro_batch": max(sum(one.values()) for one in found["micro_batches"][1:]),
        "syncs_per_update": max(sum(one.values()) for one in found["updates"]),
    }


def _megatron_waits(env: dict[str, str], work: Path) -> dict[str, float]:
    """Of the `megatron` engine, with recomputed layers."""
    found = [(_said(env, work, "megatron", schedule) or [{}])[0]["megatron"]["micro_batches"] for schedule in SCHEDULES]
    return {"megatron_waits_per_micro_batch": max(sum(one.values()) for parts in found for one in parts)}


def _missed(env: dict[str, str], work: Path) -> dict[str, float]:
    """Count mistakes that neither schedule shows, and those that the CPU shows, too, which are no such mistakes."""
    right, missed = {}, []
    env = env | {"STEP_CASES": plants.CASES}
    for name, plant in plants.PLANTS.items():
        ranks = plant.num_ranks
        if plant.mode not in right:
            right[plant.mode] = _said(env, work, plant.mode, device="cpu", num_ranks=ranks)
        on_cpu = _said(env, work, plant.mode, device="cpu", num_ranks=ranks, plant=name)
        if on_cpu is None or plants.mistakes(right[plant.mode], on_cpu):
            print(f"{name}: the CPU shows it, too", file=sys.stderr)
            missed.append(name)
            continue
        shown = []
        for schedule in SCHEDULES:
            said = _said(env, work, plant.mode, schedule, num_ranks=ranks, plant=name)
            shown += [schedule] if said is None or plants.mistakes(right[plant.mode], said) else []
        print(f"{name}: shown by {' '.join(shown) or 'nothing'}", file=sys.stderr)
        missed += [] if shown else [name]
    for mode, ranks in {plant.mode: plant.num_ranks for plant in plants.PLANTS.values()}.items():
        for schedule in SCHEDULES:
            said = _said(env, work, mode, schedule, num_ranks=ranks)
            if said is None or plants.mistakes(right[mode], said):
                print(f"{mode} {schedule}: wrong without a planted mistake", file=sys.stderr)
                missed.append(mode)
    return {"planted_mistakes": len(plants.PLANTS), "planted_mistakes_missed": len(missed)}


def _memory_error(env: dict[str, str], work: Path) -> dict[str, float]:
    errors = []
    for num_ranks in (1, 2):
        for name, found in (_said(env, work, "memory", num_ranks=num_ranks, deadline_s=_MEMORY_S) or [{}])[0].items():
            errors.append(abs(found["estimated"] / found["held"] - 1))
            print(f"memory of {name}, {num_ranks} ranks: {errors[-1]:.3f} {found}", file=sys.stderr)
    return {"memory_settings": len(errors), "memory_model_error_max": max(errors, default=float("inf"))}


def _failed_runs(env: dict[str, str], work: Path) -> dict[str, float]:
    """Count whole runs on `late` that do not end, or whose metrics are not those of the CPU."""
    failed, os_env = 0, dict(os.environ)
    for case in whole_runs.CASES:
        directory = Path(tempfile.mkdtemp(dir=work))
        expected = whole_runs.run_of(case, directory, device="cpu")
        for schedule in SCHEDULES:
            os.environ.update(env | {"LATE_DEVICE_SCHEDULE": schedule})
            directory = Path(tempfile.mkdtemp(dir=work))
            try:
                found = whole_runs.run_of(case, directory, device="late")
                wrong: list[object] = [
                    (step, name, one[name], other[name])
                    for step, (one, other) in enumerate(zip(expected, found, strict=True), 1)
                    for name in one
                    if abs(one[name] - other[name]) > TOLERANCE * max(1.0, abs(one[name]))
                ]
            except (AssertionError, ValueError) as error:
                wrong = [str(error)[-500:]]
            finally:
                os.environ.clear()
                os.environ.update(os_env)
            print(f"run {case} {schedule}: {wrong or 'as on the CPU'}", file=sys.stderr)
            failed += bool(wrong)
    return {"late_runs_failed": failed}
