"""Launchers on several hosts: a run begins and ends on all of them, whatever dies."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from asyncflow.clock import HostClock
from asyncflow.job import Job

from .hosts import HERE, Host, ends, eventually, job_of

OBEY = "gang_entrypoints:obey_phase"
TRAIN = "node_entrypoints:train_over_nodes"
AT_ONCE = {"max_restarts": 0, "max_global_restarts": 0}


def start(hosts: list[Host], run_dir: Path, entrypoint: str, **settings: object) -> "list[subprocess.Popen[str]]":
    """Start a launcher on every host; host 0's is node 0."""
    arguments = [(run_dir, entrypoint, len(hosts), rank, json.dumps(settings)) for rank in range(len(hosts))]
    return [host.python(HERE / "run_launcher.py", *words) for host, words in zip(hosts, arguments, strict=True)]


def at_work(host: Host, run_dir: Path) -> dict[str, int]:
    """Wait until all ranks are at work; returns the process id of each. The store is asked from its own host."""
    code = (
        "import json, sys; from datetime import timedelta; from pathlib import Path; from asyncflow.job import Job; "
        "from asyncflow.sealed_store import SealedStore; from asyncflow.sealed_store import connect_store\n"
        "job = Job.load(Path(sys.argv[1]))\n"
        "client = connect_store(job.store_host, job.store_port, timedelta(seconds=120))\n"
        "store = SealedStore(client, bytes.fromhex(job.secret))\n"
        "names = [f'{gang.name}/{rank}' for gang in job.gangs for rank in range(gang.num_ranks)]\n"
        "print(json.dumps({name: json.loads(store.get(f'status/{name}')).get('pid', 0) for name in names}))"
    )
    eventually(lambda: (job := job_of(run_dir)) and job.nodes, "all launchers")
    asking = host.python("-c", code, run_dir)
    ((status, output),) = ends([asking])
    assert status == 0, output
    pids: dict[str, int] = json.loads(output.splitlines()[-1])
    return pids


def assert_nothing_runs(*hosts: Host) -> None:
    """No process stays on these hosts."""
    eventually(lambda: not any(host.pids() for host in hosts), "the end of all processes")


def last_lines(results: list[tuple[int, str]]) -> list[str]:
    """Return what each launcher said last."""
    return [output.splitlines()[-1] for _, output in results]


def test_run_ends_on_all_hosts_with_one_code_and_one_line(three_hosts: list[Host], tmp_path: Path) -> None:
    results = ends(start(three_hosts, tmp_path / "run", TRAIN))
    assert [code for code, _ in results] == [0, 0, 0], results
    assert len(set(last_lines(results))) == 1
    assert last_lines(results)[0].startswith("done (step 2/2")
    places = [json.loads((tmp_path / "run" / f"place-{rank}.json").read_text()) for rank in range(3)]
    assert places == [{"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1} for rank in range(3)]
    logs = sorted(path.name for path in (tmp_path / "run" / "logs").iterdir() if path.is_file())
    assert logs == ["launcher-1.log", "launcher-2.log", "launcher.log"]
    assert (tmp_path / "run" / "logs" / "rollout" / "2.log").exists()
    assert not (tmp_path / "run" / "job.json").exists()
    assert_nothing_runs(*three_hosts)


def test_nodes_and_sockets_are_where_they_should_be(two_hosts: list[Host], tmp_path: Path) -> None:
    launchers = start(two_hosts, tmp_path / "run", OBEY)
    pids = at_work(two_hosts[0], tmp_path / "run")
    for name in ("actor/1", "rollout-1/0", "storage-0/0"):
        assert pids[name] in two_hosts[1].pids()
    job = Job.load(tmp_path / "run")
    assert [(node.rank, node.host, node.address) for node in job.nodes] == [
        (0, "host-0", "10.77.0.1"),
        (1, "host-1", "10.77.0.2"),
    ]
    assert job.store_host == "10.77.0.1"
    assert two_hosts[0].listening() <= {"10.77.0.1", "127.0.0.1"}
    assert two_hosts[1].listening() <= {"10.77.0.2", "127.0.0.1"}
    launchers[0].send_signal(signal.SIGTERM)
    assert [code for code, _ in ends(launchers)] == [75, 75]


def test_exception_on_another_host_is_named_everywhere(two_hosts: list[Host], tmp_path: Path) -> None:
    launchers = start(two_hosts, tmp_path / "run", "gang_entrypoints:raise_in_second_rollout", **AT_ONCE)
    results = ends(launchers)
    assert [code for code, _ in results] == [1, 1]
    for line in last_lines(results):
        assert line.endswith("rollout rank 1 failed: ValueError: no such token in rollout-1")


def test_part_of_a_gang_that_dies_takes_the_others_along(two_hosts: list[Host], tmp_path: Path) -> None:
    launchers = start(two_hosts, tmp_path / "run", OBEY, **AT_ONCE)
    pids = at_work(two_hosts[0], tmp_path / "run")
    os.kill(pids["actor/1"], signal.SIGKILL)
    results = ends(launchers)
    assert [code for code, _ in results] == [1, 1]
    assert "actor rank 1 failed: ended by SIGKILL" in last_lines(results)[0]
    assert_nothing_runs(*two_hosts)


def test_gang_over_hosts_starts_again_on_all_of_them(two_hosts: list[Host], tmp_path: Path) -> None:
    launchers = start(two_hosts, tmp_path / "run", OBEY)
    before = at_work(two_hosts[0], tmp_path / "run")
    os.kill(before["actor/1"], signal.SIGKILL)
    after = eventually(lambda: _with_another(two_hosts[0], tmp_path / "run", before, "actor/0"), "another actor")
    assert after["actor/1"] in two_hosts[1].pids()
    assert {after[name] for name in ("rollout-0/0", "rollout-1/0")} == {
        before[name] for name in ("rollout-0/0", "rollout-1/0")
    }
    launchers[0].send_signal(signal.SIGTERM)
    assert [code for code, _ in ends(launchers)] == [75, 75]


def _with_another(host: Host, run_dir: Path, before: dict[str, int], name: str) -> dict[str, int] | None:
    now = at_work(host, run_dir)
    return now if now[name] not in (0, before[name]) and now["actor/1"] not in (0, before["actor/1"]) else None


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGINT), (1, signal.SIGUSR1)])
def test_signal_to_any_launcher_stops_all(
    two_hosts: list[Host], tmp_path: Path, rank: int, number: signal.Signals
) -> None:
    launchers = start(two_hosts, tmp_path / "run", OBEY)
    at_work(two_hosts[0], tmp_path / "run")
    launchers[rank].send_signal(number)
    results = ends(launchers)
    assert [code for code, _ in results] == [75, 75], results
    assert len(set(last_lines(results))) == 1
    assert_nothing_runs(*two_hosts)


@pytest.mark.parametrize("end", ["kill", "stop", "cut off"])
def test_lost_launcher_ends_the_run_resumably(three_hosts: list[Host], tmp_path: Path, end: str) -> None:
    launchers = start(three_hosts, tmp_path / "run", "gang_entrypoints:never_leave")
    at_work(three_hosts[0], tmp_path / "run")
    _lose(three_hosts[2], launchers[2], end)
    results = ends(launchers[:2], 40)
    assert [code for code, _ in results] == [75, 75]
    for line in last_lines(results):
        assert "node 2 (host-2) is gone" in line
    assert_nothing_runs(*three_hosts[:2])
    launchers[2].send_signal(signal.SIGCONT)
    assert ends(launchers[2:], 20)[0][0] == (-signal.SIGKILL if end == "kill" else 75)
    assert_nothing_runs(three_hosts[2])


@pytest.mark.parametrize("end", ["kill", "stop", "cut off"])
def test_lost_head_ends_all_other_launchers(two_hosts: list[Host], tmp_path: Path, end: str) -> None:
    launchers = start(two_hosts, tmp_path / "run", "gang_entrypoints:never_leave")
    at_work(two_hosts[0], tmp_path / "run")
    _lose(two_hosts[0], launchers[0], end)
    ((code, output),) = ends(launchers[1:], 20)
    assert code == 75, output
    assert output.splitlines()[-1].startswith("node 0 is lost (")
    assert_nothing_runs(two_hosts[1])
    launchers[0].send_signal(signal.SIGCONT)
    assert ends(launchers[:1], 40)[0][0] == (-signal.SIGKILL if end == "kill" else 75)
    assert_nothing_runs(two_hosts[0])


def test_node_that_does_not_come_is_named(two_hosts: list[Host], tmp_path: Path) -> None:
    arguments = (tmp_path / "run", OBEY, 2, 0, json.dumps({"start_timeout_s": 2.0}))
    ((code, output),) = ends([two_hosts[0].python(HERE / "run_launcher.py", *arguments)])
    assert code == 1
    assert output.splitlines()[-1].startswith("Error: node 1 of 2: did not join within 2 s (launcher.start_timeout_s)")
    assert_nothing_runs(two_hosts[0])


def test_job_that_an_earlier_run_left_behind_is_passed_over(two_hosts: list[Host], tmp_path: Path) -> None:
    silent = "import socket; socket.create_server(('', 29400)); print('listens', flush=True); input()"
    listener = two_hosts[0].python("-c", silent, stdin=subprocess.PIPE)
    assert listener.stdout is not None
    assert listener.stdout.readline() == "listens\n"
    (tmp_path / "run").mkdir()
    Job(two_hosts[0].address, 29400, "00", 2, (), 0, "", 3, 4.5, HostClock.from_wall_clock()).save(tmp_path / "run")
    results = ends(start(two_hosts, tmp_path / "run", TRAIN))
    assert [code for code, _ in results] == [0, 0], results
    assert listener.stdin is not None
    listener.stdin.close()


def _lose(host: Host, launcher: "subprocess.Popen[str]", end: str) -> None:
    if end == "cut off":
        host.cut_off()
    else:
        launcher.send_signal(signal.SIGKILL if end == "kill" else signal.SIGSTOP)
