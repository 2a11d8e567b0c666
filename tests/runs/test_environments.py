"""A run whose roles have interpreters of their own."""

import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.runs import command
from tests.support.interpreters import make_interpreter

pytestmark = pytest.mark.slow

SMALL = ("quickstart", "--roles", "rollout:1,actor:1,ref:1", "--set", "checkpoint.interval=2")
SPAWNS = "import threading\nthreading.Thread(target=threading.Event().wait, name='profiler', daemon=True).start()\n"


def interpreters_of(launcher: int, run_dir: Path) -> dict[str, str]:
    """Return gang -> the interpreter of its process."""
    found = {}
    for one in command.descendants(launcher):
        try:
            # One that is dying has no command line any more.
            if (gang := command.gang_of(one.pid, run_dir)) and (words := one.cmdline()):
                found[gang] = words[0]
        except psutil.Error:
            continue
    return found


def test_each_role_runs_in_its_interpreter_also_after_a_restart_and_a_resume(tmp_path: Path) -> None:
    """The rollout's cannot be forked from; the others fork."""
    rollout, actor = make_interpreter(tmp_path / "a", sitecustomize=SPAWNS), make_interpreter(tmp_path / "b")
    environments = ("--set", f"launcher.environments={{rollout: {rollout}, actor: {actor}}}")
    run_dir = tmp_path / "run"
    dry = command.run(*SMALL, *environments, "--run-dir", "run", "--dry-run", cwd=tmp_path)
    (line,) = [line for line in dry.stdout.splitlines() if line.endswith(rollout)]
    assert line.split() == ["rollout", rollout]

    def as_wanted(launcher: int) -> bool:
        found = interpreters_of(launcher, run_dir)
        wanted = {"rollout-0": rollout, "actor": actor, "ref-0": sys.executable}
        return all(found.get(gang) == python for gang, python in wanted.items())

    with command.started(*SMALL, *environments, "--run-dir", "run", "--steps", "200", cwd=tmp_path) as process:
        command.wait_until(lambda: command.last_step(run_dir) >= 2, "step 2")
        assert as_wanted(process.pid)
        command.kill_gang(process.pid, run_dir, "rollout-0")
        command.wait_until(lambda: as_wanted(process.pid), "another rollout")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=command.DEADLINE_S)
        assert process.returncode == 75, err
        assert out.count(f"workers of {rollout} are spawned, not forked, because of 2 threads (profiler)") == 1
    step = command.last_step(run_dir)
    with command.started("--resume", "run", "--steps", str(step + 2), cwd=tmp_path) as process:
        command.wait_until(lambda: as_wanted(process.pid), "the resumed run")
        _, err = process.communicate(timeout=command.DEADLINE_S)
        assert process.returncode == 0, err
    assert command.last_step(run_dir) == step + 2


def test_interpreter_without_asyncflow_starts_nothing(tmp_path: Path) -> None:
    bare = make_interpreter(tmp_path / "bare", has_asyncflow=False)
    wanted = ("--set", f"launcher.environments={{ref: {bare}}}", "--run-dir", "run")
    for more in ((), ("--dry-run",)):
        refused = command.run(*SMALL, *wanted, *more, cwd=tmp_path)
        assert refused.returncode == 2
        assert f"launcher.environments: {bare} (ref): has no AsyncFlow; install" in refused.stderr
        assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
