"""What `asyncflow status` prints."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from asyncflow.clock import HostClock
from asyncflow.errors import ConfigError, TransportError
from asyncflow.job import GangSpec, Job
from asyncflow.run_files import END_FILE, STATUS_FILE
from launcher.cli.commands import main
from launcher.process.progress import Status
from launcher.run.rundir import held_run_dir
from launcher.run.status import RunEnd, RunStatus, is_live, read_status
from launcher.run.supervisor import RestartLog
from tq.messages import QueueStats, TaskStats, UnitStats
from weightsync.messages import AgentStatus
from weightsync.version import Version


def status() -> RunStatus:
    task = TaskStats("actor_train", 3, 5, 8, 0, 2, "controller-0", oldest_request_s=1.25, rows_per_s=64.0, acked=4096)
    lead = QueueStats([task], 16, 12, 448, live_bytes=2_500_000, row_limit=1024, waiting_puts=1, lost_rows=7)
    second = QueueStats([], 16, 12, 0, dead_letter_groups=2)
    gang = GangSpec("ref-0", "ref", 0, 1, ("cpu",))
    ranks = {("ref-0", 0): Status("log-probs", time=100.0, pid=4)}
    units = {"storage-0": UnitStats(16, 3_000_000, bytes_in=10**9, shared_channels=3, wire_channels=1)}
    agent = AgentStatus(
        newest=Version(0, 7),
        versions=[(Version(0, 7), 12)],
        serving={"rollout-0/0": Version(0, 6)},
        holders={},
        slot_bytes=3 * 10**9,
        fetched_bytes=0,
    )
    return RunStatus(
        Path("runs/demo"),
        100.0,
        (gang,),
        ranks,
        [msgspec.to_builtins(stats) for stats in (lead, second)],
        {name: msgspec.to_builtins(stats) for name, stats in units.items()},
        {"weights-0": msgspec.to_builtins(agent)},
    )


def test_the_text_shows_tasks_units_limits_and_what_went_wrong() -> None:
    text = status().as_text(now=101.0)
    assert "16 of 1024 rows, 2.5 MB live, 1 puts wait for room" in text
    assert "7 rows lost with a unit, 2 dead-letter groups" in text
    (line,) = [line for line in text.splitlines() if line.startswith("actor_train")]
    assert line.split() == ["actor_train", "controller-0", "3", "5", "8", "4096", "64.0", "2", "1.2", "s"]
    assert "3 shared memory, 1 wire" in text
    assert "log-probs" in text
    (agent,) = [line for line in text.splitlines() if line.startswith("weights-0")]
    assert agent.split() == ["weights-0", "step", "7", "3", "GB", "0", "B", "rollout-0/0:", "step", "6"]
    assert "rollout-0/0: step 6" in text


def test_rollouts_of_functions_are_shown_with_where_their_time_goes() -> None:
    counts = {"live": 12, "drawing": 3, "waiting": 1, "in_tools": 8, "turns": 40.0}
    said = {"state": "generating", "rollouts": counts | {"drawing_s": 30.0, "waiting_s": 10.0, "in_tools_s": 60.0}}
    text = replace(status(), ranks={("rollout-1", 0): Status.from_json(said)}).as_text(now=101.0)
    (line,) = [line for line in text.splitlines() if line.startswith("rollout-1")]
    assert line.split()[1:6] == ["12", "3", "1", "8", "40"]
    assert line.endswith("30 % drawing, 10 % waiting, 60 % in tools")
    assert "ROLLOUTS" not in status().as_text(now=101.0)


def test_a_pause_stands_above_everything() -> None:
    paused = replace(status(), pause="paused after step 9")
    assert paused.as_text(now=101.0).splitlines()[2] == "paused after step 9"
    assert json.loads(paused.as_json())["pause"] == "paused after step 9"


def test_the_newest_evaluation_is_shown() -> None:
    assert "held-out" not in status().as_text(now=101.0)
    evaluation = {"step": 10, "accuracy": 0.95, "accuracy_low": 0.764, "accuracy_high": 0.991}
    shown = replace(status(), evaluation=evaluation)
    assert "held-out accuracy: 0.950 (0.764 to 0.991) at step 10" in shown.as_text(now=101.0)
    assert json.loads(shown.as_json())["evaluation"] == evaluation


def test_advice_is_shown_when_there_is_some() -> None:
    assert "advice" not in status().as_text(now=101.0)
    shown = replace(status(), advice={"text": "rollout limits", "limits": "rollout"})
    assert "\n\nadvice: rollout limits\n\n" in shown.as_text(now=101.0)
    assert json.loads(shown.as_json())["advice"]["limits"] == "rollout"


def test_restarts_and_the_last_error_are_shown() -> None:
    assert "started again" not in status().as_text(now=101.0)
    log = RestartLog(last_error="rollout rank 1 failed: ended by SIGKILL; it starts again", last_error_at=90.0)
    log.started_again("rollout-1")
    log.count_restore(2)
    text = replace(status(), restarts=log).as_text(now=101.0)
    assert "started again: rollout-1 1x; 1x back to a checkpoint (lineage 2)" in text
    assert "last error, 11 s ago: rollout rank 1 failed: ended by SIGKILL" in text
    assert RestartLog.from_summary(json.loads(json.dumps(log.to_summary()))) == log


def test_the_last_rollout_and_the_last_reward_that_failed_are_shown_with_the_reason() -> None:
    failures = {"rollout": "rollout.function: a:b: KeyError: 'x'", "reward": "reward.function: c:d raised"}
    shown = replace(status(), failures=failures)
    assert "last rollout that failed: rollout.function: a:b: KeyError: 'x'" in shown.as_text(now=101.0).splitlines()
    assert "last reward that failed: reward.function: c:d raised" in shown.as_text(now=101.0).splitlines()
    assert json.loads(shown.as_json())["failures"] == failures
    assert "that failed" not in status().as_text(now=101.0)


def test_queue_that_does_not_answer_is_said_so() -> None:
    assert "queue: it does not answer" in replace(status(), controllers=[], units={}).as_text(now=101.0)


def test_the_json_has_the_same_in_si_units() -> None:
    fields = json.loads(status().as_json())
    assert fields["controllers"][0]["tasks"][0]["acked"] == 4096
    assert fields["units"]["storage-0"]["bytes_in"] == 10**9
    assert fields["ranks"]["ref-0/0"]["state"] == "log-probs"


def test_a_directory_where_nothing_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run directory .it does not exist"):
        RunStatus.read(tmp_path / "nowhere")
    (tmp_path / "config.yaml").write_text("steps: 9\n")
    with pytest.raises(ConfigError, match="no run is active in"):
        RunStatus.read(tmp_path)
    with pytest.raises(ConfigError, match="not a run directory .it is a file"):
        read_status(tmp_path / "config.yaml")


def test_run_that_ended_says_how_and_why(tmp_path: Path) -> None:
    log = RestartLog(last_error="ref rank 0 failed: ended by SIGKILL; it starts again", last_error_at=90.0)
    log.started_again("ref-0")
    lines = [f"logs: {tmp_path}/logs", "failed (step 3/60, 0:12): actor rank 0 failed: ValueError: no"]
    RunEnd(tmp_path, lines, 1, 100.0, log).write()
    seen = read_status(tmp_path)
    assert isinstance(seen, RunEnd)
    first, *others, last = seen.as_text(now=700.0).splitlines()
    assert first == f"{tmp_path}: ended 10 min ago, exit code 1"
    assert others[0] == "started again: ref-0 1x"
    assert last == lines[-1]
    assert json.loads(seen.as_json())["exit_code"] == 1


def test_run_whose_launcher_was_killed_says_so_and_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("steps: 9\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    with subprocess.Popen(["true"]) as launcher:
        launcher.wait()
    job_of(launcher.pid, 1).save(tmp_path)
    seen = read_status(tmp_path)
    assert isinstance(seen, RunEnd)
    text = seen.as_text(now=0.0)
    assert text.endswith("ended without a word (step 2): its launcher was killed, or its host went down")
    assert f"resume with: asyncflow-launch --resume {tmp_path}" in text


def test_end_of_an_earlier_start_says_nothing_of_a_live_run(tmp_path: Path) -> None:
    RunEnd(tmp_path, ["done (step 1/1, 0:01)"], 0, 100.0).write()
    job_of(os.getpid(), 1).save(tmp_path)
    (tmp_path / STATUS_FILE).write_text(status().as_json())
    assert isinstance(read_status(tmp_path), RunStatus)


def test_directory_that_is_no_runs_is_refused_by_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run directory .it has no config.yaml"):
        read_status(tmp_path)


def test_step_that_a_line_lacks_does_not_hide_how_a_run_ended(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("steps: 9\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n{"loss": 1}\n')
    assert "(step 2)" in read_status(tmp_path).as_text(0.0)


def test_end_of_a_run_that_was_copied_names_the_copy(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    lines = [f"model: {old}/checkpoints/step_000040/hf", f"look at it: asyncflow view {old}", f"not {old}er/x"]
    RunEnd(old, lines, 0, 1.0).write()
    assert read_status(old).as_text(0.0).splitlines()[1:] == lines
    shutil.copytree(old, new)
    assert read_status(new).as_text(0.0).splitlines()[1:] == [
        *(x.replace(f"{old}", f"{new}") for x in lines[:2]),
        lines[2],
    ]


def job_of(pid: int, port: int) -> Job:
    return Job(
        store_host="127.0.0.1", store_port=port, secret="00", launcher_pid=pid, gangs=(), lineage=0, resume_from="",
        last_step=1, started_at=time.time(), clock=HostClock.from_wall_clock(),
    )  # fmt: skip


def test_launcher_that_was_stopped_is_named_with_the_remedy(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as launcher:
        try:
            job_of(launcher.pid, 1).save(tmp_path)
            launcher.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, launcher.pid, os.WSTOPPED | os.WNOWAIT)
            with pytest.raises(TransportError, match=rf"stopped by a signal.*: kill -CONT {launcher.pid}$"):
                RunStatus.read(tmp_path)
        finally:
            launcher.kill()


def test_run_that_has_said_nothing_yet_is_starting(tmp_path: Path) -> None:
    job_of(os.getpid(), 1).save(tmp_path)
    with pytest.raises(TransportError, match="is starting"):
        RunStatus.read(tmp_path)


def test_run_whose_launcher_imports_torch_is_starting_and_one_that_writes_its_report_has_ended(tmp_path: Path) -> None:
    """Without job.json the directory's lock tells."""
    (tmp_path / "config.yaml").write_text("")
    with held_run_dir(tmp_path):
        with pytest.raises(TransportError, match="the run is starting; ask again in a moment"):
            read_status(tmp_path)
        RunEnd(tmp_path, ["done (step 9/9, 0:01)"], 0, 1.0).write()
        end = read_status(tmp_path)
        assert isinstance(end, RunEnd) and end.code == 0
    (tmp_path / END_FILE).unlink()
    assert isinstance(read_status(tmp_path), RunEnd), "killed"


def test_what_the_launcher_wrote_is_read(tmp_path: Path) -> None:
    job_of(os.getpid(), 1).save(tmp_path)
    (tmp_path / STATUS_FILE).write_text(status().as_json())
    seen = RunStatus.read(tmp_path)
    assert json.loads(seen.as_json()) == {**json.loads(status().as_json()), "run_dir": str(tmp_path)}
    assert "rollout-0/0: step 6" in seen.as_text(now=101.0)


def test_launcher_that_hangs_is_shown_as_late(tmp_path: Path) -> None:
    assert "said nothing" not in status().as_text(now=105.0)
    assert "the launcher said nothing for 25 s" in status().as_text(now=125.0)


def test_run_of_another_host_is_alive_while_its_launcher_writes(tmp_path: Path) -> None:
    clock = HostClock("another host", 0.0)
    Job("10.0.0.1", 1, "00", 1, (), 0, "", 1, 0.0, clock).save(tmp_path)
    (tmp_path / STATUS_FILE).write_text(replace(status(), at=time.time()).as_json())
    assert RunStatus.read(tmp_path).controllers
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / STATUS_FILE).write_text(replace(status(), at=time.time() - 60).as_json())
    for old in ((tmp_path / STATUS_FILE).read_text(), '{"time": ', "{}", "[]"):
        (tmp_path / STATUS_FILE).write_text(old)
        with pytest.raises(ConfigError, match="no run is active in"):
            RunStatus.read(tmp_path)


def test_run_of_another_user_and_host_is_alive_while_its_launcher_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run_dir: Path) -> Job:
        raise PermissionError

    monkeypatch.setattr(Job, "load", refuse)
    (tmp_path / STATUS_FILE).write_text(replace(status(), at=time.time()).as_json())
    assert is_live(tmp_path)
    with pytest.raises(ConfigError, match=r"job.json is for the run's own user alone"):
        RunStatus.read(tmp_path)
    (tmp_path / STATUS_FILE).write_text(replace(status(), at=time.time() - 60).as_json())
    assert not is_live(tmp_path)


def test_the_command_imports_neither_torch_nor_the_configuration() -> None:
    modules = "sys, launcher.cli.commands, launcher.run.status"
    code = f"import {modules}; print('torch' in sys.modules, 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_run_that_was_killed_on_this_host_is_over_whatever_it_wrote_last(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as launcher:
        launcher.wait()
    job_of(launcher.pid, 1).save(tmp_path)
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / STATUS_FILE).write_text(replace(status(), at=time.time()).as_json())
    with pytest.raises(ConfigError, match="no run is active in"):
        RunStatus.read(tmp_path)


def test_timeline_imports_neither_torch_nor_the_configuration() -> None:
    code = "import sys, launcher.cli.commands, launcher.timeline.gantt_chart, launcher.timeline.run_timeline\n"
    code += "print('torch' in sys.modules, 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_who_has_shared_devices_is_shown() -> None:
    assert "devices:" not in status().as_text(now=101.0)
    shown = replace(status(), turn="actor; rollout-0, rollout-1 wait")
    assert "\n\ndevices: actor; rollout-0, rollout-1 wait\n\n" in shown.as_text(now=101.0)
    assert json.loads(shown.as_json())["turn"] == shown.turn


def test_a_run_that_is_starting_is_watched_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = RunEnd(tmp_path, ["done (step 3/3)"], 0, 1.0)
    said: list[TransportError | RunStatus | RunEnd] = [TransportError("the run is starting"), status(), ended]

    def read(run_dir: Path) -> RunStatus | RunEnd:
        now = said.pop(0)
        if isinstance(now, Exception):
            raise now
        return now

    monkeypatch.setattr("launcher.run.status.read_status", read)
    monkeypatch.setattr("launcher.cli.commands._WATCH_S", 0.0)
    shown = CliRunner().invoke(main, ["status", str(tmp_path), "--watch"])
    assert shown.exit_code == 0 and not said
    assert "the run is starting" in shown.output and "log-probs" in shown.output
    assert shown.output.endswith("done (step 3/3)\n")
    said += [TransportError("the run is starting"), status(), ended]
    shown = CliRunner().invoke(main, ["status", str(tmp_path), "--watch", "--json"])
    assert ["run_dir" in json.loads(line) for line in shown.stdout.splitlines()] == [True, True]
