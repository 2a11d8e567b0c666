"""Groups over a backend with the bad manners of NCCL and HCCL: every wait ends by its deadline, and no process dies.

The backend meets in its first collective, which blocks in the host and which `abort` does not end; `wait` ignores its
timeout, and a watchdog ends the process, unless the constructor was told to wait in the host. See `asyncflow.vendors`.
"""

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import asyncflow.device
from asyncflow.device import abort_group, connect_group
from asyncflow.errors import WeightsLate
from asyncflow.vendors import Vendor, vendor_of, vendors
from weightsync.broadcast import _meet
from weightsync.messages import Transfer
from weightsync.version import Version

pytestmark = pytest.mark.gate  # starts no process

CPU = torch.device("cpu")
DEADLINE_S = 30.0
SHORT = timedelta(seconds=0.3)


class RudeGroup:
    """A group whose first collective returns when all members are in it, and never else."""

    def __init__(self, met: threading.Barrier, blocking_wait: str | None) -> None:
        self._met = met
        self.blocking_wait = blocking_wait

    def name(self) -> str:
        return "rude"

    def allreduce(self, _: list[torch.Tensor]) -> "RudeGroup":
        self._met.wait()
        return self

    def wait(self, _: timedelta) -> None:
        """The group is its own work."""


class Rude(Vendor):
    """The vendor of such groups, in the place of the CPU's."""

    made: list[RudeGroup]
    aborted: list[Any]

    def group(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        self.made.append(RudeGroup(self.met, os.environ.get("TORCH_NCCL_BLOCKING_WAIT")))  # type: ignore[attr-defined]
        return self.made[-1]

    def abort(self, group: Any) -> None:
        self.aborted.append(group)


@pytest.fixture
def rude(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rude]:
    vendor, met = Rude("cpu", "rude"), threading.Barrier(2)
    for name, value in {"made": [], "aborted": [], "met": met}.items():
        object.__setattr__(vendor, name, value)
    monkeypatch.setattr(asyncflow.device, "vendor_of", lambda _: vendor)
    monkeypatch.setattr(asyncflow.device, "vendors", lambda: {"cpu": vendor})
    yield vendor
    met.abort()  # threads that were abandoned in it end


def store(timeout: timedelta) -> dist.Store:
    one = dist.HashStore()
    one.set_timeout(timeout)
    return one


def test_ranks_that_all_come_are_connected(rude: Rude) -> None:
    shared = store(timedelta(seconds=DEADLINE_S))
    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(lambda rank: connect_group(shared, rank, 2, CPU), range(2)))
    assert sorted(map(id, groups)) == sorted(map(id, rude.made))
    abort_group(groups[0])
    assert rude.aborted == [groups[0]]


def test_no_rank_enters_the_backend_before_all_are_there(rude: Rude) -> None:
    with pytest.raises(RuntimeError):
        connect_group(store(SHORT), 0, 2, CPU)
    assert rude.made == []


def test_a_rank_that_dies_between_meeting_and_connecting_costs_the_deadline(rude: Rude) -> None:
    shared = store(SHORT)
    shared.set("here/1", "1")
    with pytest.raises(RuntimeError, match=r"did not connect within 0\.3 s"):
        connect_group(shared, 0, 2, CPU)
    assert len(rude.made) == 1


def test_a_receiver_that_never_comes_is_left_out_of_the_broadcast(rude: Rude) -> None:
    transfer = Transfer("epoch", Version(0, 1), ["rollout-0"], "")
    with pytest.raises(WeightsLate, match=r"not all of rollout-0 came within 0\.3 s"):
        _meet(store(SHORT), transfer, sender=0, rank=0, device=CPU)
    assert rude.made == []


class Recorded:
    """Stands for a vendor's process group: records what its constructor sees."""

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        self.env = {name: os.environ.get(name) for name in os.environ if "BLOCKING_WAIT" in name}
        self.options = options
        self.reasons: list[str] = []

    def name(self) -> str:
        return "hccl"

    def abort(self) -> None:
        """Empty, as the base class's is on HCCL."""

    def abort_hccl_comm(self, reason: str) -> None:
        self.reasons.append(reason)

    Options = SimpleNamespace


def test_nccl_waits_in_the_host_by_the_groups_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Recorded, raising=False)
    group: Any = vendor_of("cuda:1").group(dist.HashStore(), 0, 1, SHORT)
    assert group.env == {"TORCH_NCCL_BLOCKING_WAIT": "1"}
    assert group.options._timeout == SHORT
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ, "it is no setting of the gang's own group"


def test_nccl_writes_no_dump_key_into_the_jobs_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
    vendor_of("cuda").load()
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT")


def test_hccl_waits_in_the_host_and_is_aborted_by_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch_npu", "torch_npu._C", "torch_npu._C._distributed_c10d"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["torch_npu._C._distributed_c10d"], "ProcessGroupHCCL", Recorded, raising=False)
    group: Any = vendor_of("npu").group(dist.HashStore(), 0, 1, SHORT)
    assert group.env == {"TORCH_HCCL_BLOCKING_WAIT": "1", "HCCL_BLOCKING_WAIT": "1"}
    assert group.options._timeout == group.options.op_timeout == SHORT
    abort_group(group)
    assert len(group.reasons) == 1


def test_a_vendor_is_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(vendors()) == ["npu", "cuda", "cpu"]
    mine = Vendor("mine", "mccl", "mine", "MINE_VISIBLE")
    entry = SimpleNamespace(name="mine", value="mine:MINE", load=lambda: mine)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry])
    monkeypatch.setattr("asyncflow.vendors.vendors", vendors.__wrapped__)
    assert vendor_of("mine:3") is mine
