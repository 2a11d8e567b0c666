"""Whole runs on `late`: their metrics are those of the CPU."""

from pathlib import Path

import pytest

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
