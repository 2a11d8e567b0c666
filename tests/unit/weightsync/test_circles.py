"""The groups of a broadcast: nobody is in one whose senders have nothing for it, and devices have few."""

from collections.abc import Sequence

from weightsync.broadcast_group import list_circles, needed_senders, senders_of
from weightsync.plan import Box, Piece, ShardSpec, TransferPlan, plan_transfer

# Two layers of a matrix that tensor-parallel ranks divide, and a norm that they all hold.
ROWS, WIDTH, LAYERS = 8, 4, 2
EACH = 4 * ROWS * WIDTH // 2


def held_by(tensor: int, stages: Sequence[int]) -> list[ShardSpec]:
    """Return what a rank holds of the layers in `stages`, one layer each."""
    half = Box((tensor * ROWS // 2, 0), (ROWS // 2, WIDTH))
    return [
        spec
        for layer in stages
        for spec in (
            ShardSpec(f"{layer}.w", (ROWS, WIDTH), "float32", half),
            ShardSpec(f"{layer}.norm", (WIDTH,), "float32", Box.from_shape((WIDTH,))),
        )
    ]


def pipeline() -> TransferPlan:
    """Ranks 0 and 1 are the tensor-parallel ranks of the first stage, 2 and 3 those of the second."""
    held = [held_by(tensor, [stage]) for stage in range(LAYERS) for tensor in range(2)]
    return plan_transfer(held, bucket_bytes=1024, dtype="float32")


def pieces_of(plan: TransferPlan, specs: Sequence[ShardSpec]) -> list[Piece]:
    return [Piece(plan.names.index(spec.name), spec.box) for spec in specs]


def received(plan: TransferPlan, needed: dict[str, tuple[int, ...]], *, one_per_sender: bool) -> dict[str, int]:
    """Return the bytes that each receiver gets."""
    circles = list_circles(senders_of(plan), needed, one_per_sender=one_per_sender)
    return {
        name: sum(
            bucket.num_bytes
            for bucket in plan.buckets
            for circle in circles
            if bucket.sender in circle.senders and name in circle.members
        )
        for name in needed
    }


def needs(plan: TransferPlan, *, exact: bool) -> dict[str, tuple[int, ...]]:
    """A generator, and four ranks of a copy that is divided as the trainer is."""
    copies = {
        f"actor_fwd-0/{2 * stage + tensor}": needed_senders(
            plan, pieces_of(plan, held_by(tensor, [stage])), exact=exact
        )
        for stage in range(LAYERS)
        for tensor in range(2)
    }
    return {"rollout-0": senders_of(plan)} | copies


def test_on_devices_there_is_a_group_per_stage_and_on_the_cpu_one_per_sender() -> None:
    plan = pipeline()
    stages = list_circles(senders_of(plan), needs(plan, exact=False), one_per_sender=False)
    assert [circle.senders for circle in stages] == [(0, 1), (2, 3)]
    assert [circle.members for circle in stages] == [
        ("rollout-0", "actor_fwd-0/0", "actor_fwd-0/1"),
        ("rollout-0", "actor_fwd-0/2", "actor_fwd-0/3"),
    ]
    senders = list_circles(senders_of(plan), needs(plan, exact=True), one_per_sender=True)
    assert [circle.senders for circle in senders] == [(0,), (1,), (2,), (3,)]


def test_a_rank_of_a_divided_copy_gets_its_stage_alone_and_a_generator_everything() -> None:
    plan = pipeline()
    everything, norm = plan.num_bytes, 4 * WIDTH
    together = received(plan, {name: senders_of(plan) for name in needs(plan, exact=True)}, one_per_sender=False)
    assert set(together.values()) == {everything}
    by_stage = received(plan, needs(plan, exact=False), one_per_sender=False)
    assert by_stage == {name: everything // (1 if name == "rollout-0" else LAYERS) for name in by_stage}
    by_sender = received(plan, needs(plan, exact=True), one_per_sender=True)
    copies = [num_bytes for name, num_bytes in by_sender.items() if name != "rollout-0"]
    assert by_sender["rollout-0"] == everything
    assert max(copies) <= 2 * EACH + norm and min(copies) >= EACH


def test_without_divided_copies_devices_have_one_group() -> None:
    plan = pipeline()
    needed = dict.fromkeys(("rollout-0", "rollout-1"), senders_of(plan))
    assert [circle.senders for circle in list_circles((0, 1, 2, 3), needed, one_per_sender=False)] == [(0, 1, 2, 3)]


def test_rows_that_every_rank_divides_make_one_group_on_devices() -> None:
    """As under FSDP: a group per rank would cost each generator as many communicators."""
    shape = (8, 4)
    held = [[ShardSpec("w", shape, "float32", Box.rows(shape, 2 * rank, 2 * rank + 2))] for rank in range(4)]
    plan = plan_transfer(held, bucket_bytes=1024, dtype="float32")
    needed = {f"{rank}": needed_senders(plan, pieces_of(plan, held[rank]), exact=False) for rank in range(4)}
    assert len(list_circles(senders_of(plan), needed, one_per_sender=False)) == 1
    exact = {f"{rank}": needed_senders(plan, pieces_of(plan, held[rank]), exact=True) for rank in range(4)}
    circles = list_circles(senders_of(plan), exact, one_per_sender=True)
    assert [circle.members for circle in circles] == [(f"{rank}",) for rank in range(4)]


def test_senders_that_nobody_needs_have_no_group() -> None:
    assert list_circles((0, 1), {"a": (1,)}, one_per_sender=False) == [((1,), ("a",))]
    assert list_circles((0, 1), {}, one_per_sender=True) == []
