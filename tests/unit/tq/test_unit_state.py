"""A unit's rows: atomic commits, void leases, repeated puts."""

import pytest
import torch

from asyncflow.errors import PeerRefused, Superseded
from tq import Column
from tq.unit_state import UnitState


def numbers(*values: float) -> Column:
    return Column.of_scalars(torch.tensor(values, dtype=torch.float32))


@pytest.fixture(name="unit")
def _unit() -> UnitState:
    unit = UnitState()
    unit.create([0, 1, 2], {"prompts": numbers(0, 1, 2)})
    return unit


def test_rows_are_read_in_the_order_asked(unit: UnitState) -> None:
    unit.commit("ref", 1, [0, 1, 2], {"ref": Column.of_rows([torch.arange(k) for k in (1, 0, 2)])})
    read = unit.read([2, 0], ["ref", "prompts"])
    assert [row.tolist() for row in read["ref"].rows()] == [[0, 1], [0]]
    assert read["prompts"].values.tolist() == [2, 0]


def test_text_columns_stay_text() -> None:
    unit = UnitState()
    unit.create([0, 1], {"answers": Column.of_texts(["a", "bc"])})
    assert unit.read([1], ["answers"])["answers"].texts() == ["bc"]


def test_row_that_exists_is_not_created_again_and_nothing_of_the_put_stays(unit: UnitState) -> None:
    with pytest.raises(PeerRefused, match="row 2 exists"):
        unit.create([3, 2], {"prompts": numbers(3, 2)})
    assert len(unit) == 3


def test_malformed_create_leaves_nothing_behind(unit: UnitState) -> None:
    with pytest.raises(PeerRefused, match="1 rows, but the put names 2"):
        unit.create([3, 4], {"prompts": numbers(3)})
    with pytest.raises(PeerRefused, match="twice"):
        unit.create([3, 3], {"prompts": numbers(3, 3)})
    assert len(unit) == 3


def test_commit_is_one_atom(unit: UnitState) -> None:
    unit.fence("ref", 5, [1])
    with pytest.raises(Superseded):
        unit.commit("ref", 4, [0, 1], {"ref": numbers(1, 2)})
    with pytest.raises(PeerRefused, match="not written"):
        unit.read([0], ["ref"])


def test_malformed_commit_leaves_nothing_behind(unit: UnitState) -> None:
    with pytest.raises(PeerRefused):
        unit.commit("ref", 4, [0, 1], {"ref": numbers(1)})
    assert unit.commit("ref", 5, [0, 1], {"ref": numbers(1, 2)})


def test_same_put_twice_is_a_no_op(unit: UnitState) -> None:
    nan = {"ref": numbers(float("nan"), 2)}
    assert unit.commit("ref", 4, [0, 1], nan)
    held = unit.num_bytes
    assert not unit.commit("ref", 4, [0, 1], nan)
    assert not unit.commit("ref", 4, [1], {"ref": numbers(2)})
    assert unit.num_bytes == held


@pytest.mark.parametrize(
    "columns",
    [
        {"ref": numbers(1, 3)},
        {"ref": Column.of_scalars(torch.tensor([1, 2]))},
        {"ref": numbers(1, 2), "more": numbers(1, 2)},
        {"other": numbers(1, 2)},
        {},
    ],
)
def test_different_put_under_the_same_token_is_an_error(unit: UnitState, columns: dict[str, Column]) -> None:
    unit.commit("ref", 4, [0, 1], {"ref": numbers(1, 2)})
    with pytest.raises(PeerRefused):
        unit.commit("ref", 4, [0, 1], columns)
    assert unit.read([0, 1], ["ref"])["ref"].values.tolist() == [1, 2]


def test_put_that_overlaps_an_earlier_one_is_an_error_and_stores_nothing(unit: UnitState) -> None:
    unit.commit("ref", 4, [0], {"ref": numbers(1)})
    with pytest.raises(PeerRefused, match="row 0"):
        unit.commit("ref", 4, [1, 0], {"ref": numbers(2, 1)})
    with pytest.raises(PeerRefused, match="not written"):
        unit.read([1], ["ref"])


def test_put_after_a_fence_is_superseded_and_the_new_owner_may_put(unit: UnitState) -> None:
    unit.fence("ref", 7, [0, 1])
    with pytest.raises(Superseded):
        unit.commit("ref", 4, [0], {"ref": numbers(1)})
    assert unit.commit("ref", 8, [0], {"ref": numbers(2)})
    with pytest.raises(Superseded):
        unit.commit("ref", 4, [0], {"ref": numbers(1)})
    assert unit.read([0], ["ref"])["ref"].values.tolist() == [2]


def test_fence_concerns_one_task_and_never_moves_back(unit: UnitState) -> None:
    unit.fence("ref", 7, [0])
    unit.fence("ref", 3, [0])
    assert unit.commit("rewards", 4, [0], {"rewards": numbers(1)})
    with pytest.raises(Superseded):
        unit.commit("ref", 6, [0], {"ref": numbers(1)})


def test_late_put_to_a_freed_row_is_superseded(unit: UnitState) -> None:
    unit.drop([0])
    with pytest.raises(Superseded, match="row 0"):
        unit.commit("ref", 4, [0, 1], {"ref": numbers(1, 2)})
    unit.fence("ref", 9, [0])


def test_column_of_another_task_is_not_overwritten(unit: UnitState) -> None:
    with pytest.raises(PeerRefused, match="prompts"):
        unit.commit("ref", 4, [0], {"prompts": numbers(1)})


def test_dropped_rows_give_their_bytes_back(unit: UnitState) -> None:
    unit.commit("ref", 1, [0, 1, 2], {"ref": Column.of_rows([torch.arange(k) for k in (1, 0, 2)])})
    assert unit.num_bytes == 3 * 4 + 3 * 8
    unit.drop([0, 1, 2, 99])
    assert (len(unit), unit.num_bytes) == (0, 0)


def test_read_of_what_is_not_there_is_refused(unit: UnitState) -> None:
    with pytest.raises(PeerRefused, match="row 9"):
        unit.read([9], ["prompts"])
    with pytest.raises(PeerRefused, match="'ref' is not written"):
        unit.read([0], ["ref"])
    with pytest.raises(PeerRefused, match="no rows"):
        unit.read([], ["prompts"])
