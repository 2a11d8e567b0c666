"""`StreamingDataLoader` over a client that answers from a list."""

import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from asyncflow.errors import ConfigError, LeaseFenced, PeerRefused, ProducersGone, TransportError
from tq.client.dataloader import ALL_ROWS, StreamingDataLoader
from tq.columns import Column, PackedBatch
from tq.config import ReplicaFetch
from tq.messages import FetchRound, LeaseGrant, NoRows, NoRowsReason

DONE = NoRows(NoRowsReason.PARTITION_DONE, 0)
STOP = NoRows(NoRowsReason.STOP, 0)
LATE = NoRows(NoRowsReason.DEADLINE, 0, "column y of 2 rows")
ALONE = NoRows(NoRowsReason.DEADLINE, 0, "column y of 2 rows", producers_alive=False)


class CannedClient:
    """Answers fetches in order; then parks until closed. Errors in the list are raised."""

    def __init__(
        self,
        *answers: LeaseGrant | NoRows | Exception,
        unreadable: Sequence[Exception] = (),
        refusals: Sequence[Exception] = (),
    ) -> None:
        self.answers = list(answers)
        self.data = self
        self.unreadable = list(unreadable)
        self.refusals = list(refusals)
        self.asked: list[FetchRound] = []
        self.acked: list[list[int]] = []
        self.forgotten: list[list[int]] = []
        self.written: list[tuple[list[int], list[float]]] = []
        self.parked = threading.Event()
        self.closed = threading.Event()
        self.answer_always: NoRows | None = None

    def fetch_round(self, request: FetchRound) -> LeaseGrant | NoRows:
        self.asked.append(request)
        if not self.answers:
            if self.answer_always is not None:
                return self.answer_always
            self.parked.set()
            assert self.closed.wait(30)
            raise TransportError("closed")
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def get(self, granted: LeaseGrant, names: Sequence[str]) -> PackedBatch:
        if self.unreadable:
            raise self.unreadable.pop(0)
        columns = {name: Column.of_rows([torch.full((row + 1,), row) for row in granted.rows]) for name in names}
        return PackedBatch(tuple(granted.rows), columns, tuple(granted.groups))

    def ack(self, granted: LeaseGrant, rows: Sequence[int]) -> None:
        assert rows is granted.rows
        self.acked.append(granted.rows)

    def put(self, granted: LeaseGrant, rows: Sequence[int], columns: Mapping[str, Column]) -> None:
        assert rows is granted.rows
        if self.refusals:
            raise self.refusals.pop(0)
        self.written.append((granted.rows, columns["y"].values.tolist()))

    def forget_lease(self, granted: LeaseGrant) -> None:
        self.forgotten.append(granted.rows)


def lease(*rows: int, partition: int = 1, largest_slice: int = 0) -> LeaseGrant:
    """Return a lease of rows whose lengths are their index + 1."""
    tokens = [row + 1 for row in rows]
    units = ["storage-0" if row % 2 else "storage-1" for row in rows]
    return LeaseGrant(
        "train", 7, partition, list(rows), [row // 2 for row in rows], units, tokens, largest_slice or len(rows)
    )


@pytest.fixture(name="load")
def _load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a loader of task `train`; closes it at the end."""
    opened: list[tuple[CannedClient, StreamingDataLoader]] = []
    monkeypatch.setattr("tq.client.dataloader._RETRY_S", 0.0)

    def load(client: CannedClient, **options: Any) -> StreamingDataLoader:
        options = {"first_partition": 1, "last_partition": 3, "rows_per_round": 2, **options}
        loader = StreamingDataLoader(client, "train", ["x"], **options)
        opened.append((client, loader))
        return loader

    yield load
    for client, loader in opened:
        loader.close()
        client.closed.set()


class EachFetches:
    """A rank of a replica whose ranks all fetch."""

    fetch = ReplicaFetch.EACH
    shares = in_program_order = False
    fetches = True

    def __init__(self, *, acks: bool) -> None:
        self.acks = acks


class SlowAcks(CannedClient):
    """Acks once it may; first raises what it is told to."""

    def __init__(self, *answers: LeaseGrant | NoRows | Exception, failures: Sequence[Exception] = ()) -> None:
        super().__init__(*answers)
        self.may_ack = threading.Event()
        self.failures = list(failures)

    def ack(self, granted: LeaseGrant, rows: Sequence[int]) -> None:
        assert self.may_ack.wait(30)
        if self.failures:
            raise self.failures.pop()
        super().ack(granted, rows)


Load = Callable[..., StreamingDataLoader]


def test_rows_whose_outputs_are_put_need_no_ack(load: Load) -> None:
    client = CannedClient(lease(0, 1), lease(largest_slice=1), lease(2), DONE)
    loader = load(client)
    for batch in loader:
        loader.put({"y": Column.of_scalars(torch.tensor(batch.indices))} if len(batch) else {})
    loader.ack()
    assert client.written == [([0, 1], [0, 1]), ([2], [2])]
    assert client.acked == []


def test_partitions_follow_each_other_and_are_acked_once(load: Load) -> None:
    client = CannedClient(lease(0, 1), lease(2), DONE, lease(4, partition=2), DONE, DONE)
    loader = load(client)
    seen = []
    while step := loader.next_partition():
        rounds = [(batch.indices, loader.largest_slice, batch["x"].values.tolist()) for batch in loader]
        seen.append((step, rounds))
        loader.ack()
        loader.ack()
    assert seen == [(1, [((0, 1), 2, [0, 1, 1]), ((2,), 1, [2, 2, 2])]), (2, [((4,), 1, [4] * 5)]), (3, [])]
    assert client.acked == [[0, 1], [2], [4]]
    assert [(ask.partition, ask.round_index) for ask in client.asked] == [
        (1, 0),
        (1, 1),
        (1, 2),
        (2, 0),
        (2, 1),
        (3, 0),
    ]
    assert not loader.stopped


@pytest.mark.parametrize(("acks", "acked", "forgotten"), [(True, [[0, 1]], []), (False, [], [[0, 1], []])])
def test_rank_that_does_not_ack_does_not_vouch_for_the_lease_any_more(
    load: Load, acks: bool, acked: list[list[int]], forgotten: list[list[int]]
) -> None:
    client = CannedClient(lease(0, 1), lease(), DONE)
    loader = load(client, replica=EachFetches(acks=acks), last_partition=1)
    list(loader)
    assert (client.acked, client.forgotten) == ([], []), "the rows are not in the weights yet"
    loader.ack()
    assert (client.acked, client.forgotten) == (acked, forgotten)


def test_iterating_after_the_end_of_a_partition_begins_the_next(load: Load) -> None:
    loader = load(CannedClient(lease(0), DONE, lease(1), DONE, DONE))
    seen = [(loader.partition, [batch.indices for batch in loader], loader.partition) for _ in range(4)]
    assert seen == [(0, [(0,)], 1), (1, [(1,)], 2), (2, [], 3), (3, [], 3)]


def test_partition_left_early_goes_on_and_cannot_be_skipped(load: Load) -> None:
    loader = load(CannedClient(lease(0), lease(1), DONE))
    loader.next_partition()
    assert next(iter(loader)).indices == (0,)
    with pytest.raises(ConfigError, match="partition 1: read it to its end"):
        loader.next_partition()
    assert [batch.indices for batch in loader] == [(1,)]
    assert loader.next_partition() == 2


def test_stop_ends_the_iteration(load: Load) -> None:
    loader = load(CannedClient(lease(0), STOP))
    loader.next_partition()
    assert [batch.indices for batch in loader] == [(0,)]
    assert (loader.stopped, loader.next_partition(), list(loader)) == (True, 0, [])


def test_close_ends_an_iteration_that_waits_and_is_idempotent(load: Load) -> None:
    client = CannedClient()
    loader = load(client)
    seen: list[Any] = []
    iterating = threading.Thread(target=lambda: seen.extend(loader))
    iterating.start()
    assert client.parked.wait(10)
    loader.close()
    loader.close()
    iterating.join(10)
    assert (iterating.is_alive(), seen, loader.stopped) == (False, [], True)


def test_loader_closed_before_it_began_asks_nothing(load: Load) -> None:
    client = CannedClient()
    loader = load(client)
    loader.close()
    assert (loader.next_partition(), list(loader), client.asked) == (0, [], [])


def test_error_comes_after_what_was_read_before_it_and_again(load: Load) -> None:
    loader = load(CannedClient(lease(0), TransportError("controller-0 is gone")))
    rounds = iter(loader)
    assert next(rounds).indices == (0,)
    for _ in range(2):
        with pytest.raises(TransportError, match="controller-0"):
            next(iter(loader))


def test_reads_ahead_no_further_than_prefetch(load: Load) -> None:
    client = CannedClient(*(lease(row) for row in range(6)), DONE)
    loader = load(client, prefetch=2)
    assert next(iter(loader)).indices == (0,)
    assert [batch.indices for batch in loader] == [(row,) for row in range(1, 6)]
    assert len(client.asked) >= 7


def test_later_passes_repeat_the_rounds_from_memory(load: Load) -> None:
    client = CannedClient(*(lease(row, largest_slice=row + 1) for row in range(6)), DONE, lease(9), DONE)
    loader = load(client)
    loader.next_partition()
    passes = [[(batch.indices[0], loader.largest_slice) for batch in rounds] for rounds in loader.passes(3, seed=5)]
    loader.ack()
    assert passes[0] == [(row, row + 1) for row in range(6)]
    assert [sorted(each) for each in passes] == [passes[0]] * 3
    assert len({tuple(each) for each in passes}) == 3
    assert client.acked == [[row] for row in range(6)]
    assert [batch.indices for batch in loader] == [(9,)]


def test_passes_in_a_given_order_are_the_same_on_every_rank(load: Load) -> None:
    orders = []
    for first in (0, 100):
        loader = load(CannedClient(*(lease(first + row) for row in range(8)), DONE))
        orders.append([[batch.indices[0] - first for batch in rounds] for rounds in loader.passes(2, seed=1)])
    assert orders[0] == orders[1]
    in_order = load(CannedClient(lease(3), lease(1), DONE))
    assert [[batch.indices for batch in rounds] for rounds in in_order.passes(2)] == [[(3,), (1,)]] * 2


def test_stop_in_the_first_pass_ends_them_all(load: Load) -> None:
    loader = load(CannedClient(lease(0), STOP))
    assert [[batch.indices for batch in rounds] for rounds in loader.passes(4)] == [[(0,)]]
    assert loader.stopped


def test_position_is_the_partition_that_is_not_acked_yet(load: Load) -> None:
    loader = load(CannedClient(lease(0), lease(1), DONE, lease(2), DONE))
    states = [loader.state_dict()["partition"]]
    loader.next_partition()
    rounds = iter(loader)
    next(rounds)
    loader.ack()
    states.append(loader.state_dict()["partition"])
    list(rounds)
    states.append(loader.state_dict()["partition"])
    loader.ack()
    states.append(loader.state_dict()["partition"])
    assert states == [1, 1, 1, 2]

    client = CannedClient(lease(2), DONE)
    resumed = load(client)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.next_partition() == 2
    assert [batch.indices for batch in resumed] == [(2,)]
    assert client.asked[0].partition == 2


def test_acks_go_on_beside_the_next_partition_in_order(load: Load) -> None:
    client = SlowAcks(lease(0), DONE, lease(1), DONE)
    loader = load(client, last_partition=2)
    list(loader)
    loader.ack_soon()
    assert [batch.indices for batch in loader] == [(1,)], "the next partition is read while the ack is on its way"
    assert client.acked == []
    assert loader.state_dict()["partition"] == 2
    loader.ack_soon()
    client.may_ack.set()
    loader.ack()
    assert client.acked == [[0], [1]]


def test_ack_that_failed_is_told_and_tried_again(load: Load) -> None:
    client = SlowAcks(lease(0), lease(1), DONE, failures=[TransportError("unit gone")])
    client.may_ack.set()
    loader = load(client, last_partition=1)
    list(loader)
    with pytest.raises(TransportError, match="unit gone"):
        loader.ack()
    assert client.acked == []
    loader.ack()
    assert client.acked == [[0], [1]]


def test_ack_that_was_fenced_is_told_once_and_the_later_ones_go_on(load: Load) -> None:
    client = SlowAcks(lease(0), lease(1), lease(2), DONE, failures=[LeaseFenced("row 0 is somebody else's")])
    client.may_ack.set()
    loader = load(client, last_partition=1)
    list(loader)
    with pytest.raises(LeaseFenced, match="row 0"):
        loader.ack()
    assert client.acked == [[1], [2]], "a loop that drops the work and goes on leaves nothing unacked"
    loader.ack()
    loader.ack()
    assert client.acked == [[1], [2]]
    assert loader.state_dict()["partition"] == 2


def test_ack_that_was_fenced_is_told_though_the_next_one_was_begun_meanwhile(load: Load) -> None:
    client = SlowAcks(lease(0), DONE, lease(1), DONE, failures=[LeaseFenced("row 0 is somebody else's")])
    loader = load(client, last_partition=2)
    list(loader)
    loader.ack_soon()
    list(loader)
    loader.ack_soon()
    client.may_ack.set()
    with pytest.raises(LeaseFenced, match="row 0"):
        loader.ack()
    loader.ack()
    assert client.acked == [[1]]


def test_call_that_tells_of_an_earlier_fenced_ack_acks_its_own_rows(load: Load) -> None:
    client = SlowAcks(lease(0), DONE, lease(1), DONE, failures=[LeaseFenced("row 0 is somebody else's")])
    loader = load(client, last_partition=2)
    list(loader)
    loader.ack_soon()
    client.may_ack.set()
    list(loader)
    with pytest.raises(LeaseFenced, match="row 0"):
        loader.ack()
    assert client.acked == [[1]]


def outputs(indices: Sequence[int]) -> dict[str, Column]:
    return {"y": Column.of_scalars(torch.tensor(indices))}


def test_round_whose_put_was_fenced_is_not_acked(load: Load) -> None:
    client = CannedClient(lease(0), lease(1), DONE, refusals=[LeaseFenced("row 0 is somebody else's")])
    loader = load(client, last_partition=1)
    rounds = iter(loader)
    indices = next(rounds).indices
    with pytest.raises(LeaseFenced):
        loader.put(outputs(indices))
    indices = next(rounds).indices
    loader.put(outputs(indices))
    assert list(rounds) == []
    loader.ack()
    assert (client.written, client.acked) == ([([1], [1])], [])
    assert loader.state_dict()["partition"] == 2


@pytest.mark.parametrize("error", [TransportError("storage-0 is gone"), ConfigError("y has 2 rows")])
def test_round_whose_put_failed_must_be_put_again_before_anything_else(load: Load, error: Exception) -> None:
    client = CannedClient(lease(0), lease(1), DONE, refusals=[error])
    loader = load(client, last_partition=1)
    rounds = iter(loader)
    indices = next(rounds).indices
    with pytest.raises(type(error)):
        loader.put(outputs(indices))
    with pytest.raises(ConfigError, match="put them again"):
        loader.ack()
    with pytest.raises(ConfigError, match="put them again"):
        next(iter(loader))
    loader.put(outputs(indices))
    assert [batch.indices for batch in loader] == [(1,)]
    loader.ack()
    assert (client.written, client.acked) == ([([0], [0])], [[1]])


def test_what_is_in_the_weights_is_acked_after_the_loader_was_closed_too(load: Load) -> None:
    client = CannedClient(lease(0), DONE)
    loader = load(client, last_partition=1)
    list(loader)
    loader.close()
    loader.ack()
    assert client.acked == [[0]]


def test_stopped_partition_is_where_to_go_on(load: Load) -> None:
    loader = load(CannedClient(lease(0), DONE, STOP))
    list(loader)
    loader.ack()
    assert list(loader) == []
    assert loader.state_dict() == {"task": "train", "partition": 2}


@pytest.mark.parametrize("state", [{"task": "other", "partition": 1}, {"task": "train"}, {}])
def test_state_of_another_loader_is_refused(load: Load, state: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cannot continue from"):
        load(CannedClient()).load_state_dict(state)


def test_state_comes_before_the_first_iteration(load: Load) -> None:
    loader = load(CannedClient(DONE))
    loader.next_partition()
    with pytest.raises(ConfigError, match="before the first iteration"):
        loader.load_state_dict(loader.state_dict())


def test_round_needs_a_size(load: Load) -> None:
    with pytest.raises(ConfigError, match="rows_per_round, token_budget"):
        load(CannedClient(), rows_per_round=0)


def test_token_budget_travels_with_the_request(load: Load) -> None:
    client = CannedClient(DONE)
    list(load(client, rows_per_round=0, token_budget=512, rank=1, num_ranks=2, timeout_s=9.0))
    asked = client.asked[0]
    assert (asked.num_rows, asked.token_budget, asked.rank, asked.num_ranks) == (ALL_ROWS, 512, 1, 2)
    assert (asked.task, asked.timeout_s) == ("train", 9.0)


def test_micro_batches_are_equally_many_on_all_ranks_and_balanced(load: Load) -> None:
    loader = load(CannedClient(lease(0, 1, 8, 9, largest_slice=7), lease(largest_slice=3), DONE))
    rounds = iter(loader)
    parts = loader.micro_batches(next(rounds), num_rows=2)
    assert len(parts) == 4
    assert sorted(row for part in parts for row in part.indices) == [0, 1, 8, 9]
    assert [sum(part["x"].lengths.tolist()) for part in parts[:2]] == [11, 11]
    assert [len(part) for part in parts] == [2, 2, 0, 0]
    assert [len(part) for part in loader.micro_batches(next(rounds), num_rows=2)] == [0, 0]


def test_micro_batches_keep_to_a_token_budget(load: Load) -> None:
    loader = load(CannedClient(lease(0, 1, 8, 9, 3), DONE))
    parts = loader.micro_batches(next(iter(loader)), token_budget=11)
    assert sorted(row for part in parts for row in part.indices) == [0, 1, 3, 8, 9]
    assert all(sum(part["x"].lengths.tolist()) <= 11 for part in parts)
    assert len(parts) == 3


def test_requests_are_counted(load: Load) -> None:
    loader = load(CannedClient(lease(0, 1), lease(2), lease(), DONE), last_partition=1)
    list(loader)
    assert loader.requests == (1 + 2) + (1 + 1) + 1 + 1


def test_deadlines_do_not_end_the_iteration(load: Load) -> None:
    assert [batch.indices for batch in load(CannedClient(LATE, LATE, lease(0), LATE, DONE))] == [(0,)]


def test_producers_that_are_gone_are_an_error(load: Load) -> None:
    client = CannedClient(lease(0))
    client.answer_always = ALONE
    loader = load(client, producers_timeout_s=0.05)
    rounds = iter(loader)
    assert next(rounds).indices == (0,)
    with pytest.raises(ProducersGone, match="round 1 of partition 1: waits for column y of 2 rows"):
        next(rounds)
    assert all(asked.timeout_s <= 0.05 for asked in client.asked)


@pytest.mark.parametrize("error", [TransportError("storage-0 is gone"), LeaseFenced("row 1 is not here")])
def test_rows_of_a_unit_that_died_are_asked_for_again(load: Load, error: TransportError) -> None:
    client = CannedClient(lease(0, 1), LATE, lease(0, 1), DONE, unreadable=[error])
    assert [batch.indices for batch in load(client, last_partition=1)] == [(0, 1)]
    assert [asked.round_index for asked in client.asked] == [0, 0, 0, 1]


def test_rows_that_stay_away_are_an_error(load: Load) -> None:
    client = CannedClient(*[lease(0)] * 1000, unreadable=[TransportError("storage-1 is gone")] * 1000)
    with pytest.raises(TransportError, match="storage-1"):
        list(load(client, producers_timeout_s=1e-4))


def test_refused_read_is_an_error_at_once(load: Load) -> None:
    client = CannedClient(lease(0), unreadable=[PeerRefused("no column z")])
    with pytest.raises(PeerRefused, match="no column z"):
        list(load(client))


def test_torch_data_loader_iterates_over_it(load: Load) -> None:
    loader = load(CannedClient(lease(0, 1), lease(2), DONE, lease(3), DONE))
    batches = DataLoader(loader, batch_size=None)
    seen = []
    for _ in range(2):
        for batch in batches:
            seen.append((loader.partition, list(batch.indices)))
        loader.ack()
    assert seen == [(1, [0, 1]), (1, [2]), (2, [3])]


def test_worker_processes_are_refused(load: Load) -> None:
    with pytest.raises(ConfigError, match="num_workers=0"):
        list(DataLoader(load(CannedClient()), batch_size=None, num_workers=1))
    with pytest.raises(ConfigError, match="num_workers=0"):
        pickle.dumps(load(CannedClient()))
