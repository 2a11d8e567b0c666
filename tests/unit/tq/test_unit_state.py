"""A unit's rows: atomic commits, void leases, repeated puts, what is freed, kept, counted, moved."""

from collections.abc import Mapping, Sequence

import pytest
import torch

from asyncflow.errors import LeaseFenced, PeerRefused, RowsExist, TransportError
from asyncflow.transport.frame import Payload, PayloadPiece
from tq import Column
from tq.backends.backend import FileBackend, MemoryBackend
from tq.messages import RemovalReason, RowRecords, RowsRemoved
from tq.refill import RemovalCause
from tq.unit.block import Block, BlockStore
from tq.unit.unit_state import Repeated, UnitState, list_rows, take_inventory
from tq.wire import describe, unpack

BIG = 2**15


def numbers(*values: float) -> Column:
    return Column.of_scalars(torch.tensor(values, dtype=torch.float32))


def tokens(*lengths: int) -> Column:
    return Column.of_rows([torch.arange(length) for length in lengths])


class World:
    """A state with a store for its blocks, and puts in terms of columns."""

    def __init__(self, *, retain: bool = False, tasks: Sequence[str] = ("ref", "train")) -> None:
        self.store = BlockStore(MemoryBackend(), None, prefix="u", token_columns=("prompts",))
        self.state = UnitState(retain=retain)
        self.state.set_tasks(tasks)

    def block(self, rows: Sequence[int], columns: Mapping[str, Column]) -> Block | None:
        headers, payload = describe(columns, narrow=True)
        data = torch.empty(payload.num_bytes, dtype=torch.uint8)
        payload.write(data)
        return self.store.add_block(rows, headers, data)

    def create(
        self, rows: Sequence[int], columns: Mapping[str, Column], *, partition: int = 1, confirm: bool = True
    ) -> Repeated | None:
        repeated = self.state.create_rows(rows, self.block(rows, columns), partition=partition, groups=rows)
        if confirm:
            self.state.confirm(rows)
        return repeated

    def commit(
        self, task: str, token: int, rows: Sequence[int], columns: Mapping[str, Column] | None = None
    ) -> Repeated | None:
        return self.state.commit_outputs(task, token, rows, self.block(rows, columns or {}))

    def read(self, rows: Sequence[int], *names: str) -> dict[str, Column]:
        parts = self.state.locate_columns(rows, names)
        headers, pieces = self.store.describe_rows(parts, wide=True)
        return unpack(headers, _written([piece for column in pieces for piece in column]))

    def records(self) -> list[RowRecords]:
        return take_inventory("u", "i", self.state, announced=False).records

    @property
    def num_bytes(self) -> int:
        return self.state.accounting.num_bytes


def _written(pieces: Sequence[PayloadPiece]) -> torch.Tensor:
    payload = Payload(pieces)
    out = torch.zeros(payload.num_bytes, dtype=torch.uint8)
    payload.write(out)
    return out


@pytest.fixture(name="unit")
def _unit() -> World:
    unit = World()
    unit.create([0, 1, 2], {"prompts": numbers(0, 1, 2)})
    return unit


def test_rows_are_read_in_the_order_asked(unit: World) -> None:
    unit.commit("ref", 1, [0, 1, 2], {"ref": tokens(1, 0, 2)})
    read = unit.read([2, 0], "ref", "prompts")
    assert [row.tolist() for row in read["ref"].rows()] == [[0, 1], [0]]
    assert read["prompts"].values.tolist() == [2, 0]


def test_neighbours_of_one_block_are_one_slice(unit: World) -> None:
    unit.create([3], {"prompts": numbers(3)})
    parts = unit.state.locate_columns([0, 1, 2, 3, 1], ["prompts"])["prompts"]
    assert [positions for _, positions in parts] == [range(3), range(1), range(1, 2)]


def test_row_that_exists_is_not_created_again_and_nothing_of_the_put_stays(unit: World) -> None:
    with pytest.raises(RowsExist, match="row 2 exists"):
        unit.create([3, 2], {"prompts": numbers(3, 2)})
    assert len(unit.state) == 3


def test_same_rows_put_again_are_recognised(unit: World) -> None:
    repeated = unit.create([0, 1, 2], {"prompts": numbers(0, 1, 2)})
    assert repeated is not None
    assert [(there, here) for _, there, here in repeated.pairs] == [(0, 0), (1, 1), (2, 2)]
    with pytest.raises(RowsExist):
        unit.create([0], {"prompts": numbers(0)}, partition=2)
    with pytest.raises(RowsExist):
        unit.create([0], {"others": numbers(0)})


@pytest.mark.parametrize(("groups", "group_size"), [([0, 0, 2], 0), ([0, 1, 2], 2), ([0, 1, 7], 1)])
def test_same_rows_of_another_group_are_no_repetition(unit: World, groups: list[int], group_size: int) -> None:
    block = unit.block([0, 1, 2], {"prompts": numbers(0, 1, 2)})
    with pytest.raises(RowsExist):
        unit.state.create_rows([0, 1, 2], block, partition=1, groups=groups, group_size=group_size)


def test_malformed_create_leaves_nothing_behind(unit: World) -> None:
    with pytest.raises(PeerRefused, match="1 rows, but the put names 2"):
        unit.create([3, 4], {"prompts": numbers(3)})
    with pytest.raises(PeerRefused, match="twice"):
        unit.create([3, 3], {"prompts": numbers(3, 3)})
    with pytest.raises(PeerRefused, match="names no rows"):
        unit.create([], {})
    with pytest.raises(PeerRefused, match="groups"):
        unit.state.create_rows([3], None, partition=1, groups=[])
    with pytest.raises(PeerRefused, match="commits"):
        unit.state.create_rows([3], None, partition=1, groups=[0], commits={"ref": [1]})
    assert len(unit.state) == 3


def test_commit_is_one_atom(unit: World) -> None:
    unit.state.fence_rows("ref", 5, [1])
    with pytest.raises(LeaseFenced):
        unit.commit("ref", 4, [0, 1], {"ref": numbers(1, 2)})
    with pytest.raises(PeerRefused, match="not written"):
        unit.read([0], "ref")


def test_same_put_twice_is_recognised_for_any_of_its_rows(unit: World) -> None:
    assert unit.commit("ref", 4, [0, 1], {"ref": numbers(1, 2)}) is None
    held = unit.num_bytes
    again = unit.commit("ref", 4, [1], {"ref": numbers(2)})
    assert again is not None
    assert [(there, here) for _, there, here in again.pairs] == [(1, 0)]
    assert unit.num_bytes == held


def test_plain_ack_twice_is_recognised(unit: World) -> None:
    assert unit.commit("ref", 4, [0]) is None
    again = unit.commit("ref", 4, [0])
    assert again is not None and again.pairs == []


@pytest.mark.parametrize("names", [["ref", "more"], ["other"], []])
def test_other_columns_under_the_same_token_are_refused(unit: World, names: list[str]) -> None:
    unit.commit("ref", 4, [0, 1], {"ref": numbers(1, 2)})
    with pytest.raises(PeerRefused, match="something else"):
        unit.commit("ref", 4, [0, 1], {name: numbers(1, 2) for name in names})


def test_put_that_overlaps_an_earlier_one_is_an_error_and_stores_nothing(unit: World) -> None:
    unit.commit("ref", 4, [0], {"ref": numbers(1)})
    with pytest.raises(PeerRefused, match="row 0"):
        unit.commit("ref", 4, [1, 0], {"ref": numbers(2, 1)})
    with pytest.raises(PeerRefused, match="not written"):
        unit.read([1], "ref")


def test_put_after_a_fence_is_refused_and_the_new_owner_may_put(unit: World) -> None:
    unit.state.fence_rows("ref", 7, [0, 1])
    with pytest.raises(LeaseFenced):
        unit.commit("ref", 4, [0], {"ref": numbers(1)})
    assert unit.commit("ref", 8, [0], {"ref": numbers(2)}) is None
    with pytest.raises(LeaseFenced):
        unit.commit("ref", 4, [0], {"ref": numbers(1)})
    assert unit.read([0], "ref")["ref"].values.tolist() == [2]


def test_put_that_was_carried_out_before_a_fence_is_still_recognised(unit: World) -> None:
    unit.commit("ref", 4, [0], {"ref": numbers(1)})
    unit.state.fence_rows("ref", 7, [0])
    assert unit.commit("ref", 4, [0], {"ref": numbers(1)}) is not None


def test_unknown_task_is_refused_before_it_leaves_columns_behind(unit: World) -> None:
    with pytest.raises(PeerRefused, match=r"'reff'.*ref train"):
        unit.commit("reff", 3, [0], {"ref": numbers(1)})
    assert unit.commit("ref", 3, [0], {"ref": numbers(1)}) is None


def test_fence_concerns_one_task_and_never_moves_back(unit: World) -> None:
    unit.state.fence_rows("ref", 7, [0])
    unit.state.fence_rows("ref", 3, [0])
    assert unit.commit("train", 4, [0], {"rewards": numbers(1)}) is None
    with pytest.raises(LeaseFenced):
        unit.commit("ref", 6, [0], {"ref": numbers(1)})


def test_fenced_task_lets_only_living_and_newer_leases_put(unit: World) -> None:
    unit.state.fence_task("ref", 100, [5])
    with pytest.raises(LeaseFenced):
        unit.commit("ref", 4, [0], {"ref": numbers(1)})
    unit.commit("ref", 5, [0], {"ref": numbers(1)})
    unit.commit("ref", 100, [1], {"ref": numbers(1)})
    unit.commit("train", 4, [2])


def test_fences_count_as_deliveries_once_and_only_while_the_task_is_not_done(unit: World) -> None:
    unit.commit("train", 1, [0])
    for token in (5, 5, 9):
        unit.state.fence_rows("train", token, [0, 1])
    records = {tuple(record.rows): record.deliveries for record in unit.records()}
    assert records == {(0,): {}, (1, 2): {"train": [2, 0]}}


def test_row_goes_when_every_task_is_done_and_late_puts_are_told_apart(unit: World) -> None:
    unit.commit("ref", 4, [0, 1], {"ref": numbers(1, 2)})
    unit.commit("train", 6, [0])
    assert len(unit.state) == 2
    assert unit.state.finished() == {1: [0]}
    assert unit.commit("train", 6, [0]) is not None
    assert unit.commit("ref", 4, [0, 1], {"ref": numbers(1, 2)}) is not None
    with pytest.raises(LeaseFenced):
        unit.commit("train", 5, [0])
    with pytest.raises(RowsExist):
        unit.create([0], {"prompts": numbers(0)})
    unit.state.fence_rows("ref", 9, [0])


def test_rows_that_were_done_before_the_tasks_are_known_go_when_they_are() -> None:
    unit = World(tasks=())
    unit.create([0, 1], {"prompts": numbers(0, 1)})
    unit.commit("train", 1, [0])
    assert len(unit.state) == 2
    unit.state.set_tasks(["train"])
    assert unit.state.finished() == {1: [0]}


def test_row_that_nobody_confirmed_stays_however_done_it_is() -> None:
    unit = World(tasks=["train"])
    unit.state.create_rows([0], None, partition=1, groups=[0], commits={"train": [0]})
    assert len(unit.state) == 1
    unit.state.confirm([0])
    assert (len(unit.state), unit.state.finished()) == (0, {1: [0]})


def test_row_that_was_finished_when_it_came_does_not_wait_for_a_checkpoint() -> None:
    """What tasks wrote went with another unit: a snapshot could not say what is missing."""
    unit = World(tasks=["ref", "train"], retain=True)
    unit.state.create_rows([0, 1, 2], None, partition=1, groups=[0, 1, 2], commits={"ref": [2], "train": [2]})
    unit.state.learn_commits({"ref": [0, 1], "train": [0]})
    unit.state.confirm([0, 1, 2])
    assert unit.state.finished() == {1: [0]}
    unit.commit("train", 3, [1], {})
    assert [number for number, row in unit.state.rows() if row.retained] == [1, 2], "2 came out of a snapshot as it was"


def test_commits_that_others_tell_of_count(unit: World) -> None:
    unit.state.learn_commits({"ref": [0], "train": [0, 99]})
    assert unit.state.finished() == {1: [0]}
    unit.state.learn_commits({"ref": [1]})
    with pytest.raises(LeaseFenced):
        unit.commit("ref", 3, [1], {"ref": numbers(1)})


def test_column_of_another_task_is_not_overwritten(unit: World) -> None:
    with pytest.raises(PeerRefused, match="prompts"):
        unit.commit("ref", 4, [0], {"prompts": numbers(1)})


def test_block_is_counted_in_full_until_its_last_row_goes(unit: World) -> None:
    held = unit.num_bytes
    unit.state.remove([0, 2])
    assert unit.num_bytes == held > 0
    assert unit.state.accounting.take_gone() == []
    unit.state.remove([1, 99])
    assert (len(unit.state), unit.num_bytes) == (0, 0)
    assert len(unit.state.accounting.take_gone()) == 1
    with pytest.raises(LeaseFenced, match="row 0"):
        unit.commit("ref", 4, [0], {"ref": numbers(1)})


def test_pinned_block_stays_until_it_was_read(unit: World) -> None:
    [(block, _)] = unit.state.locate_columns([0], ["prompts"])["prompts"]
    unit.state.accounting.pin([block])
    unit.state.clear(1)
    assert unit.state.accounting.take_gone() == []
    unit.state.accounting.unpin_blocks([block])
    assert unit.state.accounting.take_gone() == [block]
    assert unit.num_bytes == 0


def test_survivors_of_a_thin_block_move(unit: World) -> None:
    rows = list(range(10, 20))
    unit.create(rows, {"prompts": tokens(*[BIG] * 10), "x": numbers(*rows)})
    held = unit.num_bytes
    unit.state.remove(rows[:7])
    assert not unit.state.accounting.has_thin
    unit.state.remove([17])
    [thin] = unit.state.accounting.take_thin()
    positions = unit.state.find_survivors(thin)
    moved = unit.store.compact_block(thin, positions)
    assert moved is not None
    unit.state.remove([19])  # meanwhile
    unit.state.move_block(thin, moved, positions)
    unit.state.accounting.unpin_blocks([thin])
    assert unit.state.accounting.take_gone() == [thin]
    assert unit.num_bytes < held / 4
    read = unit.read([18], "prompts", "x")
    assert torch.equal(read["prompts"].values, torch.arange(BIG))
    assert read["x"].values.tolist() == [18]
    assert [record.tokens for record in unit.records() if record.rows == [18]] == [[BIG]]


def test_rows_that_wait_for_a_checkpoint_are_listed_but_not_among_those_that_may_be_cleared() -> None:
    unit = World(retain=True, tasks=["train"])
    unit.create([1, 2], {"prompts": tokens(1, 1)})
    unit.commit("train", 5, [1])
    listed = [row for record in list_rows(unit.state, [1, 2], None) for row in record.rows]
    clearable = [row for record in list_rows(unit.state, [1, 2], None, retained=False) for row in record.rows]
    assert (sorted(listed), clearable) == ([1, 2], [2])


def test_retained_rows_stay_readable_until_a_checkpoint_covers_them() -> None:
    unit = World(retain=True, tasks=["train"])
    for partition in (1, 2):
        unit.create([partition], {"prompts": numbers(partition)}, partition=partition)
        unit.commit("train", 1, [partition])
    assert (len(unit.state), unit.state.retained_rows, unit.state.accounting.retained_bytes) == (2, 2, 8)
    inventory = take_inventory("u", "i", unit.state, announced=False)
    assert (inventory.records, inventory.finished) == ([], {1: [1], 2: [2]})
    assert unit.read([1], "prompts")["prompts"].values.tolist() == [1]
    assert unit.commit("train", 1, [1]) is not None
    unit.state.release_checkpointed(1)
    assert (len(unit.state), unit.state.retained_rows, unit.state.accounting.retained_bytes) == (1, 1, 4)
    unit.create([5], {"prompts": numbers(5)}, partition=1)
    unit.commit("train", 2, [5])
    assert len(unit.state) == 1, "a checkpoint covers its partition already"


def test_tombstones_last_for_64_newer_partitions() -> None:
    unit = World(tasks=["train"])
    for partition in range(1, 66):
        unit.create([partition], {"prompts": numbers(partition)}, partition=partition)
        unit.commit("train", 1, [partition])
    assert sorted(unit.state.finished()) == list(range(2, 66))
    unit.state.clear(2)
    unit.state.release_checkpointed(60)
    assert sorted(unit.state.finished()) == list(range(61, 66))


def test_cleared_partition_is_gone(unit: World) -> None:
    unit.create([9], {"prompts": numbers(9)}, partition=2)
    assert unit.state.clear(1) == [0, 1, 2]
    assert unit.state.clear(1) == []
    assert len(unit.state) == 1
    assert unit.state.remove([9, 1]) == {2: [9]}


def test_inventory_tells_what_the_unit_holds() -> None:
    unit = World()
    columns = {"prompts": tokens(3, 5), "x": numbers(0, 0)}
    unit.state.create_rows([0, 1], unit.block([0, 1], columns), partition=4, groups=[7, 7])
    unit.commit("ref", 2, [1], {"ref": numbers(1)})
    assert take_inventory("storage-0", "abc", unit.state, announced=False).records == [
        RowRecords(4, [0], [7], [2], [3], [3 + 4], ["prompts", "x"], []),
        RowRecords(4, [1], [7], [2], [5], [5 + 4 + 4], ["prompts", "ref", "x"], ["ref"]),
    ]


def test_inventory_tells_which_groups_left_until_it_is_tried_again_or_cleared() -> None:
    unit = World()

    def told() -> list[RowsRemoved]:
        return take_inventory("u", "i", unit.state, announced=False).removed_groups

    cause = RemovalCause("ref", 2)
    unit.create([0, 1, 2], {"x": numbers(1, 2, 3)})
    assert unit.state.remove_groups([0, 1, 99], cause) == {1: [0, 1]}
    assert told() == [RowsRemoved("u", 1, [0, 1], RemovalReason.GROUP_LEFT, cause)]
    unit.create([0], {"x": numbers(1)})
    assert [removed.rows for removed in told()] == [[1]]
    unit.state.clear(1)
    assert told() == []


def test_cut_is_what_was_confirmed_and_forgets_what_it_should(unit: World) -> None:
    unit.create([8], {"prompts": numbers(8)}, partition=2)
    unit.create([9], {"prompts": numbers(9)}, partition=2, confirm=False)
    unit.commit("ref", 1, [8], {"ref": numbers(1)})
    cut = unit.state.cut_rows(after_partition=1, forget_acks_of=["ref"])
    assert [(row.number, row.commits, sorted(row.places)) for row in cut.rows] == [(8, (), ["prompts"])]
    unit.state.clear(2)
    assert unit.state.accounting.num_bytes > 0, "the cut's blocks stay"
    unit.state.accounting.take_gone()
    unit.state.accounting.unpin_blocks(cut.blocks)
    assert unit.state.accounting.take_gone() == cut.blocks


def test_resting_blocks_move_to_disk_and_come_back_on_demand(tmp_path_factory: pytest.TempPathFactory) -> None:
    unit = World(retain=True, tasks=["train"])
    home = FileBackend(tmp_path_factory.mktemp("spill") / "u")
    unit.store.spill_home = home
    unit.create([0, 1], {"prompts": tokens(100, 200)})
    held = unit.num_bytes
    unit.commit("train", 1, [0])
    assert unit.state.accounting.take_resting(0) == [], "row 1 is still alive"
    unit.commit("train", 2, [1])
    assert unit.state.accounting.take_resting(300) == []
    [block] = unit.state.accounting.take_resting(0)
    assert unit.store.spill_block(block)
    assert unit.state.accounting.mark_spilled(block, home)
    unit.state.accounting.unpin_blocks([block])
    assert (unit.num_bytes, unit.state.accounting.spilled_bytes) == (0, held)
    assert torch.equal(unit.read([1], "prompts")["prompts"].values, torch.arange(200))
    unit.state.release_checkpointed(1)
    assert unit.state.accounting.spilled_bytes == unit.state.accounting.retained_bytes == 0
    unit.store.delete_blocks(unit.state.accounting.take_gone())
    unit.store.close()


def test_read_of_what_is_not_there_is_refused(unit: World) -> None:
    with pytest.raises(LeaseFenced, match="row 9"):  # a reader of a lease's rows asks for others
        unit.read([9], "prompts")
    with pytest.raises(PeerRefused, match="'ref' is not written"):
        unit.read([0], "ref")
    with pytest.raises(PeerRefused, match="no rows"):
        unit.read([], "prompts")


class Broken(MemoryBackend):
    in_process = False

    def store(self, key: str, payload: torch.Tensor) -> None:
        raise ValueError("no room")

    def delete(self, keys: Sequence[str]) -> None:
        raise ValueError("no such key")


def test_backend_of_the_users_that_raises_is_named(caplog: pytest.LogCaptureFixture) -> None:
    store = BlockStore(Broken(), None, prefix="u", token_columns=())
    headers, payload = describe({"a": numbers(1.0)}, narrow=True)
    data = torch.empty(payload.num_bytes, dtype=torch.uint8)
    payload.write(data)
    with pytest.raises(TransportError, match=r"^tq.backend: Broken raised ValueError: no room$"):
        store.add_block([0], headers, data)
    block = BlockStore(MemoryBackend(), None, prefix="u", token_columns=()).add_block([0], headers, data)
    assert block is not None
    block.home = store.backend
    store.delete_blocks([block])
    assert "tq.backend: Broken raised ValueError: no such key" in caplog.text
