"""Weights from two trainer ranks to the receivers of one node: whole, in order, once in memory, with reasons."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import wait_until
from weight_model import SHAPES, needs, same, weights
from weight_run import WeightRun, ask, ask_all, steps

from asyncflow.errors import PlanError, WeightSyncError
from weightsync.plan import Box, Need
from weightsync.version import Version

LAST = 40


@pytest.mark.parametrize(
    ("cut", "dtype"), [pytest.param("rows", "float32", marks=pytest.mark.gate), ("columns", "bfloat16")]
)
def test_every_version_that_a_receiver_loads_is_whole_and_what_it_claims(
    weight_run: WeightRun, cut: str, dtype: str
) -> None:
    weight_run.configure(cut=cut, dtype=dtype)
    quick = weight_run.start_node("quick-0", "quick-1", "slow", "slices", dtype=dtype)
    slow = quick.pop(2)
    last = Version(0, LAST)
    for child in (*quick, *weight_run.trainers):
        child.tell(("follow", last) if child in quick else ("publish", *steps(0, LAST)))
    for trainer in weight_run.trainers:
        assert len(trainer.hear()) == LAST + 1
    for child in quick:
        loads = child.hear()
        assert all(whole for _, whole in loads)
        assert [version for version, _ in loads] == sorted({version for version, _ in loads})
        assert loads[-1] == (last, True)
    assert ask(slow, "load", LAST) == (last, True), "versions that nobody waited for are skipped"
    assert weight_run.status().newest == last
    weight_run.end(*weight_run.trainers, *quick, slow, weight_run.agent)


@pytest.mark.gate
def test_receivers_that_share_the_model_get_their_own_slices(weight_run: WeightRun) -> None:
    weight_run.configure(dtype="bfloat16")
    weight_run.start_node(dtype="bfloat16")
    boxes = {"embed": Box((0, 4), (48, 4)), "head": Box((2, 10), (3, 17)), "norm": Box((0,), (8,))}
    receiver = weight_run.start_receivers(
        "tp-1", wanted={name: Need(SHAPES[name], box=box) for name, box in boxes.items()}
    )[0]
    weight_run.publish(*steps(0, 3))
    version, loaded = ask(receiver, "load", 3)
    expected = weights(Version(0, 3))
    assert version == Version(0, 3)
    for name, box in boxes.items():
        assert torch.equal(loaded[name], expected[name][box.slices].to(torch.bfloat16))


@pytest.mark.gate
def test_newest_lineage_wins_over_newest_step(weight_run: WeightRun) -> None:
    receiver = weight_run.start_node("rollout-0")[0]
    weight_run.publish(*steps(5, 9))
    assert ask(receiver, "load", 9) == (Version(0, 9), True)
    weight_run.end(*weight_run.trainers)
    weight_run.configure(epoch="1", num_ranks=3)
    weight_run.start_trainers()
    weight_run.publish(Version(1, 7))
    weight_run.publish(Version(1, 8))
    assert ask(receiver, "load_from", Version(1, 8)) == (Version(1, 8), True)
    assert ask(weight_run.start_receivers("late")[0], "load", 0) == (Version(1, 8), True)


@pytest.mark.gate
def test_weights_do_not_change_under_a_receiver_that_loads_them(weight_run: WeightRun) -> None:
    weight_run.configure(timeout_s=4.0)  # then a version that is loaded for so long no longer has its slot
    held, other = weight_run.start_node("rollout-0", "rollout-1")
    weight_run.publish(Version(0, 1))
    held.tell(("load_slowly", 1))
    assert held.hear() == "inside"
    weight_run.publish(*steps(2, 12))
    assert ask(other, "load", 12) == (Version(0, 12), True)
    held.tell("go on")
    assert held.hear() == (Version(0, 1), True)
    assert ask(held, "load", 12) == (Version(0, 12), True)


def test_one_copy_per_version_is_shared_by_all_processes_of_a_node(weight_run: WeightRun) -> None:
    weight_run.configure(wide=2000, bucket_bytes=2**20)
    receivers = weight_run.start_node("a", "b", "c", "d")
    region_bytes = weight_run.plan().region_bytes
    for version in steps(1, 5):
        weight_run.publish(version)
        assert ask_all(receivers, "load", version.step) == [(version, True)] * 4
    used = len(weight_run.status().versions)
    everybody = [weight_run.agent, *weight_run.trainers, *receivers]
    total = sum(_slot_pss(child.process.pid, region_bytes) for child in everybody)
    assert region_bytes > 3_000_000
    assert region_bytes < total <= 1.1 * used * region_bytes


def test_trainer_that_ends_leaves_its_last_version_behind(weight_run: WeightRun) -> None:
    receiver = weight_run.start_node("rollout-0")[0]
    weight_run.publish(*steps(0, 4))
    weight_run.end(*weight_run.trainers)
    assert ask(receiver, "load", 4) == (Version(0, 4), True)
    assert ask(receiver, "load_again") == (Version(0, 4), True)
    assert ask(weight_run.start_receivers("late")[0], "load", 4) == (Version(0, 4), True)
    serving = {"rollout-0": Version(0, 4), "late": Version(0, 4)}
    wait_until(lambda: weight_run.status().serving == serving, "both have told", deadline_s=60)


def test_wait_that_ends_names_its_reason(weight_run: WeightRun) -> None:
    early = weight_run.start_receivers("early")[0]
    error = ask(early, "load", 1, 0.2)
    assert isinstance(error, WeightSyncError)
    assert re.search(r"step 1 did not come within 0\.2 s.*weights-0", str(error))
    weight_run.start_node()
    weight_run.publish(Version(0, 1))
    assert ask(early, "load", 1) == (Version(0, 1), True)
    assert re.search(r"step 9 did not come within 0\.2 s; weights-0 has none", str(ask(early, "load", 9, 0.2)))
    other = {**needs(), "head": Need((8, 51))}
    stranger = weight_run.start_receivers("stranger", wanted=other)[0]
    error = ask(stranger, "load", 1)
    assert isinstance(error, PlanError)
    assert re.search(r"head: shape \(8, 51\) at the receiver, \(8, 50\) at the trainer", str(error))


def test_at_most_so_many_swap_at_the_same_time(weight_run: WeightRun, tmp_path: Path) -> None:
    log = tmp_path / "swaps"
    agent_settings = {"max_updating": 1}
    weight_run.start_node(**agent_settings)
    receivers = weight_run.start_receivers("a", "b", "c", log=str(log))
    for version in steps(1, 5):
        weight_run.publish(version)
        assert ask_all(receivers, "load", version.step) == [(version, True)] * 3
    events = [line.split() for line in log.read_text().splitlines()]
    assert len(events) == 30
    for begin, end in zip(events[::2], events[1::2], strict=True):
        assert (begin[0], end[0], begin[1]) == ("begin", "end", end[1])


def test_receiver_that_is_killed_while_it_swaps_passes_the_turn_on(weight_run: WeightRun) -> None:
    swapping, waiting, impatient = weight_run.start_node("a", "b", "c", max_updating=1)
    weight_run.publish(Version(0, 1))
    swapping.tell(("load_slowly", 1))
    assert swapping.hear() == "inside"
    assert ask(impatient, "load", 1, 30.0, 0.0) is None
    assert ask(impatient, "load", 1, 30.0, 0.05) is None
    waiting.tell(("load", 1))
    swapping.kill()
    assert waiting.hear() == (Version(0, 1), True)
    assert ask(impatient, "load", 1) == (Version(0, 1), True)


def _slot_pss(pid: int, region_bytes: int) -> int:
    total, counts = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        fields: list[Any] = line.split()
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            start, end = (int(part, 16) for part in fields[0].split("-"))
            counts = "memfd:asyncflow" in line and region_bytes <= end - start < region_bytes + 3 * 4096
        elif counts and fields[0] == "Pss:":
            total += 1024 * int(fields[1])
    return total


def test_comparison_of_these_tests_sees_a_wrong_bit() -> None:
    loaded = {name: value.clone() for name, value in weights(Version(0, 3)).items()}
    assert same(loaded, Version(0, 3))
    loaded["head"].view(torch.int32)[7, 49] ^= 1
    assert not same(loaded, Version(0, 3))
