"""`asyncflow doctor --device-check`, on the CPU and on `late`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.doctor.device_check import CHECKS
from launcher.doctor.findings import RESOLVE

COMMAND = Path(sys.executable).parent / "asyncflow"
DEADLINE_S = 900


@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("device", ["cpu", "late"])
def test_nothing_is_wrong_where_the_tests_pass(
    device: str, late_env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (late_env | {"LATE_DEVICE_IPC": "1"}).items():
        monkeypatch.setenv(name, value)
    arguments = ["doctor", "quickstart", "--set", f"launcher.device={device}", "--device-check", "--json"]
    done = subprocess.run([COMMAND, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S)
    report = json.loads(done.stdout)
    found = {finding["check"]: finding for finding in report["findings"]}
    assert list(found) == [RESOLVE, *(check.name for check in CHECKS)]
    # `late` has no kernel for attention that keeps no scores, so its memory is beyond the estimate.
    wrong = {name: finding for name, finding in found.items() if finding["level"] != "ok" and name != "memory"}
    assert wrong == {} and done.returncode == (found["memory"]["level"] == "error"), report
    assert "out" in found["host copies"]["text"] or device == "cpu"
    assert "ranks read other processes' memory" in found["handover"]["text"] or device == "cpu"
