"""The command on several nodes, as far as it comes without starting anything."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from asyncflow.errors import ConfigError
from asyncflow.job import GangSpec
from launcher.checks.placement import Devices
from launcher.checks.preflight import check_run
from launcher.cli.launch import launch
from launcher.config.load_config import load_config
from launcher.nodes.options import NodePlace
from launcher.request.request import Request
from launcher.run.rundir import create_run_dir, discard_run_dir

WriteConfig = Callable[..., Path]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(launch, [str(argument) for argument in arguments])


def test_dry_run_says_what_runs_where_and_how_it_is_started(write_config: WriteConfig, tmp_path: Path) -> None:
    source, run_dir = write_config(), tmp_path / "run"
    options = ("--nnodes", 2, "--node-rank", 1, "--head", "node1:29400")
    result = run(source, "--roles", "rollout:2,actor:2", "--run-dir", run_dir, "--dry-run", *options)
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert "devices         2 nodes, each with cpu" in text
    rows = [line.split()[:4] for line in text.splitlines()]
    for row in (["weights-1", "1", "1", "cpu"], ["actor", "2", "0", "cpu"], ["rollout-1", "1", "1", "cpu"]):
        assert row in rows
    assert ["0", "5", "controller-0", "storage-0"] in rows
    command = f"asyncflow-launch {source} --roles rollout:2,actor:2 --run-dir {run_dir}"
    assert f"{command} --nnodes 2 --node-rank K --head node1:29400" in text
    assert f"srun --nodes=2 --ntasks-per-node=1 {command}" in text
    assert "job store       node1:29400" in text
    assert not run_dir.exists()


def test_dry_run_of_one_node_has_no_node_column(write_config: WriteConfig) -> None:
    text = run(write_config(), "--dry-run").stdout
    assert "NODE" not in text
    assert "127.0.0.1:<a free port" in text


def test_launchers_must_know_where_to_meet(write_config: WriteConfig) -> None:
    for rank in (0, 1):
        result = run(write_config(), "--nnodes", 2, "--node-rank", rank)
        assert result.exit_code == 2
        assert result.stderr.startswith("Error: --run-dir: is missing; launchers of several nodes meet in the run's")


@pytest.mark.parametrize(
    ("resume", "run_dir", "found"),
    [
        (None, None, "runs/slurm-17"),
        ("latest", None, "runs/slurm-17"),
        (None, "mine", "mine"),
        ("latest", "mine", "mine"),
        ("mine", None, "mine"),
        ("mine/checkpoints/step_000002", None, "mine"),
    ],
)
def test_all_launchers_meet_in_the_same_directory(
    write_config: WriteConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    resume: str | None,
    run_dir: str | None,
    found: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    place = NodePlace(2, 1, job_id="17")
    request = Request(config=str(write_config()), run_dir=run_dir, resume=resume, place=place)
    assert request.accept_node().run_dir == tmp_path / found


def test_node_that_cannot_take_part_has_a_complaint_for_node_0(write_config: WriteConfig, tmp_path: Path) -> None:
    place = NodePlace(2, 1)
    source = write_config(model={"path": "elsewhere"})
    node = Request(config=str(source), run_dir=str(tmp_path / "run"), place=place).accept_node()
    assert "model.path: 'elsewhere' does not exist" in node.complaint
    node = Request(resume="latest", run_dir=str(tmp_path / "run"), place=place).accept_node()
    assert "config.yaml" in node.complaint


def test_node_that_can_take_part_says_what_it_has(write_config: WriteConfig, tmp_path: Path) -> None:
    request = Request(config=str(write_config()), run_dir=str(tmp_path / "run"), place=NodePlace(2, 1))
    node = request.accept_node()
    assert (node.complaint, node.devices, node.settings.device) == ("", Devices("cpu"), "cpu")
    assert not (tmp_path / "run").exists()


def test_node_asks_the_interpreters_of_its_own_gangs(write_config: WriteConfig, tmp_path: Path) -> None:
    environments = {"rollout": {0: str(tmp_path / "none"), 1: str(tmp_path / "python")}}
    source = write_config(launcher={"environments": environments, "device": "cpu"})
    gangs = [GangSpec(f"rollout-{node}", "rollout", node, 1, ("cpu",), (node,)) for node in range(2)]
    node = Request(config=str(source), run_dir=str(tmp_path / "run"), place=NodePlace(2, 1)).accept_node()
    assert node.complaint == ""
    with pytest.raises(ConfigError, match=r"launcher.environments: .*/python \(rollout\): cannot be run"):
        node.check_gangs(gangs)


def test_ranks_use_only_the_devices_that_every_node_has(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.checks.preflight.find_devices", lambda _: Devices("npu", 8))
    config = load_config(write_config(launcher={"device": "npu", "devices_per_node": 3}), roles="rollout:2,actor:2")
    checked = check_run(config, num_nodes=2)
    devices = {gang.name: (gang.nodes, gang.devices) for gang in checked.gangs}
    assert devices["actor"] == ((0, 0), ("npu:0", "npu:1"))
    assert devices["rollout-0"] == ((0,), ("npu:2",))
    assert devices["rollout-1"] == ((1,), ("npu:0",))
    config = load_config(write_config(launcher={"devices_per_node": 9}))
    with pytest.raises(ConfigError, match="launcher.devices_per_node: 9, but this node has 8 npu devices; set it to 8"):
        check_run(config, num_nodes=2)


def test_run_that_never_began_leaves_what_is_not_its_own(write_config: WriteConfig, tmp_path: Path) -> None:
    config = load_config(write_config())
    for keep in (False, True):
        run_dir = create_run_dir(tmp_path / "run", config)
        (run_dir / "logs" / "launcher.log").touch()
        (run_dir / "logs" / "launcher-2.log").touch()
        if keep:
            (run_dir / "samples" / "mine.txt").touch()
        discard_run_dir(run_dir)
        assert (tmp_path / "run").exists() == keep
    assert [path.name for path in (tmp_path / "run").rglob("*")] == ["samples", "mine.txt"]
