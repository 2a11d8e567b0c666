"""The checks' own process: what hangs, crashes or raises costs one finding, and nothing stays behind."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from asyncflow.errors import ConfigError
from launcher.checks import proof_cache as model_proof
from launcher.doctor.findings import RESOLVE, Finding, Level, MachineCheck, Order
from launcher.doctor.runner import examine

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the checking process imports the fakes by name

from doctor_fakes import ALSO_FINE, CHATTER, CRASH, FAIL, FINE, HANG, LACK, LEAVE, PLACE, STUBBORN  # noqa: E402

FAKES = Order(registry="doctor_fakes:CHECKS")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(PLACE, str(tmp_path))
    return tmp_path


def run(*checks: MachineCheck, order: Order = FAKES) -> list[Finding]:
    """All findings but the one about the configuration."""
    first, *others = examine(order, checks)
    assert first.check == RESOLVE
    return others


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_findings_come_in_order_and_from_one_process() -> None:
    first, second = run(FINE, ALSO_FINE)
    assert first.text == second.text
    assert first.level is Level.OK


def test_what_libraries_print_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert [finding.level for finding in run(CHATTER)] == [Level.WARNING, Level.ERROR]
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("check", [HANG, STUBBORN])
def test_a_check_that_hangs_costs_one_finding_and_leaves_nothing(check: MachineCheck, place: Path) -> None:
    before, hanging, after = run(FINE, check, ALSO_FINE)
    assert hanging == Finding(check.name, Level.ERROR, f"timed out after {check.deadline_s:g} s", "unplug it")
    assert before.text != after.text  # another process
    child, helper = (int(pid) for pid in (place / "pids").read_text().split())
    assert not alive(child)
    assert not alive(helper)
    if check is HANG:  # it was asked to end, and could remove what it had made
        assert (place / "hanging").exists()
        assert not [path for path in place.iterdir() if path.is_dir()]


def test_the_process_ends_with_whoever_stops_listening(place: Path) -> None:
    others = set(psutil.Process().children())  # e.g. of multiprocessing
    findings = examine(FAKES, [FINE, HANG])
    next(findings)
    assert next(findings).check == "fine"
    assert set(psutil.Process().children()) > others
    findings.close()  # as Ctrl-C does
    assert set(psutil.Process().children()) == others


def test_a_crash_names_the_signal_and_the_others_go_on() -> None:
    crashed, after = run(CRASH, FINE)
    assert crashed == Finding("crash", Level.ERROR, "the checking process was ended by SIGSEGV", "another driver")
    assert after.level is Level.OK


def test_a_library_that_ends_the_process_is_named_by_its_check() -> None:
    (left,) = run(LEAVE)
    assert left == Finding("leave", Level.ERROR, "the checking process ended with code 7", "another library")


def test_what_a_check_raises_is_a_warning_in_one_line() -> None:
    (raised,) = run(FAIL)
    assert raised.level is Level.WARNING
    assert raised.text == "this could not be checked (ValueError: an odd machine indeed)"


def test_a_missing_package_is_named() -> None:
    (lacking,) = run(LACK)
    assert lacking.text == "this could not be checked without the package left_pad"
    assert "packages" in lacking.remedy


def test_no_configuration_is_any_run_on_this_machine() -> None:
    first, fine = examine(Order(registry=FAKES.registry, num_nodes=3), [FINE])
    assert (first.level, first.text) == (Level.OK, "none given: any run, on this machine")
    assert fine.text.endswith("for 3 nodes")


def test_a_configuration_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"CONFIG: 'nowhere\.yaml' does not exist"):
        run(FINE, order=Order("nowhere.yaml", registry=FAKES.registry))
    with pytest.raises(ConfigError, match="--run-dir: '' is not a path"):
        run(FINE, order=Order(run_dir="", registry=FAKES.registry))


def test_a_configuration_says_what_the_run_takes(
    write_config: Callable[..., Path], model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # the process that looks would not believe this model
    model_proof._remember(model_proof.question_of(model_dir), dict.fromkeys(("names", "packed", "sharded", "generate")))
    first, *_ = examine(Order(str(write_config()), registry=FAKES.registry), [FINE])
    assert "8 workers on cpu" in first.text


def test_a_process_that_cannot_start_is_a_finding_not_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    first, second = examine(FAKES, [FINE])
    assert first.check == second.check == RESOLVE
    assert first.text == "the checking process ended with code 1"
    assert "import launcher.doctor.doctor_child" in first.remedy


def test_packages_without_which_nothing_can_be_checked_are_told() -> None:
    script = "import sys; sys.modules[sys.argv.pop()] = None; from launcher.cli.commands import main; main()"
    for package in ("msgspec", "pydantic"):
        command = [sys.executable, "-c", script, "doctor", "--json", package]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        report = json.loads(done.stdout)
        assert [finding["check"] for finding in report["findings"]] == [RESOLVE, "packages"]
        assert package in report["findings"][0]["text"]
        assert done.returncode == 1
