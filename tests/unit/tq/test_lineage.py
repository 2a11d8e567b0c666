"""A queue that begins anew for the next lineage: nothing of the one before counts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncflow.errors import LeaseFenced, TransportError
from tq import TaskSpec
from tq.control.state import Recovering
from tq.messages import Held, LeaseGrant, PublishVersion
from tq.refill import first_token
from tq.unit.unit_state import UnitState

World = Callable[..., Any]
ROLLOUT = TaskSpec("rollout", frozenset({"x"}), frozenset({"y"}), max_staleness=1)
REF = TaskSpec("ref", frozenset({"x"}), frozenset({"r"}))


def test_weights_of_an_earlier_lineage_get_no_rows_however_new(make_world: World) -> None:
    world = make_world(ROLLOUT, lineage=1, version=4)
    world.put([0], partition=5)
    old = world.ask("rollout", version=9, lineage=0)
    assert world.refused(old) == "newer_version"
    assert (world.answers[old].lineage, world.answers[old].newest_version) == (1, 4)
    assert world.granted(world.ask("rollout", version=4, lineage=1)).rows == [0]


def test_consumers_of_an_earlier_lineage_wait_until_there_are_weights(make_world: World) -> None:
    world = make_world(ROLLOUT, lineage=1, version=4, published=False)
    world.put([0], partition=5)
    request = world.ask("rollout", version=9, lineage=0)
    assert request not in world.answers
    world.handle(PublishVersion(4))
    assert world.refused(request) == "newer_version"


def test_tasks_without_a_gate_do_not_look_at_weights(make_world: World) -> None:
    world = make_world(REF, lineage=3)
    world.put([0])
    assert isinstance(world.answers[world.ask("ref", lineage=0)], LeaseGrant)


def test_leases_of_an_earlier_lineage_are_void_for_whoever_joins(make_world: World) -> None:
    old, now = first_token(0, 2) + 7, first_token(1, 1) + 1
    who = Recovering(frozenset({"storage-0"}), frozenset({"a"}))
    world = make_world(REF, lineage=1, first_token=now + 1000, recovering=who)
    world.register("storage-0", [0, 1])
    assert world.join("a", Held("ref", old, 1, [0]), Held("ref", now, 1, [1])).void == [old]
    (fence,) = world.fences
    assert fence.alive == (now,), "only that lease is alive"
    world.confirm_fences()
    assert world.granted(world.ask("ref", owner="b")).rows == [0]


def test_unit_refuses_tokens_of_earlier_lineages() -> None:
    state = UnitState(lineage=1)
    state.set_tasks(["ref"])
    state.create_rows([0], None, partition=1, groups=[0])
    state.confirm([0])
    with pytest.raises(LeaseFenced):
        state.commit_outputs("ref", first_token(0, 99) + 5, [0], None)
    assert state.commit_outputs("ref", first_token(1, 1) + 5, [0], None) is None


def test_tokens_only_ever_grow_and_fit_into_int64() -> None:
    order = [first_token(lineage, start) for lineage in (0, 1, 2047) for start in (0, 1, 2, 4095)]
    assert order == sorted(set(order))
    assert first_token(2047, 4095) + 2**40 - 1 <= torch.iinfo(torch.int64).max


@pytest.mark.parametrize(("lineage", "start"), [(2048, 0), (0, 4096)])
def test_more_restarts_than_tokens_can_tell_apart_are_refused(lineage: int, start: int) -> None:
    with pytest.raises(TransportError, match="start the command again with --resume"):
        first_token(lineage, start)
