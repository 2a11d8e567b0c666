"""Whole runs on `late`: their metrics are those of the CPU."""

from pathlib import Path

import pytest

from tests.runs import command

from .whole_runs import CASES, run_of


@pytest.fixture(scope="module")
def of_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    return {case: run_of(case, tmp_path_factory.mktemp(case), device="cpu") for case in ("staged", "ppo")}


@pytest.mark.parametrize("schedule", ["copies", "kernels"])
@pytest.mark.parametrize("case", CASES)
def test_a_run_equals_that_of_the_cpu(
    case: str,
    schedule: str,
    of_the_cpu: dict[str, list[dict[str, float]]],
    late_env: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (late_env | {"LATE_DEVICE_SCHEDULE": schedule}).items():
        monkeypatch.setenv(name, value)
    found = run_of(case, tmp_path, device="late")
    expected = of_the_cpu["ppo" if case == "ppo" else "staged"]
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, rel=1e-5, abs=1e-5)
    warnings = [file.read_text() for file in (tmp_path / "run").glob("logs/**/*") if file.is_file()]
    assert not any("not broadcast to all" in text for text in warnings), "a transfer broke, and nobody noticed"


def handed_over(run_dir: Path) -> list[tuple[int, int]]:
    """Return, for each load of weights that were on devices, the bytes that came from there and from shared memory."""
    spans = [one for path in (run_dir / "timeline").glob("rollout-*.jsonl") for one in command.lines(path)]
    return [(one["device_bytes"], one["host_bytes"]) for one in spans if one.get("name") == "hand over weights"]


def test_colocated_weights_are_read_on_the_devices_with_the_bits_that_shared_memory_has(
    late_env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for way, env in {"shared": {}, "devices": {"LATE_DEVICE_IPC": "1"}}.items():
        for name, value in (late_env | {"LATE_DEVICE_SCHEDULE": "kernels"} | env).items():
            monkeypatch.setenv(name, value)
        (tmp_path / way).mkdir()
        found[way] = run_of("colocated", tmp_path / way, device="late")
    assert found["devices"] == found["shared"]
    assert handed_over(tmp_path / "shared" / "run") == []
    loads = handed_over(tmp_path / "devices" / "run")
    assert len(loads) >= 2 * 3, "each of two generators loads each version"
    assert all(on_device > 0 and on_host == 0 for on_device, on_host in loads), loads
