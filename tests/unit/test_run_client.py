"""What a process outside puts is checked before the run sees it; what it is told of the run has no secrets."""

import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from asyncflow.clock import HostClock
from asyncflow.decoding import msgpack_decoder
from asyncflow.errors import ConfigError, LeaseFenced, TransportError
from asyncflow.job import LOOPBACK, GangSpec, Job
from asyncflow.sealed_store import SealedStore, serve_store
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from tq.client.lease import Lease
from tq.columns import Column, PackedBatch
from tq.config import QueueConfig
from tq.messages import LeaseGrant
from tq.policies import StalenessRule
from weightsync.version import Version
from workers.outside.run_client import Announcement, OutsideLease, OutsideTask, connect
from workers.records.outside_metrics import OutsideMetrics, report_metrics

SECRET = "5e" * 32
GENERATED = ("tokens", "sample_lengths", "response_mask", "rollout_log_probs", "versions", "truncated")
ROLLOUT = OutsideTask(("prompts",), GENERATED, needs_version=True)
TURNS = OutsideTask(("prompts",), (*GENERATED, "turn_ids", "rewards", "correct", "turn_rewards"), needs_version=True)
REWARDS = OutsideTask(("tokens",), ("rewards", "correct"), needs_version=False)
PARTS = OutsideTask(("tokens",), ("rewards", "correct", "reward_parts"), needs_version=False)
REF = OutsideTask(("tokens", "sample_lengths", "response_mask"), ("ref_log_probs",), needs_version=False)


class Queue:
    """Has the mask of rows with two and one drawn tokens, and remembers puts; stands in for a client's data plane."""

    def __init__(self, *, fenced: bool = False) -> None:
        self.fenced = fenced
        self.puts: list[Mapping[str, Column]] = []

    def get(self, granted: LeaseGrant, names: Sequence[str]) -> PackedBatch:
        if self.fenced:
            raise LeaseFenced("others have the rows")
        assert list(names) == ["response_mask"]
        masks = [torch.tensor(row, dtype=torch.uint8) for row in ([0, 1, 1], [0, 1])]
        return PackedBatch(tuple(granted.rows), {"response_mask": Column.of_rows(masks)})

    def put(self, granted: LeaseGrant, rows: Sequence[int], columns: Mapping[str, Column]) -> None:
        if self.fenced:
            raise LeaseFenced("others have the rows")
        self.puts.append(columns)


def lease_of(queue: Queue, task: OutsideTask, *, held: int = 0, bound: int = 1) -> OutsideLease:
    """Return a lease of rows 4 and 5, admitted for step 3."""
    grant = LeaseGrant("task", 1, 3, [4, 5], [2, 2], ["storage-0"] * 2)
    plain = Lease(queue, grant)  # type: ignore[arg-type]  # what is not called here
    return OutsideLease(queue, plain, task, Version(0, held), allowed=StalenessRule(bound))  # type: ignore[arg-type]


def generated(**others: Any) -> dict[str, Any]:
    """Return columns of two rows, with two and one drawn tokens of versions 1 and 2."""
    columns = {
        "tokens": [[5, 6, 7], [5, 8]],
        "sample_lengths": [[3], [2]],
        "response_mask": [[0, 1, 1], [0, 1]],
        "rollout_log_probs": [[-0.5, -1.0], [-2.0]],
        "versions": [[1, 2], [2]],
        "truncated": [False, True],
    }
    return columns | others


def test_lists_and_wide_numbers_become_the_columns_that_the_run_reads() -> None:
    queue = Queue()
    scores = {"rewards": torch.tensor([0.5, 1.0], dtype=torch.float64), "correct": [0, 1]}
    assert lease_of(queue, REWARDS).put(scores)
    assert lease_of(queue, ROLLOUT, held=2).put(generated())
    kinds = {name: column.values.dtype for put in queue.puts for name, column in put.items()}
    assert kinds == {
        "rewards": torch.float32,
        "correct": torch.bool,
        "tokens": torch.int64,
        "sample_lengths": torch.int32,
        "response_mask": torch.uint8,
        "rollout_log_probs": torch.float32,
        "versions": torch.int32,
        "truncated": torch.bool,
    }


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"versions": [[0, 2], [2]]}, "versions 0 to 2 for step 3, which takes 1 to 2"),
        ({"versions": [[1, 2], [3]]}, "versions 1 to 3 for step 3"),
        ({"rollout_log_probs": [[-0.5], [-2.0]]}, r"rollout_log_probs of \[1, 1\] for \[2, 1\] drawn tokens"),
        ({"rollout_log_probs": [[-0.5, float("nan")], [-2.0]]}, "not finite"),
        ({"response_mask": [[0, 1, 1], [0]]}, r"response_mask of \[3, 1\] for \[3, 2\] tokens"),
        (
            {"response_mask": [[0, 1, 1], [0, 0]], "rollout_log_probs": [[-1, -1], []], "versions": [[1, 2], []]},
            "no dr",
        ),
        ({"sample_lengths": [[3], [1]]}, r"sample_lengths \(their sums\) of \[3, 1\]"),
        ({"response_mask": [[0, 0, 2], [0, 1]]}, "column response_mask: it has values besides 0 and 1; give a tensor"),
        ({"response_mask": [[0, 257, 1], [0, 1]]}, "besides 0 and 1"),
        ({"response_mask": [[0.5, 1, 1], [0, 1]]}, "besides 0 and 1"),
        ({"sample_lengths": [[4, -1], [2]]}, "sample_lengths are less than 1; a sample has tokens"),
        ({"sample_lengths": [[3, 0], [2]]}, "sample_lengths are less than 1"),
        ({"tokens": [5, None]}, "column tokens: .*; give a tensor or list per row"),
        ({"rewards": [1.0, 1.0]}, "a put of columns .* rewards; give tokens"),
    ],
)
def test_what_does_not_fit_is_refused_and_not_put(wrong: dict[str, Any], message: str) -> None:
    queue = Queue()
    with pytest.raises(ConfigError, match=message):
        lease_of(queue, ROLLOUT, held=2).put(generated(**wrong))
    assert not queue.puts


def in_turns(**others: Any) -> dict[str, Any]:
    scored = {"turn_ids": [[0, 1], [0]], "turn_rewards": [[0.1, 0.2], [1]], "rewards": [0.3, 1], "correct": [0, 1]}
    return generated(**scored) | others


def test_rewards_of_turns_are_as_many_as_a_row_has() -> None:
    queue = Queue()
    assert lease_of(queue, TURNS, held=2).put(in_turns())
    failed = in_turns(turn_rewards=[[float("nan")] * 2, [1]], rewards=[float("nan"), 1])
    assert lease_of(queue, TURNS, held=2).put(failed)
    column = queue.puts[0]["turn_rewards"]
    assert [row.tolist() for row in column.rows()] == [[0.1, 0.2], [1.0]] and column.values.dtype == torch.float64


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"turn_ids": [[0, 2], [0]]}, r"2 turn_rewards for turns \[0, 2\]; give one for each turn"),
        ({"turn_ids": [[-1, 0], [0]]}, "turn_ids are negative; number a row's turns from 0"),
        ({"turn_rewards": [[0.1, 0.2], []]}, r"0 turn_rewards for turns \[0\]"),
        ({"turn_rewards": [[0.1, 0.3], [1]]}, r"turn_rewards \[0.1, 0.3\] of a row whose reward is 0.3; give rewards"),
        ({"turn_rewards": [[0.3, float("nan")], [1]]}, r"turn_rewards \[0.3, nan\] of a row whose reward is 0.3"),
        ({"turn_rewards": [0.3, None]}, "column turn_rewards: .*; give a tensor or list per row"),
    ],
)
def test_rewards_of_turns_that_do_not_fit_are_refused(wrong: dict[str, Any], message: str) -> None:
    queue = Queue()
    with pytest.raises(ConfigError, match=message):
        lease_of(queue, TURNS, held=2).put(in_turns(**wrong))
    assert not queue.puts


@pytest.mark.parametrize(
    ("log_probs", "message"),
    [
        ([[0.0], [0.0]], r"task: ref_log_probs of \[1, 1\] for \[2, 1\] drawn tokens; give one for each"),
        ([[0.0], [0.0, 0.0]], r"ref_log_probs of \[1, 2\] for \[2, 1\] drawn tokens"),
        ([[0.0, 0.0]], r"ref_log_probs of \[2\] for \[2, 1\] drawn tokens"),
        ([[0.0, float("nan")], [0.0]], "ref_log_probs are not finite; were the weights loaded"),
        ([[0.0, -1e39], [0.0]], "ref_log_probs are not finite"),
    ],
)
def test_log_probs_that_do_not_fit_what_others_generated_are_refused(log_probs: list[Any], message: str) -> None:
    queue = Queue()
    lease = lease_of(queue, REF)
    with pytest.raises(ConfigError, match=message):
        lease.put({"ref_log_probs": log_probs})
    assert not queue.puts and lease.open_rows == [4, 5]


def test_log_probs_are_put_in_any_order_of_rows_and_too_late_change_nothing() -> None:
    queue = Queue()
    lease = lease_of(queue, REF)
    with pytest.raises(ConfigError, match=r"of \[2\] for \[1\] drawn tokens"):
        lease.put({"ref_log_probs": [[-1.0, -2.0]]}, rows=[5])
    assert lease.put({"ref_log_probs": [[-1.0], [-2.0, -3.0]]}, rows=[5, 4])
    assert lease.put({"ref_log_probs": [[-1.0], [-2.0, -3.0]]}), "nothing is open"
    assert [put["ref_log_probs"].lengths.tolist() for put in queue.puts] == [[1, 2]]
    late = lease_of(Queue(fenced=True), REF)
    assert not late.put({"ref_log_probs": [[-2.0, -3.0], [-1.0]]})
    assert late.open_rows == []


@pytest.mark.parametrize("reward", [float("inf"), 1e39])
def test_reward_that_float32_does_not_have_is_refused_and_a_failed_one_is_not(reward: float) -> None:
    queue = Queue()
    with pytest.raises(ConfigError, match="task: rewards are not finite as float32; give numbers, NaN where scoring"):
        lease_of(queue, REWARDS).put({"rewards": [1.0, reward], "correct": [True, True]})
    assert not queue.puts
    assert lease_of(queue, REWARDS).put({"rewards": [1.0, float("nan")], "correct": [True, False]})


@pytest.mark.parametrize(
    "parts",
    ["five", None, [1.0], {"a": "1"}, {"a": None}, {"a": [1.0, 2.0]}, {"a": float("nan")}, {"a": 10**400}, {3: 1}],
)
def test_reward_parts_that_the_trainer_could_not_add_up_are_refused(parts: Any) -> None:
    queue = Queue()
    with pytest.raises(ConfigError, match="column reward_parts: .*; give a dict of names to finite numbers per row"):
        lease_of(queue, PARTS).put({"rewards": [1.0, 1.0], "correct": [True, True], "reward_parts": [{}, parts]})
    assert not queue.puts


def test_reward_parts_of_any_library_become_plain_numbers() -> None:
    queue = Queue()
    parts = [{"length": np.float32(0.5), "exact": torch.tensor(1)}, {}]
    assert lease_of(queue, PARTS).put({"rewards": [1.0, 0.0], "correct": [True, False], "reward_parts": parts})
    assert queue.puts[0]["reward_parts"].objects() == [{"length": 0.5, "exact": 1.0}, {}]


def test_announcement_has_the_tasks_of_roles_without_processes_and_no_secret() -> None:
    config = load_config(find_recipe("quickstart"), roles="rollout:1,actor:1,reward:0")
    gangs = (GangSpec("rollout-0", "rollout", 0, 1, ("cpu",)), GangSpec("actor", "actor", 0, 1, ("cpu",)))
    job = Job(LOOPBACK, 1, SECRET, 1, gangs, 0, "", 3, 0.0, HostClock.from_wall_clock())
    encoded = msgspec.msgpack.encode(Announcement.from_run(config, job))
    told = msgpack_decoder(Announcement).decode(encoded)
    assert told.tasks["rewards"].outputs == ("rewards", "correct")
    assert told.tasks["actor_rollout"].needs_version
    assert "actor_train" not in told.tasks
    assert "backend" not in told.queue  # its address may hold a password
    assert QueueConfig.model_validate(told.queue).lease_timeout_s == config.tq.lease_timeout_s
    assert SECRET.encode() not in encoded


@pytest.mark.parametrize(("interval", "says"), [(0, False), (2, True)])
def test_process_outside_says_which_reference_it_holds_where_that_follows_the_policy(interval: int, says: bool) -> None:
    config = load_config(
        find_recipe("quickstart"),
        roles="rollout:1,actor:1,ref:0",
        overrides=[f"algorithm.ref_update_interval={interval}"],
    )
    gangs = (GangSpec("rollout-0", "rollout", 0, 1, ("cpu",)), GangSpec("actor", "actor", 0, 1, ("cpu",)))
    job = Job(LOOPBACK, 1, SECRET, 1, gangs, 0, "", 3, 0.0, HostClock.from_wall_clock())
    assert Announcement.from_run(config, job).tasks["ref_log_probs"].needs_version is says


@pytest.mark.parametrize(
    ("run", "key", "message"),
    [
        ("10.0.0.1:80", None, "is an address; give its key"),
        ("nowhere", SECRET, "is not HOST:PORT"),
        ("10.0.0.1:80", "not hex, though hush", "must consist of hex digits"),
        ("nothing-there", None, "nothing runs there"),
    ],
)
def test_where_there_is_no_run_the_key_is_not_shown(run: str, key: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        connect(run, key)
    assert key is None or key not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"timeout_s": 0}, "timeout_s: 0 is not a timeout; give a positive number of seconds"),
        ({"timeout_s": float("nan")}, "timeout_s: nan"),
        ({"name": 5}, "name: 5 must consist of letters"),
        ({"run": "no-such-host.invalid:80"}, "run: host 'no-such-host.invalid' cannot be resolved .*; give its addres"),
        ({"run": "a..b:80"}, "run: host 'a..b' cannot be resolved"),
    ],
)
def test_what_cannot_be_connected_to_is_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        connect(**{"run": f"{LOOPBACK}:80", "key": SECRET, **given})
    assert "\n" not in str(caught.value)


def test_host_may_be_a_name(server: tuple[SealedStore, int]) -> None:
    with pytest.raises(ConfigError, match=f"the run at {LOOPBACK}:{server[1]} has another one"):
        server[0].put("outside/run", b"")
        connect(f"localhost:{server[1]}", "ab" * 32, timeout_s=10)


def test_peer_that_accepts_and_says_nothing_is_left_in_time() -> None:
    with socket.create_server((LOOPBACK, 0)) as mute:
        begin = time.monotonic()
        with pytest.raises(TransportError, match=r"it accepted no connection within 0\.5 s") as caught:
            connect(f"{LOOPBACK}:{mute.getsockname()[1]}", SECRET, timeout_s=0.5)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begin < 10


def test_another_runs_key_is_said_to_be_wrong(server: tuple[SealedStore, int]) -> None:
    store, port = server
    store.put("outside/run", b"")
    with pytest.raises(ConfigError, match="has another one"):
        connect(f"{LOOPBACK}:{port}", "ab" * 32, timeout_s=10)


def test_numbers_are_in_one_step_and_gone_from_the_next(server: tuple[SealedStore, int]) -> None:
    store, _ = server
    read = OutsideMetrics(store)
    assert read.read_new() == {}
    report_metrics(store, "judge", {"ms": 3.0}, stamp="1")
    report_metrics(store, "judge", {"ms": 4.0}, stamp="2")
    report_metrics(store, "other", {"n": 1}, stamp="1")
    assert read.read_new() == {"outside/judge/ms": 4.0, "outside/other/n": 1}
    report_metrics(store, "judge", {"ms": 4.0}, stamp="3")
    assert read.read_new() == {"outside/judge/ms": 4.0}
    with pytest.raises(ConfigError, match="metrics: None is not a dict"):
        report_metrics(store, "judge", None, stamp="4")  # type: ignore[arg-type]  # a mistake
    with pytest.raises(ConfigError, match="ms: nan is not finite"):
        report_metrics(store, "judge", {"ms": float("nan")}, stamp="4")
    with pytest.raises(ConfigError, match="ms: an integer too large for a float; leave it out"):
        report_metrics(store, "judge", {"ms": 10**5000}, stamp="4")
    assert read.read_new() == {}


@pytest.fixture
def server() -> tuple[SealedStore, int]:
    store, port = serve_store(LOOPBACK, timedelta(seconds=10))
    return SealedStore(store, bytes.fromhex(SECRET)), port
