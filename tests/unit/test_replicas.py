"""Ranks that share rows: over what their rows travel."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from asyncflow.errors import TransportError
from tq.client.dataloader import DeviceRoute, Replica
from tq.columns import Column, PackedBatch
from tq.config import QueueConfig, ReplicaFetch
from workers.rank import peers as replicas
from workers.rank.peers import ReplicaPlace, open_replica
from workers.settings.engines import ActorConfig
from workers.trainer.actor import EqualRounds

CUDA = torch.device("cuda:1")


@pytest.fixture(name="connected")
def _connected(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(device, rank, size) of every group that is connected."""
    made: list[tuple[str, int, int]] = []

    def connect(store: Any, rank: int, size: int, device: torch.device) -> Any:
        made.append((device.type, rank, size))
        return SimpleNamespace(rank=lambda: rank, size=lambda: size)

    monkeypatch.setattr(replicas, "connect_group", connect)
    return made


def open_at(place: ReplicaPlace, fetch: str = "broadcast", broadcast: str = "host") -> Replica | None:
    context: Any = SimpleNamespace(
        device=CUDA, gang=SimpleNamespace(name="actor"), job=SimpleNamespace(lineage=0), attempt=0,
        config=SimpleNamespace(
            launcher=SimpleNamespace(operation_timeout_s=1.0),
            tq=QueueConfig.model_validate({"replica_broadcast": broadcast}),
        ),
        new_store=lambda _: HashStore(),
    )  # fmt: skip
    groups: Any = lambda within_stage: ("of the stage" if within_stage else "of the replica",)  # noqa: E731
    return open_replica(context, place, ReplicaFetch(fetch), groups)


def test_rows_travel_over_gloo_whatever_the_device(connected: list[Any]) -> None:
    """A communicator of the device beside the model's could wait for it, and it for that."""
    replica = open_at(ReplicaPlace(0, 1, ((0, 1),), 1))
    assert replica is not None
    assert (replica.route, replica.in_program_order) == (None, False)
    assert connected == [("cpu", 1, 2)]


@pytest.mark.parametrize(("fetch", "groups"), [("broadcast", "of the replica"), ("stage", "of the stage")])
def test_from_device_to_device_they_take_the_groups_of_the_engine(
    connected: list[Any], fetch: str, groups: str
) -> None:
    replica = open_at(ReplicaPlace(0, 1, ((0, 1, 2, 3),), 1, 2), fetch, "device")
    assert replica is not None
    assert replica.route is not None
    assert (replica.route.groups, replica.route.device, replica.in_program_order) == ((groups,), CUDA, True)
    assert [device for device, *_ in connected] == ["cpu"], "it makes no communicator of its own"


def test_rows_travel_between_devices_inside_of_what_the_caller_enters(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[bool] = []
    entered = False

    @contextmanager
    def computing() -> Iterator[None]:
        nonlocal entered
        entered = True
        yield
        entered = False

    monkeypatch.setattr("torch.distributed.broadcast", lambda *_, **__: inside.append(entered))
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda _: [0])
    groups: Any = ("first", "second")
    host = torch.arange(16, dtype=torch.uint8)
    route = DeviceRoute(groups, torch.device("cpu"), computing)
    assert route.carry(host, sends=True) is host
    assert (inside, entered) == ([True, True], False)


def test_stages_distribute_rows_by_themselves(connected: list[Any]) -> None:
    """Tensor 2, data 2, pipeline 2: replica 1 is ranks 2 3 of the first stage, 6 7 of the second."""
    actor = ActorConfig.model_validate(
        {"engine": "megatron", "megatron": {"tensor_parallel": 2, "pipeline_parallel": 2}}
    )
    found = {}
    for rank in (2, 3, 6, 7):
        place = ReplicaPlace.of_rank(actor, rank, 8)
        replica = open_at(place, "stage")
        assert replica is not None
        found[rank] = (place.stage_ranks, replica.fetches, replica.acks, connected[-1][1:])
    assert found == {
        2: ((2, 3), True, True, (0, 2)),
        3: ((2, 3), False, False, (1, 2)),
        6: ((6, 7), True, False, (0, 2)),
        7: ((6, 7), False, False, (1, 2)),
    }


def test_a_rank_whose_rows_were_put_again_between_two_reads_does_not_train_on_them() -> None:
    """Both ranks hold the lease of rows 4 and 7; the unit died after the first one had read them."""
    responses = [torch.tensor([5, 6]), torch.tensor([7])], [torch.tensor([5, 6]), torch.tensor([8])]
    read, put_again = (PackedBatch((4, 7), {"responses": Column.of_rows(rows)}) for rows in responses)
    said: list[str] = []

    def have_equal(value: str) -> bool:
        said.append(value)
        return len(set(said[-2:])) == 1

    def rounds(*batches: PackedBatch) -> Iterator[PackedBatch]:
        source: Any = list(batches)
        return iter(EqualRounds(source, have_equal))

    empty = PackedBatch((), {})
    assert list(rounds(read)) == [read]
    assert next(rounds(read)) is read
    with pytest.raises(TransportError, match="have read different rows of the same round"):
        next(rounds(put_again))
    said.clear()
    assert list(rounds(empty, empty)) == [empty, empty], "a round may be empty for a replica"


@pytest.mark.parametrize(
    ("stages", "fetch", "several"),
    [(2, "broadcast", False), (2, "stage", True), (1, "stage", False), (1, "each", True), (2, "each", True)],
)
def test_rounds_are_compared_where_several_ranks_read_them(stages: int, fetch: str, several: bool) -> None:
    assert ReplicaPlace(0, 1, ((0, 1, 2, 3),), 1, stages).reads_several_times(ReplicaFetch(fetch)) is several
    assert not ReplicaPlace(0, 2, ((0,), (1,)), 0).reads_several_times(ReplicaFetch(fetch))
