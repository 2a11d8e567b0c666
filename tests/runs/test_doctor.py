"""`asyncflow doctor` as users type it: what it says, its exit code, and that it leaves nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.doctor.doctor_child import CHECKS
from launcher.doctor.findings import RESOLVE

COMMAND = Path(sys.executable).parent / "asyncflow"
DEADLINE_S = 150
CERTAIN = {"configuration", "packages", "devices", "shared memory", "groups", "storage backend", "engines"}
"""Checks that find nothing wrong on any machine on which these tests run."""


def doctor(*arguments: str, cwd: Path, before: str = "", **env: str) -> "subprocess.CompletedProcess[str]":
    """Run the command in a shell, after `before`."""
    return subprocess.run(
        ["bash", "-c", f'{before}\nexec "$@"', "bash", str(COMMAND), "doctor", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, **env},
    )


def findings(done: "subprocess.CompletedProcess[str]") -> dict[str, list[dict[str, Any]]]:
    """Findings by check."""
    report = json.loads(done.stdout)
    assert done.stderr == ""
    assert done.returncode == (1 if report["num_error"] else 0)
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in report["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return found


def test_the_quickstart_can_run_here_and_looking_leaves_nothing(tmp_path: Path) -> None:
    found = findings(doctor("quickstart", "--json", cwd=tmp_path))
    assert list(found) == [RESOLVE, *(check.name for check in CHECKS)]
    assert {check for check, those in found.items() if those[0]["level"] == "ok"} >= CERTAIN
    assert "8 workers" in found[RESOLVE][0]["text"]
    assert list(tmp_path.iterdir()) == []


def test_without_a_configuration_it_prints_a_line_per_finding(tmp_path: Path) -> None:
    done = doctor(cwd=tmp_path)
    *lines, last = done.stdout.splitlines()
    heads = [line for line in lines if not line.startswith(" ")]
    assert heads[0].endswith("none given: any run, on this machine")
    assert all(line.split()[0] in ("ok", "warning", "error") for line in heads)
    assert all(line.strip().startswith("-> ") for line in lines if line.startswith(" "))
    assert len(heads) > len(CHECKS)
    errors = sum(line.startswith("error") for line in heads)
    assert last.startswith(f"{errors} error")
    assert done.returncode == (1 if errors else 0)


def test_too_few_open_files_are_an_error_with_the_command_that_helps(tmp_path: Path) -> None:
    found = findings(doctor("quickstart", "--json", cwd=tmp_path, before="ulimit -Sn 100"))
    (files,) = found["open files"]
    assert files["level"] == "error"
    assert files["text"].startswith("a process may open 100 files; the run opens up to ")
    assert files["remedy"].startswith("ulimit -n ")


def test_memory_that_cannot_be_shared_is_an_error(tmp_path: Path) -> None:
    found = findings(doctor("--json", cwd=tmp_path, before="ulimit -v 8000000"))
    (shared,) = found["shared memory"]
    assert shared["level"] == "error"
    assert "ulimit -v unlimited" in shared["remedy"]


def test_a_storage_server_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("redis")
    address = "redis://:secret@127.0.0.1:1/0"
    done = doctor("quickstart", "--set", f"tq.backend={{kind: redis, address: '{address}'}}", "--json", cwd=tmp_path)
    (backend,) = findings(done)["storage backend"]
    assert backend["level"] == "error"
    assert backend["text"].startswith("redis at 127.0.0.1:1 does not answer (ConnectionError")
    assert "secret" not in done.stdout


def test_several_nodes_need_a_place_that_they_share(tmp_path: Path) -> None:
    found = findings(doctor("--nnodes", "2", "--json", cwd=tmp_path))
    assert any("2 nodes" in finding["text"] for finding in found["disk"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml"], "CONFIG: 'nowhere.yaml' does not exist"),
        (["quickstart", "--set", "actor.lr=fast"], "actor.lr: 'fast' cannot be used"),
        (["quickstart", "--roles", "rollout:1"], "roles: 'actor' is missing"),
        (["--roles", "rollout:1,actor:1"], "--roles: needs CONFIG"),
        (["--set", "actor.lr=1"], "--set: needs CONFIG"),
        (["--nnodes", "0"], "--nnodes: 0 is not in the range"),
        (["broken.yaml"], "a user's section"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text(yaml.safe_dump({"a user's section": 1}))
    done = doctor(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
