"""How long the save of a stop takes, and what is refused because there is no time for it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner

from asyncflow.errors import ConfigError
from launcher.checks.preflight import Preflight
from launcher.cli.commands import main
from launcher.request import stop_time
from launcher.request.stop_time import StopSave, check_stop_save, stop_save_of, write_speed
from workers.settings.run import CheckpointConfig

WriteConfig = Callable[..., Path]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


SLURM = {"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": str(2**40)}


def checked(parameters: int, *, engine: str = "fsdp", nodes: int = 1, critic: bool = False, **own: Any) -> Preflight:
    config = SimpleNamespace(
        actor=SimpleNamespace(engine=engine),
        algorithm=SimpleNamespace(has_critic=critic),
        checkpoint=CheckpointConfig(**own),
        lora=None,
        sim=SimpleNamespace(parameters=parameters),
    )
    return cast(Preflight, SimpleNamespace(config=config, num_parameters=parameters, num_nodes=nodes))


def test_bytes_are_weights_and_moments_of_policy_and_critic_at_the_speed_that_is_set(tmp_path: Path) -> None:
    save = stop_save_of(checked(10**9, write_gb_per_s=0.5), tmp_path)
    assert (save.num_bytes, save.seconds) == (13 * 10**9, 26)
    assert str(save) == "13 GB, 26 s at 500 MB/s, checkpoint.write_gb_per_s"
    assert stop_save_of(checked(10**9, critic=True, write_gb_per_s=0.5), tmp_path).seconds == 52
    assert stop_save_of(checked(10**9, engine="sim", write_gb_per_s=0.5), tmp_path).num_bytes == 0


def test_disk_of_the_run_is_measured_for_all_nodes_and_only_if_it_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(stop_time, "write_speed", lambda place: asked.append(place) or 1e9)
    assert stop_save_of(checked(10**8), tmp_path / "runs" / "new").seconds == 0
    assert asked == []
    save = stop_save_of(checked(10**9, nodes=2), tmp_path / "runs" / "new")
    assert (save.seconds, save.source, asked) == (6.5, f"measured in {tmp_path} x 2 nodes", [tmp_path])


def test_measuring_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_time, "_STREAM_BYTES", 2**16)
    monkeypatch.setattr(stop_time, "_BLOCK_BYTES", 2**16)
    speed = write_speed(tmp_path / "cwd")
    assert speed is not None and speed > 0
    assert not any((tmp_path / "cwd").iterdir())
    assert write_speed(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("env", "refusal"),
    [
        ({}, ""),
        (SLURM, ""),
        (
            {"SLURM_JOB_ID": "17"},
            r"^launcher.stop_timeout_s: 30 s are too short for the save of a stop \(39 GB, 39 s at",
        ),
    ],
)
def test_save_needs_the_time_that_a_stop_grants_it(env: dict[str, str], refusal: str) -> None:
    config: Any = SimpleNamespace(checkpoint=CheckpointConfig(), launcher=SimpleNamespace(stop_timeout_s=30.0))
    save = StopSave(39 * 10**9, 1e9, "measured in /runs")
    if not refusal:
        check_stop_save(save, config, env)
        return
    with pytest.raises(ConfigError, match=refusal):
        check_stop_save(save, config, env)


# The model has 52 parameters, so that its save has 676 bytes.
SLOW = ("--set", "checkpoint.write_gb_per_s=1e-8")


def test_start_that_could_never_save_is_refused_and_dry_run_shows_the_time(write_config: WriteConfig) -> None:
    source = str(write_config())
    result = CliRunner().invoke(main, ["launch", source, "--dry-run", *SLOW, "--set", "checkpoint.timeout_s=60"])
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: checkpoint.timeout_s: 60 s are too short for the save of a stop (676 B, 68")
    shown = CliRunner().invoke(main, ["launch", source, "--dry-run", *SLOW])
    assert shown.exit_code == 0, shown.output
    assert "\na stop saves    676 B, 68 s at 10 B/s, checkpoint.write_gb_per_s\n" in shown.stdout


def test_signal_of_a_batch_job_must_leave_time_for_the_save(write_config: WriteConfig) -> None:
    arguments = ["sbatch", str(write_config()), "--time", "60", *SLOW]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "Error: --signal-s: 120 s are too short to stop and save, which may take 138 s (twice"
    )
    assert "the save: 676 B, 68 s at 10 B/s, checkpoint.write_gb_per_s); set it to 138 or more" in result.stderr
    script = CliRunner().invoke(main, [*arguments, "--signal-s", "138"]).stdout
    assert "\n#SBATCH --signal=B:USR1@138\n" in script
    assert "\ngather_s=138\n" in script
