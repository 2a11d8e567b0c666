"""A run whose rollout, actor and reference have an interpreter each (`launcher.environments`), over two kills."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from benchmarks.chaos.launched_run import LaunchedRun, overrides
from benchmarks.chaos.run_audit import audit

ROLES = ("rollout", "actor", "ref")
STEPS = 20
_DEADLINE_S = 1200.0
_VERSIONS = "from importlib.metadata import version as v; print(v('torch'), v('transformers'), v('tokenizers'))"


def run(*, interpreters: Sequence[str], **_: int) -> dict[str, float]:
    """Return nothing without interpreters."""
    if len(interpreters) != len(ROLES):
        sys.stderr.write(f"environments: skipped; give --interpreters, one for each of {', '.join(ROLES)}\n")
        return {}
    pythons = dict(zip(ROLES, interpreters, strict=True))
    for role, python in pythons.items():
        said = subprocess.run([python, "-P", "-c", _VERSIONS], capture_output=True, text=True, check=True).stdout
        sys.stderr.write(f"environments: {role}: {python}: torch, transformers, tokenizers {said}")
    with TemporaryDirectory() as directory, LaunchedRun(Path(directory) / "run") as launched:
        environments = json.dumps(pythons)
        settings = overrides(launcher__environments=environments, checkpoint__interval=3, launcher__device="cpu")
        launched.start("quickstart", "--roles", "rollout:1,actor:1,ref:1", "--steps", str(STEPS), *settings)
        as_wanted = True
        for step, victim in ((STEPS // 3, "rollout-0"), (2 * STEPS // 3, "actor-0")):
            launched.wait_for_step(step, deadline_s=_DEADLINE_S)
            as_wanted &= _have_interpreters(launched, pythons)
            pid = launched.pid_of(victim)
            launched.send(pid, signal.SIGKILL)
            launched.wait_until(
                lambda victim=victim, pid=pid: launched.pid_of(victim) not in (0, pid),  # type: ignore[misc]
                f"another {victim}",
                deadline_s=_DEADLINE_S,
            )
        launched.end_with(0, deadline_s=_DEADLINE_S)
        found = audit(launched.lines("ledger.jsonl"), launched.lines("updates.jsonl"))
        whole = launched.last_step()[1] == STEPS and not launched.verify() and not found.updates_missing
        skipped, twice = found.skipped, found.twice + found.updates_twice
    passed = as_wanted and whole and not skipped and not twice
    return {"environments_run": int(passed), "environments_skipped": skipped, "environments_twice": twice}


def _have_interpreters(launched: LaunchedRun, pythons: dict[str, str]) -> bool:
    # A forked worker has the command line of its fork server.
    return all(psutil.Process(launched.pid_of(f"{role}-0")).cmdline()[0] == pythons[role] for role in ROLES)
