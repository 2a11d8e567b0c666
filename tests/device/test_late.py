"""The project on `late`, an accelerator whose asynchrony is real, and mistakes that it must show."""

import pytest

from . import handover_mode
from .conftest import Run
from .plants import CASES, PLANTS, mistakes

pytestmark = pytest.mark.timeout(900)

SCHEDULES = ("copies", "kernels")
SHOWN = {
    "copies": {"read before the copy's end", "host buffer used again", "freed while another stream reads",
               "group not waited for"},
    "kernels": {"copied before the kernel's end"},
}  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_device_shows_each_mistake_and_nothing_else(run: Run, schedule: str) -> None:
    (said,) = run("mistakes", schedule)
    assert {name: right for name, (_, right, _) in said.items()} == {name: want for name, (_, _, want) in said.items()}
    assert {name for name, (wrong, _, want) in said.items() if wrong != want} >= SHOWN[schedule]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_and_its_copies_equal_those_of_the_cpu(run: Run, schedule: str) -> None:
    """Of two ranks: updates, a version of the weights and a checkpoint that are copied beside the next step."""
    expected, actual = run("train", num_ranks=2, device="cpu"), run("train", schedule, num_ranks=2)
    for rank, (one, other) in enumerate(zip(expected, actual, strict=True)):
        assert other["norms"] == pytest.approx(one["norms"], rel=1e-5)
        assert other["log_probs"] == pytest.approx(one["log_probs"], abs=1e-5)
        assert (other["wrong_pieces"], other["lost_in_checkpoint"]) == (0, 0)
        assert other["contexts"] == [3 + rank], "a thread used a device that is not this rank's"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_generation_equals_that_of_the_cpu(run: Run, schedule: str) -> None:
    (expected,), (actual,) = run("generate", device="cpu"), run("generate", schedule)
    assert actual["tokens"] == expected["tokens"]
    for one, other in zip(expected["log_probs"], actual["log_probs"], strict=True):
        assert other == pytest.approx(one, abs=1e-5)
    assert actual["contexts"] == [3]


def test_a_group_meets_within_its_deadline_and_touches_its_device_alone(run: Run) -> None:
    first, second = run("group", num_ranks=2)
    assert first["broadcast"] == second["broadcast"] == [1.0] * 4
    assert first["late"], "it waited for a member that never comes"
    assert (first["contexts"], second["contexts"]) == ([3], [4])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_are_broadcast_from_device_to_device(run: Run, schedule: str) -> None:
    """Two senders, one receiver, one group; the host sees the checksums alone."""
    *senders, receiver = run("broadcast", schedule, num_ranks=3)
    assert (receiver["came"], receiver["wrong"]) == (3, 0)
    assert [said["host_copies"] for said in (*senders, receiver)] == [0, 0, 0]
    assert [said["contexts"] for said in (*senders, receiver)] == [[3], [4], [5]]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_of_a_divided_copy_are_in_the_group_of_their_stage_alone(run: Run, schedule: str) -> None:
    """A group per stage of the trainer, one after the other, and none beside a collective of the copy."""
    _, _, generator, *copy = run("stages", schedule, num_ranks=5)
    assert all(said["came"] >= 3 and not said["wrong"] for said in (generator, *copy))
    assert [said["groups"] for said in (generator, *copy)] == [2, 1, 1]
    assert [said["bytes"] for said in copy] == [generator["bytes"] // 2] * 2
    assert [said["in_flight"] for said in (generator, *copy)] == [0, 0, 0]
    assert min(said["computed"] for said in copy) > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_generator_of_two_ranks_has_no_collective_in_flight_in_a_broadcast(run: Run, schedule: str) -> None:
    _, said = run("paused", schedule, num_ranks=2)
    assert min(said["came"]) >= 3
    assert (said["wrong"], said["in_flight"]) == ([0, 0], [0, 0])
    assert min(said["tokens"]) > 0


def test_without_the_pause_the_count_would_tell(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WITHOUT_PAUSE", "1")
    found = run("paused", num_ranks=2, may_fail=True)
    assert not found or min(found[1]["in_flight"]) > 0, "neither counted nor stuck, one in the other's collective"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shares_memory", [True, False])
def test_a_generator_reads_what_the_trainer_left_on_its_devices(
    run: Run, schedule: str, shares_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an engine of one rank, and of two, which read a half each and pass it on. Also from a trainer rank that
    started again, and through shared memory where devices share none."""
    if shares_memory:
        monkeypatch.setenv("LATE_DEVICE_IPC", "1")
    *_, one, ranks = run("handover", schedule, num_ranks=4)
    num_bytes, num_loads = handover_mode.NUM_BYTES, len(handover_mode.VERSIONS)
    each = [num_bytes, 0] if shares_memory else [0, num_bytes]
    assert one == {"wrong": 0, "loads": [each] * num_loads}
    assert (ranks["wrong"], ranks["sum"]) == (0, [num_loads * part for part in each])
    assert min(max(way) for way in ranks["each"]) > 0.4 * num_loads * num_bytes, "each rank reads about half"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_of_a_replica_go_from_device_to_device_as_they_are(run: Run, schedule: str) -> None:
    for said in run("rows", schedule, num_ranks=3):
        assert said["values"] > 100_000
        assert (said["rounds"], said["different"]) == (18, 0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tensors_that_are_copied_ahead_have_arrived_when_they_are_used(run: Run, schedule: str) -> None:
    (expected,), (actual,) = run("ahead", device="cpu"), run("ahead", schedule)
    assert actual["sums"] == expected["sums"]
    assert actual["contexts"] == [3]


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_mistake_is_caught(run: Run, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEP_CASES", CASES)
    plant = PLANTS[name]
    how = {"num_ranks": plant.num_ranks, "plant": name}
    expected = run(plant.mode, device="cpu", **how)  # it works, and so does the mistake
    said = run(plant.mode, plant.schedule, may_fail=True, **how)
    assert not said or mistakes(expected, said)
