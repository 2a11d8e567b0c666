"""Real gangs: torchelastic's agents and forked workers under `run_job` in a launcher process of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from torch.distributed import TCPStore

from asyncflow.job import Job
from asyncflow.process import PAUSE_SIGNAL, RESUME_SIGNAL, SAVE_SIGNAL
from asyncflow.sealed_store import SealedStore, connect_store
from launcher.process.launcher_process import SAME_PRESS_S

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEADLINE_S = 60.0
NO_RESTARTS = {"max_restarts": 0, "max_global_restarts": 0}

T = TypeVar("T")


class Launcher:
    """A launcher process and what is known about its descendants."""

    def __init__(self, run_dir: Path, process: "subprocess.Popen[str]") -> None:
        self.run_dir = run_dir
        self.process = process
        self.descendants: list[psutil.Process] = []

    def collect(self) -> list[psutil.Process]:
        """Note every process below the launcher."""
        self.descendants = psutil.Process(self.process.pid).children(recursive=True)
        return self.descendants

    def wait_for_workers(self, count: int) -> dict[str, int]:
        """Wait until `count` ranks reported; returns the process id of each "GANG/RANK"."""
        eventually(lambda: (self.run_dir / "job.json").exists(), "job.json", self)
        store = self.store()
        names = self.names()

        def reported() -> list[str]:
            return [name for name in names if store.check([f"status/{name}"])]

        eventually(lambda: len(reported()) == count, f"{count} workers", self)
        self.collect()
        return {name: json.loads(store.get(f"status/{name}"))["pid"] for name in reported()}

    def store(self) -> SealedStore:
        """Connect to the job store, as one of the job."""
        return SealedStore(self.strangers_store(), bytes.fromhex(Job.load(self.run_dir).secret))

    def strangers_store(self) -> TCPStore:
        """Connect to the job store, as anybody can who reaches its port."""
        job = Job.load(self.run_dir)
        return connect_store(job.store_host, job.store_port, timedelta(seconds=30))

    def read_until(self, text: str) -> str:
        """Read lines of the output up to one that holds `text`; returns it."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if text in line:
                return line
        pytest.fail(f"the output ended without {text!r}")

    def wait_for_others(self, pids: dict[str, int]) -> dict[str, int]:
        """Wait until each "GANG/RANK" reports with another process id; returns all of them."""
        store = self.store()

        def pid(name: str) -> int:
            said = store.get(f"status/{name}") if store.check([f"status/{name}"]) else b"{}"
            return int(json.loads(said).get("pid", 0))

        for name, before in pids.items():
            eventually(lambda name=name, before=before: pid(name) not in (0, before), name, self)  # type: ignore[misc]
        return self.wait_for_workers(len(self.names()))

    def names(self) -> list[str]:
        """Return every "GANG/RANK"."""
        return [f"{gang.name}/{rank}" for gang in Job.load(self.run_dir).gangs for rank in range(gang.num_ranks)]

    def finish(self, deadline_s: float = DEADLINE_S) -> tuple[int, str]:
        """Wait for the end; returns the exit code and all that was printed."""
        output, _ = self.process.communicate(timeout=deadline_s)
        return self.process.returncode, output

    def log(self, role: str, rank: int) -> str:
        """Return a rank's log."""
        return (self.run_dir / "logs" / role / f"{rank}.log").read_text()

    def since_last_word_s(self, role: str, rank: int) -> float:
        """Return how long ago a rank wrote into its log, which has its error."""
        assert "Traceback" in self.log(role, rank)
        return time.time() - (self.run_dir / "logs" / role / f"{rank}.log").stat().st_mtime


Launch = Callable[..., Launcher]


def eventually(condition: Callable[[], T], what: str, launcher: Launcher, deadline_s: float = DEADLINE_S) -> T:
    """Return the condition's first true value."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > end:
            log = launcher.run_dir / "logs" / "launcher.log"
            pytest.fail(f"{what}: not within {deadline_s} s\n{log.read_text() if log.exists() else ''}")
        time.sleep(0.02)
    return value


def assert_all_gone(launcher: Launcher) -> None:
    """Nothing of the launcher's is left within 10 s."""
    assert launcher.descendants
    _, alive = psutil.wait_procs(launcher.descendants, timeout=10)
    assert alive == []


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started: list[Launcher] = []

    def start(
        entrypoint: str, *, rollouts: int = 2, actor_ranks: int = 1, first_path: Path = ROOT, **settings: object
    ) -> Launcher:
        run_dir = tmp_path / "run"
        run_dir.mkdir(exist_ok=True)
        arguments = [str(run_dir), entrypoint, str(rollouts), str(actor_ranks), json.dumps(settings)]
        process = subprocess.Popen(
            [sys.executable, "-W", "error", str(HERE / "run_gangs.py"), *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (first_path, ROOT, HERE)))},
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        started.append(Launcher(run_dir, process))
        return started[-1]

    yield start
    for launcher in started:
        if launcher.process.poll() is None:
            launcher.collect()
            launcher.process.kill()
        launcher.process.wait(timeout=10)
        _, alive = psutil.wait_procs(launcher.descendants, timeout=10)
        for process in alive:
            process.kill()
        if launcher.process.stdout is not None:
            launcher.process.stdout.close()


def test_gangs_run_to_the_end(launch: Launch) -> None:
    launcher = launch("train_to_the_end")
    code, output = launcher.finish()
    assert code == 0
    lines = output.splitlines()
    assert [line.split()[:3] for line in lines[-5:-3]] == [["step", "1/2", "0.500"], ["step", "2/2", "1.000"]]
    assert lines[-3] == f"run directory: {launcher.run_dir}"
    assert lines[-1].startswith("done (step 2/2")
    assert not (launcher.run_dir / "job.json").exists()


def test_logs_hold_both_streams_and_are_appended_to(launch: Launch) -> None:
    for _ in range(2):
        launcher = launch("leave_at_once", actor_ranks=2)
        assert launcher.finish()[0] == 0
    once = "rollout-1 was here, attempt 0\nand on stderr\n"
    assert launcher.log("rollout", 1) == 2 * once
    assert sorted(path.name for path in (launcher.run_dir / "logs" / "actor").iterdir()) == ["0.log", "1.log"]


def test_exception_of_a_rollout_is_named_and_the_others_leave(launch: Launch) -> None:
    launcher = launch("raise_in_second_rollout")
    code, output = launcher.finish()
    assert code == 1
    assert launcher.since_last_word_s("rollout", 1) < 25  # its thread would not end before DEADLINE_S
    assert output.splitlines()[-1].endswith("rollout rank 1 failed: ValueError: no such token in rollout-1")
    assert "Traceback" in launcher.log("rollout", 1)


def test_exception_of_one_actor_rank_ends_its_stuck_peer(launch: Launch) -> None:
    launcher = launch("raise_in_actor_rank_one", actor_ranks=2)
    code, output = launcher.finish()
    assert code == 1
    assert output.splitlines()[-1].endswith("actor rank 1 failed: RuntimeError: loss is not finite")
    assert launcher.since_last_word_s("actor", 1) < 25  # the stock agent would wait 30 s for the stuck rank


def test_error_that_could_not_be_recorded_is_named(launch: Launch) -> None:
    code, output = launch("fail_on_a_full_disk").finish()
    assert code == 1
    assert output.splitlines()[-1].endswith("rollout rank 0 failed: OSError: no space left")


def test_all_start_again_after_the_death_of_the_fork_server(launch: Launch) -> None:
    launcher = launch("obey_phase")
    pids = launcher.wait_for_workers(5)
    launcher.read_until("started 5 workers")
    fork_servers(launcher)[0].kill()
    again = launcher.wait_for_others(pids)
    assert not set(again.values()) & set(pids.values())
    launcher.collect()
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.finish()[0] == 75
    assert_all_gone(launcher)


def kill_fork_server(launcher: Launcher) -> None:
    eventually((launcher.run_dir / "job.json").exists, "the moment of the start", launcher)
    server = eventually(lambda: fork_servers(launcher), "the fork server", launcher)[0]
    server.kill()
    eventually(lambda: server not in fork_servers(launcher), "its end", launcher)


def test_all_start_although_the_fork_server_dies_when_it_is_asked_for_them(launch: Launch) -> None:
    launcher = launch("obey_phase", max_restarts=5)
    kill_fork_server(launcher)
    launcher.wait_for_others(dict.fromkeys(launcher.names(), 0))
    launcher.collect()
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.finish()[0] == 75
    assert_all_gone(launcher)


def test_fork_server_that_always_dies_ends_the_run_at_its_second_death(launch: Launch) -> None:
    launcher = launch("obey_phase", max_restarts=5)
    end = time.monotonic() + 2 * DEADLINE_S
    while launcher.process.poll() is None:
        assert time.monotonic() < end
        for server in fork_servers(launcher):
            server.kill()
        time.sleep(0.02)
    code, output = launcher.finish()
    assert code == 1
    assert output.count("rollout rank 0 failed: the fork server died") <= 2
    assert "failed: the fork server died, and with it every worker" in output.splitlines()[-1]
    assert "(at both of its starts, before it worked)" in output.splitlines()[-1]


def test_interpreter_that_cannot_be_forked_from_has_its_workers_spawned_and_that_is_said_once(
    launch: Launch, tmp_path: Path
) -> None:
    """As with a profiler in the interpreter: every process has its thread."""
    (site := tmp_path / "site").mkdir()
    (site / "sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, name='profiler', daemon=True).start()\n"
    )
    launcher = launch("train_to_the_end", first_path=site)
    eventually(lambda: fork_servers(launcher), "the fork server", launcher)
    launcher.collect()
    code, output = launcher.finish()
    assert code == 0
    (said,) = [line for line in output.splitlines() if "spawned" in line]
    assert said.startswith(
        f"warning: workers of {sys.executable} are spawned, not forked, because of 2 threads (profiler);"
    )
    assert re.search(r"some \d+\.\d s and the memory", said)
    assert_all_gone(launcher)


def test_service_that_dies_at_both_of_its_starts_ends_the_run_and_is_named(launch: Launch) -> None:
    launcher = launch("die_as_storage", max_restarts=5)
    eventually(lambda: fork_servers(launcher), "the fork server", launcher)
    launcher.collect()
    code, output = launcher.finish()
    assert code == 1
    assert output.count("starts again") == 1
    last = output.splitlines()[-1]
    assert last.endswith("storage rank 0 failed: ended by SIGKILL (at both of its starts, before it worked)")
    assert_all_gone(launcher)


def fork_servers(launcher: Launcher) -> list[psutil.Process]:
    """Return the fork server, if there is one."""
    children = psutil.Process(launcher.process.pid).children()
    return [child for child in children if _is_fork_server(child)]


def _is_fork_server(process: psutil.Process) -> bool:
    try:
        return "launcher.process.preloaded" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def test_process_that_exits_without_returning_is_a_failure(launch: Launch) -> None:
    code, output = launch("exit_without_finishing").finish()
    assert code == 1
    assert output.splitlines()[-1].endswith("rollout rank 0 failed: exited with code 0 without finishing")


def test_killed_worker_is_named_with_its_signal(launch: Launch) -> None:
    launcher = launch("obey_phase", **NO_RESTARTS)
    pids = launcher.wait_for_workers(5)
    os.kill(pids["rollout-1/0"], signal.SIGKILL)
    code, output = launcher.finish()
    assert code == 1
    assert output.splitlines()[-1].endswith("rollout rank 1 failed: ended by SIGKILL")
    assert_all_gone(launcher)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.gate), signal.SIGSTOP])
def test_worker_that_is_killed_or_stopped_starts_again_and_nobody_else(launch: Launch, number: signal.Signals) -> None:
    launcher = launch("obey_phase")
    pids = launcher.wait_for_workers(5)
    launcher.read_until("started 5 workers")
    os.kill(pids["rollout-1/0"], number)
    line = launcher.read_until("rollout rank 1 failed")
    assert ("ended by SIGKILL" if number is signal.SIGKILL else "stopped by a signal") in line
    again = launcher.wait_for_others({"rollout-1/0": pids["rollout-1/0"]})
    assert {**again, "rollout-1/0": 0} == {**pids, "rollout-1/0": 0}
    status = launcher.run_dir / "status.json"
    counted = {"rollout-1": 1}
    eventually(lambda: json.loads(status.read_text())["restarts"]["gangs"] == counted, "the count", launcher)
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.finish()[0] == 75


def test_dead_actor_takes_the_queue_with_it_and_rollouts_stay(launch: Launch) -> None:
    launcher = launch("obey_phase", actor_ranks=2)
    (launcher.run_dir / "metrics.jsonl").write_text('{"step": 1, "lineage": 0}\n')
    pids = launcher.wait_for_workers(6)
    launcher.read_until("started 6 workers")
    os.kill(pids["actor/1"], signal.SIGKILL)
    launcher.read_until("continuing from step 0 (lineage 1)")
    rollouts = {name: pid for name, pid in pids.items() if name.startswith("rollout")}
    again = launcher.wait_for_others({name: pid for name, pid in pids.items() if name not in rollouts})
    assert {name: again[name] for name in rollouts} == rollouts
    assert Job.load(launcher.run_dir).lineage == 1
    assert (launcher.run_dir / "metrics.jsonl").read_text() == "", "there is no checkpoint, so no step is left"
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.finish()[0] == 75


def test_worker_that_keeps_dying_ends_the_run(launch: Launch) -> None:
    launcher = launch("die_again_and_again", max_restarts=1, max_global_restarts=1)
    code, output = launcher.finish()
    assert code == 1
    lines = output.splitlines()
    assert sum("it starts again" in line for line in lines) == 2
    assert sum("everything starts again" in line for line in lines) == 1
    assert lines[-1].endswith("rollout rank 0 failed: ended by SIGKILL")


def test_worker_that_does_not_get_on_writes_its_stacks_and_starts_again(launch: Launch) -> None:
    launcher = launch("hang_once", operation_timeout_s=3.0)
    pids = launcher.wait_for_workers(5)
    line = launcher.read_until("rollout rank 0 failed")
    assert "no progress for" in line
    assert "with: generating" in line
    launcher.wait_for_others({"rollout-0/0": pids["rollout-0/0"]})
    assert "hang_once" in launcher.log("rollout", 0)
    assert "Current thread" in launcher.log("rollout", 1), "the stacks of all are there"
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.finish()[0] == 75


def test_all_are_announced_when_they_are_at_work(launch: Launch) -> None:
    launcher = launch("obey_phase", actor_ranks=3)
    launcher.wait_for_workers(7)
    launcher.read_until("started 7 workers in ")


def test_a_save_that_was_asked_for_reaches_the_workers_and_ends_nothing(launch: Launch) -> None:
    launcher = launch("obey_phase")
    launcher.wait_for_workers(5)
    store = launcher.store()
    assert store.get("save") == b"0"
    launcher.process.send_signal(SAVE_SIGNAL)
    eventually(lambda: store.get("save") == b"1", "the request", launcher)
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.finish()[0] == 75


def test_a_pause_that_was_asked_for_reaches_the_workers_and_ends_nothing(launch: Launch) -> None:
    launcher = launch("obey_phase")
    launcher.wait_for_workers(5)
    store = launcher.store()
    assert store.get("pause") == b"no"
    launcher.process.send_signal(PAUSE_SIGNAL)
    eventually(lambda: store.get("pause") == b"pausing", "the pause", launcher)
    status = {"state": "serving", "pause": "paused after step 3", "time": time.time()}
    store.set("status/controller/0", json.dumps(status))
    eventually(lambda: store.get("pause") == b"paused", "the lead controller's word", launcher)
    launcher.process.send_signal(RESUME_SIGNAL)
    eventually(lambda: store.get("pause") == b"no", "its end", launcher)
    launcher.process.send_signal(signal.SIGINT)
    code, out = launcher.finish()
    assert code == 75
    assert [line for line in out.splitlines() if line.startswith(("paus", "the pause"))] == [
        "paused after step 3",
        "the pause is over",
    ]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.gate), signal.SIGUSR1, signal.SIGHUP]
)
def test_stop_is_resumable_and_leaves_nothing(launch: Launch, number: signal.Signals) -> None:
    launcher = launch("obey_phase")
    launcher.wait_for_workers(5)
    launcher.process.send_signal(number)
    requested_at = time.monotonic()
    code, output = launcher.finish()
    assert code == 75
    assert output.splitlines()[-1].startswith("stopped (step 0/2")
    assert time.monotonic() - requested_at < 25  # of the 30 s after which the remaining ranks are killed
    assert_all_gone(launcher)


def test_signal_that_a_scheduler_sends_to_every_process_is_one_stop(launch: Launch) -> None:
    launcher = launch("obey_phase")
    launcher.wait_for_workers(5)
    for process in (*launcher.descendants, launcher.process):
        process.send_signal(signal.SIGUSR1)
    code, output = launcher.finish()
    assert code == 75
    assert "Traceback" not in output
    assert_all_gone(launcher)


def test_stop_during_the_imports_is_resumable(launch: Launch) -> None:
    launcher = launch("obey_phase")
    eventually(lambda: (launcher.run_dir / "logs" / "launcher.log").exists(), "the launcher's log", launcher)
    launcher.collect()
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.finish()[0] == 75


def test_workers_that_do_not_stop_are_killed(launch: Launch) -> None:
    launcher = launch("never_leave", stop_timeout_s=0.5)
    launcher.wait_for_workers(5)
    launcher.process.send_signal(signal.SIGTERM)
    code, output = launcher.finish()
    assert code == 75
    assert "still running 0.5 s after the stop" in output.splitlines()[-1]
    assert_all_gone(launcher)


def test_stop_waits_for_an_actor_that_saves(launch: Launch) -> None:
    launcher = launch("save_slowly", stop_timeout_s=0.5)
    launcher.wait_for_workers(5)
    launcher.process.send_signal(signal.SIGUSR1)
    assert launcher.process.stdout is not None
    line = ""
    while not line.startswith("still saving the last completed step; the stop waits for it"):
        line = launcher.process.stdout.readline()
        assert line
    (launcher.run_dir / "saved").touch()
    code, output = launcher.finish()
    assert (code, output.splitlines()[-1].partition(" (")[0]) == (75, "stopped")


def test_second_interrupt_kills_at_once(launch: Launch) -> None:
    launcher = launch("never_leave")
    launcher.wait_for_workers(5)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.process.stdout is not None
    line = ""
    while not line.startswith("stopping"):
        line = launcher.process.stdout.readline()
        assert line
    said_at = time.monotonic()
    eventually(lambda: time.monotonic() > said_at + SAME_PRESS_S, "a press of its own", launcher)
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.finish()[0] == 75
    assert_all_gone(launcher)


def test_workers_that_never_start_are_named(launch: Launch) -> None:
    launcher = launch("never_start", start_timeout_s=30.0)
    code, output = launcher.finish(3 * DEADLINE_S)
    assert code == 1
    assert "): rollout-0 rank 0: no progress for 30 s of its start" in output.splitlines()[-1], "nobody else is named"


def test_external_gang_is_waited_for(launch: Launch) -> None:
    launcher = launch("train_to_the_end", external_gangs=["rollout-1"])
    eventually(lambda: (launcher.run_dir / "job.json").exists(), "job.json", launcher)
    store = launcher.store()
    eventually(lambda: store.check(["phase"]) and store.get("phase") == b"stop", "phase stop", launcher)
    launcher.collect()
    assert launcher.process.poll() is None
    store.set("left/rollout-1/0", "0")
    assert launcher.finish()[0] == 0
    assert not (launcher.run_dir / "logs" / "rollout" / "1.log").exists()


def test_failure_of_an_external_gang_is_named_and_that_of_a_stranger_is_not_believed(launch: Launch) -> None:
    launcher = launch("obey_phase", external_gangs=["rollout-1"])
    launcher.wait_for_workers(4)
    stranger = launcher.strangers_store()
    for key, value in (("left/rollout-1/0", "error: all is lost"), ("done", "1"), ("warning/actor/0", "{}")):
        stranger.set(key, value)
    log = launcher.run_dir / "logs" / "launcher.log"
    eventually(lambda: "'left/rollout-1/0' was not written by this job" in log.read_text(), "refusal", launcher)
    launcher.store().set("left/rollout-1/0", "error: OSError: no space")
    code, output = launcher.finish()
    assert code == 1
    assert output.splitlines()[-1].endswith("rollout rank 1 failed: OSError: no space")


@pytest.mark.gate
def test_nothing_survives_a_killed_launcher(launch: Launch) -> None:
    launcher = launch("never_leave", rollouts=3, actor_ranks=2)
    launcher.wait_for_workers(7)
    mapped = {Path(region.path) for region in psutil.Process(launcher.process.pid).memory_maps(grouped=True)}
    assert not {path for path in mapped if path.is_relative_to("/dev/shm")}, "files there would be left"
    launcher.process.kill()
    assert_all_gone(launcher)


def test_nothing_survives_a_launcher_killed_during_the_imports(launch: Launch) -> None:
    launcher = launch("never_leave")
    eventually(launcher.collect, "the fork server", launcher)
    launcher.process.kill()
    assert_all_gone(launcher)


@pytest.mark.gate
def test_every_socket_listens_on_loopback(launch: Launch) -> None:
    launcher = launch("never_leave")
    launcher.wait_for_workers(5)
    processes = [psutil.Process(launcher.process.pid), *launcher.descendants]
    listening = [
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert set(listening) == {"127.0.0.1"}


def test_fork_server_has_one_thread(launch: Launch) -> None:
    pids = launch("never_leave").wait_for_workers(5)
    fork_server = psutil.Process(pids["actor/0"]).parent()
    assert fork_server is not None
    assert fork_server.num_threads() == 1


def test_worker_is_set_up_for_work(launch: Launch) -> None:
    launcher = launch("touch_torch", actor_ranks=2, threads_per_worker=1)
    launcher.finish()
    facts = json.loads((launcher.run_dir / "actor-1.json").read_text())
    assert facts["imported"] == []
    assert facts["main"] is None
    assert facts["rank"] == "1"
    assert facts["threads"] == 1
    assert str(launcher.run_dir.parent) not in facts["sys_path"]
    assert "" not in facts["sys_path"]
