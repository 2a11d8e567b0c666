"""The shipped Kubernetes manifests as a cluster runs them: a network namespace is a pod, and the manifests' own rules
say what follows when pods end."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kubernetes import CONTROLLERS, After, Pod, manifest
from tests.support.run_files import last_step

from .hosts import Host, ends, eventually
from .test_run_over_hosts import SMALL, begun, check_ledger

LAST = 40
# What a user edits, and the volume's place on this machine.
RECIPE, ROLES = "/shared/recipes/my-recipe.yaml", "'rollout:8,actor:8'"
EDITED = " ".join((f"--steps {LAST}", *SMALL[2:]))


def command_of(pod: Pod, shared: Path) -> list[str]:
    *shell, script = pod.command
    for text, ours in ((RECIPE, "quickstart"), (ROLES, f"{SMALL[1]} {EDITED}"), ("/shared/", f"{shared}/")):
        assert text in script
        script = script.replace(text, ours)
    return [*shell, script]


def start(hosts: list[Host], pods: list[Pod], shared: Path) -> "list[subprocess.Popen[str]]":
    """Start every pod's command in its namespace."""
    there = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return [
        host.start("env", f"PATH={there}", *(f"{k}={v}" for k, v in pod.environment.items()), *command_of(pod, shared))
        for host, pod in zip(hosts, pods, strict=True)
    ]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", sorted(CONTROLLERS))
def test_run_in_pods_survives_a_deleted_pod_and_a_lost_one(two_hosts: list[Host], tmp_path: Path, name: str) -> None:
    controller = CONTROLLERS[name](manifest(name))
    pods, run_dir = controller.pods(), tmp_path / "runs" / "my-run"
    for host in two_hosts:  # the headless service
        host.know_names({pod.host: other.address for pod, other in zip(pods, two_hosts, strict=True)})

    launchers = start(two_hosts, pods, tmp_path)
    begun(run_dir, launchers, 2)
    # `kubectl delete pod`: TERM to the pod's first process, which `exec` made the launcher; KILL after its grace.
    launchers[1].send_signal(signal.SIGTERM)
    codes = [code for code, _ in ends(launchers, pods[1].grace_s)]
    assert codes == [75, 75]
    stopped_at = last_step(run_dir)
    assert (run_dir / "checkpoints" / f"step_{stopped_at:06d}").is_dir(), "the stop saved"
    assert controller.decide(codes, restarts=0) is After.RESTART

    launchers = start(two_hosts, pods, tmp_path)
    begun(run_dir, launchers, stopped_at + 2)
    for pid in two_hosts[1].pids():  # its node is gone
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    codes = [code for code, _ in ends(launchers)]
    assert codes == [75, -signal.SIGKILL]
    assert controller.decide([75, 128 + signal.SIGKILL], restarts=1) is After.RESTART
    eventually(lambda: not any(host.pids() for host in two_hosts), "the end of all processes")

    results = ends(start(two_hosts, pods, tmp_path), 600)
    assert [code for code, _ in results] == [0, 0], results
    assert controller.decide([0, 0], restarts=2) is After.DONE
    check_ledger(run_dir, LAST)
