"""The main job over several hosts, as users start it: the same command on each of them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncflow.job import Job, endpoint
from tests.support.run_files import last_step, lines

from .hosts import Host, ends, eventually, some_hosts

COMMAND = Path(sys.executable).parent / "asyncflow-launch"
SMALL = (
    "--roles", "rollout:2,actor:4", "--set", "schedule.rollout_batch_size=8", "--set", "tq.num_storage_units=3",
    "--set", "actor.micro_batch_size=32", "--set", "checkpoint.interval=2", "--set", "checkpoint.export_hf=false",
)  # fmt: skip


def launch(hosts: list[Host], *arguments: Any) -> "list[subprocess.Popen[str]]":
    """Start the same command on every host."""
    head = ("--nnodes", len(hosts), "--head", endpoint(hosts[0].address, 29400))
    return [host.start(COMMAND, *arguments, *head, "--node-rank", rank) for rank, host in enumerate(hosts)]


def check_ledger(run_dir: Path, last: int) -> None:
    """Every admitted group of steps 1..last was trained exactly once, in its step."""
    trained = sorted((line["step"], line["group"]) for line in lines(run_dir / "ledger.jsonl"))
    assert trained == [(group // 8 + 1, group) for group in range(8 * last)]


def begun(run_dir: Path, processes: "list[subprocess.Popen[str]]", step: int) -> None:
    """Wait until a run has trained so far."""

    def at_step() -> bool:
        ended = [process for process in processes if process.poll() is not None]
        assert not ended, ends(ended)
        return last_step(run_dir) >= step

    eventually(at_step, f"step {step}", 280)


def services_seen_from(host: Host, run_dir: Path) -> tuple[int, int]:
    """Return how many storage units and weight agents answer `asyncflow status`; one that is busy is left out."""
    ((code, text),) = ends([host.start(COMMAND.with_name("asyncflow"), "status", run_dir, "--json")])
    assert code == 0, text
    status = json.loads(text[text.index("{") :])
    return len(status["units"]), len(status["weights"])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", ["staged", "broadcast"])
def test_run_between_hosts_that_have_ipv6_alone(permitted: None, tmp_path: Path, path: str) -> None:
    run_dir = tmp_path / "run"
    with some_hosts(2, ipv6=True) as hosts:
        launchers = launch(hosts, "--run-dir", run_dir, "--steps", 2, "--set", f"weightsync.path={path}", *SMALL)
        begun(run_dir, launchers, 1)
        for host in hosts:
            assert host.listening() <= {host.address, "127.0.0.1"}
        results = ends(launchers, 280)
    assert [code for code, _ in results] == [0, 0], results
    check_ledger(run_dir, 2)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", ["staged", "broadcast"])
def test_run_stops_on_all_hosts_and_goes_on(three_hosts: list[Host], tmp_path: Path, path: str) -> None:
    run_dir = tmp_path / "run"
    launchers = launch(three_hosts, "--run-dir", run_dir, "--steps", 100000, "--set", f"weightsync.path={path}", *SMALL)
    begun(run_dir, launchers, 3)
    job = Job.load(run_dir)
    assert job.gang("actor").nodes == (0, 0, 1, 1)
    assert [job.gang(f"rollout-{k}").nodes for k in range(2)] == [(2,), (2,)]
    eventually(lambda: services_seen_from(three_hosts[2], run_dir) == (3, 3), "answers of all services")
    for host in three_hosts:
        assert host.listening() <= {host.address, "127.0.0.1"}
    launchers[1].send_signal(signal.SIGUSR1)
    results = ends(launchers)
    assert [code for code, _ in results] == [75, 75, 75], results
    stopped_at = last_step(run_dir)
    resumed = ends(launch(three_hosts, "--run-dir", run_dir, "--resume", "latest", "--steps", stopped_at + 2), 280)
    assert [code for code, _ in resumed] == [0, 0, 0], resumed
    assert len({output.splitlines()[-1] for _, output in resumed}) == 1
    check_ledger(run_dir, stopped_at + 2)
    logs = {str(path.relative_to(run_dir / "logs")) for path in (run_dir / "logs").rglob("*.log")}
    assert {"launcher.log", "launcher-1.log", "launcher-2.log", "actor/3.log", "rollout/1.log", "weights/2.log"} <= logs


@pytest.mark.timeout(900)
def test_run_whose_host_died_goes_on_with_fewer(three_hosts: list[Host], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    launchers = launch(three_hosts, "--run-dir", run_dir, "--steps", 100000, *SMALL)
    begun(run_dir, launchers, 3)
    eventually(lambda: any((run_dir / "checkpoints").glob("step_*")), "a checkpoint")
    launchers[1].kill()
    results = ends([launchers[0], launchers[2]], 280)
    assert [code for code, _ in results] == [75, 75], results
    assert all("node 1 (host-1) is gone" in output.splitlines()[-1] for _, output in results)
    eventually(lambda: not any(host.pids() for host in three_hosts), "the end of all processes")
    saved = max(int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_*"))
    two = [three_hosts[0], three_hosts[2]]
    resumed = ends(launch(two, "--resume", run_dir, "--steps", saved + 2), 280)
    assert [code for code, _ in resumed] == [0, 0], resumed
    check_ledger(run_dir, saved + 2)


@pytest.mark.timeout(900)
def test_trainer_that_dies_on_another_host_goes_back_to_its_checkpoint_while_rollouts_stay(
    three_hosts: list[Host], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    launchers = launch(three_hosts, "--run-dir", run_dir, "--steps", 100000, *SMALL)
    begun(run_dir, launchers, 3)
    rollouts = {pid_of(three_hosts[2], run_dir, f"rollout-{k}-0") for k in range(2)}
    os.kill(pid_of(three_hosts[1], run_dir, "actor-3"), signal.SIGKILL)
    eventually(lambda: lineage(run_dir) == 1, "the next lineage", 280)
    restored_at = lines(run_dir / "metrics.jsonl")[-1]["step"]
    begun(run_dir, launchers, restored_at + 2)
    assert {pid_of(three_hosts[2], run_dir, f"rollout-{k}-0") for k in range(2)} == rollouts
    launchers[0].send_signal(signal.SIGINT)
    results = ends(launchers)
    assert [code for code, _ in results] == [75, 75, 75], results
    assert "actor rank 3 failed: ended by SIGKILL" in results[0][1], results[0][1]
    check_ledger(run_dir, last_step(run_dir))


def lineage(run_dir: Path) -> int:
    """Return the lineage of the last finished step."""
    metrics = lines(run_dir / "metrics.jsonl")
    return metrics[-1]["lineage"] if metrics else 0


def pid_of(host: Host, run_dir: Path, name: str) -> int:
    """Return the process on a host that writes the timeline GANG-RANK."""
    timeline = str(run_dir / "timeline" / f"{name}.jsonl")
    for pid in host.pids():
        with contextlib.suppress(OSError):
            if any(str(entry.readlink()) == timeline for entry in Path(f"/proc/{pid}/fd").iterdir()):
                return pid
    raise AssertionError(f"{name} is not on {host.name}")


def test_mistake_is_told_on_every_host_and_leaves_nothing(two_hosts: list[Host], tmp_path: Path) -> None:
    head, other = launch(two_hosts, "--run-dir", tmp_path / "run", "--roles", "rollout:1,actor:3")
    ((code, output),) = ends([head])
    mistake = "schedule.rollout_batch_size: 32 groups do not divide over actor:3"
    assert code == 2
    assert output.splitlines()[-1].startswith(f"Error: {mistake}")
    assert other.stdout is not None
    said = f"node 1 of 2 (host-1): cannot take part: {mistake}"
    assert any(line.startswith(said) for line in iter(other.stdout.readline, ""))
    other.terminate()  # it would try to tell node 0
    ((code, output),) = ends([other])
    assert code == 2
    assert output.splitlines()[-1].startswith(f"Error: {mistake}")
    assert not (tmp_path / "run").exists()


def test_what_only_another_host_lacks_is_told_by_node_0(two_hosts: list[Host], tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    run_dir = tmp_path / "here" / "run"
    arguments = ("--run-dir", run_dir, "--set", "reward.function=my_reward:score")
    (tmp_path / "my_reward.py").write_text("def score(prompt, response, ground_truth):\n    return 0.0\n")
    head = ("--nnodes", 2, "--head", two_hosts[0].address)
    launchers = [
        two_hosts[0].start(COMMAND, *arguments, *head, "--node-rank", 0, cwd=tmp_path),
        two_hosts[1].start(COMMAND, *arguments, *head, "--node-rank", 1, cwd=tmp_path / "here"),
    ]
    results = ends(launchers)
    assert [code for code, _ in results] == [2, 2], results
    first, second = (output.splitlines()[-1] for _, output in results)
    assert first.startswith("Error: node 1 (host-1): reward.function: no module 'my_reward'")
    assert second in (first, first.replace("node 1 (host-1): ", ""))
    assert not run_dir.exists()


@pytest.mark.timeout(900)
def test_roles_take_turns_on_devices_of_several_hosts(permitted: None, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with some_hosts(2) as hosts:
        launchers = launch(hosts, "--run-dir", run_dir, "--steps", 3, *SMALL, "--roles", "rollout+actor:4")
        begun(run_dir, launchers, 1)
        job = Job.load(run_dir)
        results = ends(launchers, 280)
    assert [code for code, _ in results] == [0, 0], results
    assert job.gang("actor").nodes == (0, 0, 1, 1)
    assert [job.gang(f"rollout-{k}").nodes for k in range(4)] == [(0,), (0,), (1,), (1,)]
    check_ledger(run_dir, 3)
    told = (run_dir / "logs" / "launcher.log").read_text()
    assert all(f"TurnGranted(gang='{gang}'" in told for gang in ("actor", *(f"rollout-{k}" for k in range(4))))
