"""`--roles rollout+actor:N`: both roles on the same devices, in turns, in every schedule and in both forms of a run."""

import itertools
import json
import signal
from collections import Counter
from pathlib import Path

import pytest
import yaml

from . import command
from .test_schedules import SAMPLES, STEPS, recipe


def sleeps(run_dir: Path) -> dict[str, list[tuple[float, float]]]:
    """Return, per rank of the roles that share devices, when it had none: (fell asleep, began to wake)."""
    found: dict[str, list[tuple[float, float]]] = {}
    for path in sorted((run_dir / "timeline").glob("*.jsonl")):
        if path.name.startswith(("rollout-", "actor-")):
            spans = [json.loads(line) for line in path.read_text().splitlines()]
            ends = [span["end"] for span in spans if span.get("name") == "sleep"]
            begins = [span["start"] for span in spans if span.get("name") == "wake up"]
            found[path.stem] = [(end, next((b for b in begins if b >= end), float("inf"))) for end in ends]
    return found


def check_never_two_sides(run_dir: Path) -> None:
    """While an instance is awake, every rank of the actor sleeps."""
    asleep = sleeps(run_dir)
    assert {name.partition("-")[0] for name in asleep} == {"rollout", "actor"}
    for name, spans in asleep.items():
        if name.startswith("rollout-"):
            awake = [(woke, slept) for (_, woke), (slept, _) in itertools.pairwise(spans)]
            assert awake, f"{name} never woke"
            for woke, slept in awake:
                for rank in (each for each in asleep if each.startswith("actor-")):
                    assert any(begin <= woke and slept <= end for begin, end in asleep[rank]), (name, woke, rank)


@pytest.mark.parametrize(
    ("mode", "bound"), [("sync", 0), ("periodic", 0), ("async", 1), ("colocate_async", 1), ("colocate_async", 2)]
)
def test_every_group_is_trained_once_within_the_bound(tmp_path: Path, mode: str, bound: int) -> None:
    settings = recipe(mode, bound)
    settings["roles"] = {"rollout+actor": 2, "ref": 1}
    settings["sim"]["switch_s"] = 0.02
    (tmp_path / "sim.yaml").write_text(yaml.safe_dump(settings))
    done = command.run("sim.yaml", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ledger = command.lines(tmp_path / "run" / "ledger.jsonl")
    assert Counter(line["group"] for line in ledger) == Counter(range(STEPS * SAMPLES))
    for line in ledger:
        assert line["step"] == line["group"] // SAMPLES + 1
        assert 0 <= line["staleness"] <= bound and line["versions"][1] <= line["step"] - 1
    swapped_inside = [line for line in ledger if line["versions"][0] < line["versions"][1]]
    assert bool(swapped_inside) == (mode == "colocate_async"), "responses go on over a switch"
    check_never_two_sides(tmp_path / "run")


def test_held_out_prompts_are_answered_in_turns_too(tmp_path: Path) -> None:
    done = command.run(
        "--roles", "rollout+actor+evaluate:1", "--steps", "4", "--run-dir", "run", "--set", "evaluate.interval=2",
        "--set", "evaluate.timeout_s=300", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    evaluated = [line["step"] for line in command.lines(tmp_path / "run" / "evaluation.jsonl")]
    assert evaluated[0] == 0 and evaluated[-1] == 4, "a version may be replaced before its turn, but not the last one"
    command.check_ledger(tmp_path / "run", groups_per_step=32, last=4)


@pytest.mark.parametrize("mode", ["periodic", "async"])
def test_rows_that_a_storage_unit_took_with_it_are_generated_in_the_rollouts_turn(tmp_path: Path, mode: str) -> None:
    """The actor may wait for them in the middle of a step: then it sleeps with its gradients."""
    bound = 0 if mode == "periodic" else 1
    with command.started(
        "--run-dir", "run", "--steps", "24", "--roles", "rollout+actor:2", "--set", f"schedule.mode={mode}",
        "--set", f"schedule.max_staleness={bound}", "--set", "algorithm.kl_coef=0", "--set", "checkpoint.interval=0",
        cwd=tmp_path,
    ) as process:  # fmt: skip
        for step in (2, 5, 8):
            command.wait_until(
                lambda step=step: command.last_step(tmp_path / "run") >= step, f"step {step}", deadline_s=100
            )
            command.kill_gang(process.pid, tmp_path / "run", "storage-0")
        assert process.wait(command.DEADLINE_S) == 0, process.communicate()
    command.check_ledger(tmp_path / "run", groups_per_step=32, last=24)


def test_rollouts_that_wait_for_tools_give_the_devices_away(tmp_path: Path) -> None:
    done = command.run(
        "quickstart-tools", "--roles", "rollout+actor:1", "--steps", "4", "--run-dir", "run", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    command.check_ledger(tmp_path / "run", groups_per_step=32, last=4)
    check_never_two_sides(tmp_path / "run")


@pytest.mark.parametrize("roles", [("rollout+actor:1", "rollout:1,actor:1"), ("rollout:1,actor:1", "rollout+actor:1")])
def test_a_run_goes_on_in_the_other_form(tmp_path: Path, roles: tuple[str, str]) -> None:
    first, second = roles
    common = ("--set", "checkpoint.interval=0", "--set", "algorithm.kl_coef=0")
    with command.started("--run-dir", "run", "--steps", "40", "--roles", first, *common, cwd=tmp_path) as process:
        command.wait_until(lambda: command.last_step(tmp_path / "run") >= 2, "two steps", deadline_s=100)
        process.send_signal(signal.SIGINT)
        assert process.wait(command.DEADLINE_S) == 75, "a stop is saved, whoever has the devices"
    last = command.last_step(tmp_path / "run") + 3
    done = command.run("--resume", "run", "--roles", second, "--steps", str(last), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    command.check_ledger(tmp_path / "run", groups_per_step=32, last=last)
