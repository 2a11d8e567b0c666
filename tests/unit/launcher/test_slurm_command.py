"""`asyncflow sbatch` as users type it: bad input costs one line, and nothing that Slurm would refuse is written."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from launcher.cli.commands import main
from launcher.config.load_config import load_config
from launcher.run.rundir import create_run_dir

WriteConfig = Callable[..., Path]


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    yield


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["sbatch", *(str(argument) for argument in arguments)])


def refuse(*arguments: object) -> str:
    """Run a command that must be refused without a trace; return its line."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert not any(Path.cwd().iterdir())
    return result.stderr.removeprefix("Error: ").rstrip("\n")


def with_sbatch(directory: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Put an `sbatch` into PATH that runs bash lines."""
    directory.mkdir()
    (directory / "sbatch").write_text(f"#!/bin/bash\n{text}\n")
    (directory / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def test_script_launches_what_was_asked_for_with_whole_paths(write_config: WriteConfig) -> None:
    source = write_config()
    result = run(
        source, "--time", "1:00:00", "--roles", "rollout:1,actor:1", "--set", "actor.lr=0.1", "--steps", 3,
        "--run-dir", "r", "--nodes", 2, "--partition", "gpu", "--gres", "gpu:8", "--sbatch-arg", "--qos=long",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert f"made {Path.cwd() / 'r'}, where Slurm will write its log\n" == result.stderr
    launch = result.stdout[result.stdout.index("launch=(") :].partition("\n)\n")[0].splitlines()
    assert launch[1].endswith(f"asyncflow-launch {source}")
    assert launch[2:] == [
        "    --roles 'rollout:1,actor:1'", "    --set actor.lr=0.1", "    --steps 3", '    --run-dir "$run_dir"'
    ]  # fmt: skip
    lines = result.stdout.splitlines()
    for line in ("#SBATCH --partition=gpu", "#SBATCH --nodes=2", "#SBATCH --gres=gpu:8", "#SBATCH --qos=long"):
        assert line in lines
    assert f"run_dir={Path.cwd() / 'r'}" in lines
    assert not any((Path.cwd() / "r").iterdir())
    subprocess.run(["bash", "-n"], input=result.stdout, text=True, check=True)


def test_without_run_dir_all_restarts_still_share_one(write_config: WriteConfig) -> None:
    result = run(write_config(), "--time", "60")
    assert result.exit_code == 0, result.output
    (made,) = Path("runs").iterdir()
    assert f"\nrun_dir={made.resolve()}\n" in result.stdout


def launch_lines(script: str) -> list[str]:
    """Return the lines of the launcher's command, without their indentation."""
    return [line.strip() for line in script[script.index("launch=(") :].partition("\n)\n")[0].splitlines()[1:]]


@pytest.mark.parametrize(
    ("device", "arguments", "note"),
    [
        ("cuda", ["--gres", "gpu:h100:4"], ""),
        ("npu", ["--sbatch-arg=--gres=npu:4"], ""),
        ("npu", ["--set", "launcher.devices_per_node=4"], ""),
        ("cuda", [], "note: how many cuda devices a node has is not known here, so the nodes check the placement; "),
    ],
)
def test_devices_are_the_nodes_own(write_config: WriteConfig, device: str, arguments: list[str], note: str) -> None:
    """The host on which the command is typed need not have any."""
    source = write_config(launcher={"device": device})
    result = run(source, "--time", "60", "--roles", "rollout:2,actor:2", *arguments)
    assert result.exit_code == 0, result.output
    assert "launcher.device=" not in result.stdout
    assert result.stderr.partition("made ")[0].startswith(note) and bool(note) == result.stderr.startswith("note:")


def test_device_that_is_asked_for_is_the_one_that_the_nodes_must_have(write_config: WriteConfig) -> None:
    result = run(write_config(), "--time", "60", "--device", "npu", "--gres", "npu:16")
    assert result.exit_code == 0, result.output
    assert "--set launcher.device=npu" in launch_lines(result.stdout)


AUTO = ("--set", "launcher.device=auto")
ROLES = ("--roles", "rollout:12,actor:4", "--time", "60")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--device", "gpu"], "--device: 'gpu' is no kind of device; use one of "),
        (["--device", "cuda", "--gres", "gpu:8"], "roles: rollout:12,actor:4 needs 16 cuda devices, but there are 8; "),
        ([*AUTO, "--gres", "gpu:8"], "roles: rollout:12,actor:4 needs 16 cuda devices, but there are 8; "),
        (
            [*AUTO, "--sbatch-arg=--gpus-per-node=4", "--nodes", "3"],
            "roles: rollout:12,actor:4 needs 16 cuda devices, but ",
        ),
        (
            [*AUTO, "--sbatch-arg=--gpus-per-task=8"],
            "roles: rollout:12,actor:4 needs 16 cuda devices, but there are 8; ",
        ),
        (
            ["--device", "npu", "--gres", "npu:8", "--set", "launcher.devices_per_node=16"],
            "launcher.devices_per_node: 16, but the job asks for 8 npu devices of a node; set it to 8 or less",
        ),
    ],
)
def test_run_is_judged_for_the_devices_of_the_nodes(
    write_config: WriteConfig, arguments: list[str], expected: str
) -> None:
    assert refuse(write_config(), *ROLES, *arguments).startswith(expected)


def test_run_on_the_cpus_of_a_login_node_with_or_without_devices_is_judged_alike(write_config: WriteConfig) -> None:
    assert run(write_config(), *ROLES, "--device", "cpu", "--gres", "gpu:1").exit_code == 0


@pytest.mark.parametrize("argument", ["--gpus=16", "-G16"])
def test_devices_that_slurm_divides_among_the_nodes_are_counted_there(write_config: WriteConfig, argument: str) -> None:
    result = run(write_config(), *ROLES, *AUTO, f"--sbatch-arg={argument}")
    assert result.exit_code == 0, result.output
    assert "how many cuda devices a node has is not known here" in result.stderr


IMAGE = "registry.site.org#team/asyncflow:1"


def test_container_holds_the_launchers_and_not_the_batch_script(write_config: WriteConfig, tmp_path: Path) -> None:
    mounts = f"{tmp_path}:{tmp_path},/scratch/data:/data:ro+rprivate"
    source = write_config()
    result = run(source, "--time", "60", "--container-image", IMAGE, "--container-mounts", mounts)
    assert result.exit_code == 0, result.output
    assert "#SBATCH --container" not in result.stdout
    options = subprocess.run(
        ["bash", "-c", result.stdout[result.stdout.index("srun_options=") :].partition("\n")[0]
         + '\nprintf "%s\\n" "${srun_options[@]}"'],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert options == [
        "--cpu-bind=none", f"--container-image={IMAGE}", f"--container-mounts={mounts}",
        f"--container-workdir={Path.cwd()}",
    ]  # fmt: skip
    assert launch_lines(result.stdout)[0] == f"asyncflow-launch {source}", "the image's own command"


def test_packaged_recipe_is_the_containers_own(tmp_path: Path) -> None:
    result = run("--time", "60", "--container-image", IMAGE, "--container-mounts", f"{tmp_path}:{tmp_path}")
    assert result.exit_code == 0, result.output
    assert launch_lines(result.stdout)[0] == "asyncflow-launch quickstart"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--container-mounts", "/a:/a"], "--container-mounts: there is no container; give --container-image, too"),
        (["--container-image", "a\nb"], "--container-image: 'a\\nb' has characters that cannot be printed"),
        (["--container-image", "i", "--container-mounts", "/a,b:/b"], "--container-mounts: 'b:/b' is no mount; give "),
        (["--container-image", "i", "--container-mounts", "/a:"], "--container-mounts: '/a:' is no mount; give "),
        (["--container-image", "i"], "--container-mounts: the run directory "),
        (["--container-image", "i", "--container-mounts", "CWD:/else"], "--container-mounts: the run directory "),
        (["--container-image", "i", "--container-mounts", "CWD:CWD,/b:CWD"], "--container-mounts: the run directory "),
        (["--container-image", "i", "--container-mounts", "CWD:CWD:x+ro"], "--container-mounts: the run directory "),
        (["--container-image", "i", "--container-mounts", "CWD:CWD"], "--container-mounts: CONFIG "),
        (["--sbatch-arg=--container-image=i"], "--sbatch-arg: --container-image=i would put the batch script itself "),
    ],
)
def test_container_that_contradicts_itself_is_refused(
    write_config: WriteConfig, arguments: list[str], expected: str
) -> None:
    told = [argument.replace("CWD", str(Path.cwd())) for argument in arguments]
    assert refuse(write_config(), "--time", "60", *told).startswith(expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--time", "1h"], "--time: '1h' is no time limit"),
        (["--time", "3:00"], "--time: '3:00' leaves no time to train: Slurm's signal comes 120 s (--signal-s) ahead"),
        (["--time", "60", "--signal-s", "69"], "--signal-s: 69 s are too short to stop and save, which may take 70 s"),
        (["--time", "60", "--partition", "a b"], "--partition: 'a b' cannot stand in an #SBATCH line"),
        (["--time", "60", "--gres", "gpu:8\n#"], "--gres: 'gpu:8\\n#' cannot stand in an #SBATCH line"),
        (["--time", "60", "--sbatch-arg", "qos=long"], "--sbatch-arg: 'qos=long' is not an option of sbatch"),
        (["--time", "60", "--sbatch-arg", "--a\nrm"], "--sbatch-arg: '--a\\nrm' is not an option of sbatch"),
        (["--time", "60", "--run-dir", 'a"b'], "--run-dir: "),
        (["--time", "60", "--run-dir", "r", "--set", 'name=a"b'], "name: 'a\"b' cannot stand in an #SBATCH line"),
        (["--time", "60", "--nodes", "0"], "--nodes: 0 is not in the range x>=1"),
        (["--time", "60", "--setup", "none.sh"], "--setup: "),
        (["--time", "60", "--roles", "rollout"], "--roles"),
        ([], "Missing option '--time'"),
    ],
)
def test_input_that_cannot_be_is_refused(write_config: WriteConfig, arguments: list[str], expected: str) -> None:
    assert refuse(write_config(), *arguments).startswith(expected)


def test_longer_saving_needs_an_earlier_signal(write_config: WriteConfig) -> None:
    source = write_config(launcher={"stop_timeout_s": 300})
    assert "set it to 610 or more" in refuse(source, "--time", "24:00:00")
    result = run(source, "--time", "24:00:00", "--signal-s", "610")
    assert "\n#SBATCH --signal=B:USR1@610\n" in result.stdout
    assert "\ngather_s=610\n" in result.stdout


def test_directory_of_another_run_is_refused_but_may_be_resumed(write_config: WriteConfig, tmp_path: Path) -> None:
    source = write_config()
    held = create_run_dir(tmp_path / "held", load_config(source))
    assert "already holds a run (config.yaml)" in refuse(source, "--time", "60", "--run-dir", held)
    result = run("--time", "60", "--run-dir", held, "--resume", "latest", "--roles", "rollout:1,actor:1")
    assert result.exit_code == 0, result.output
    launch = result.stdout[result.stdout.index("launch=(") :].partition("\n)\n")[0].splitlines()
    assert launch[1].endswith("asyncflow-launch")
    assert launch[-2:] == ["    --resume latest", '    --run-dir "$run_dir"']
    assert result.stderr == ""


def test_setup_runs_before_the_launch(write_config: WriteConfig, tmp_path: Path) -> None:
    setup = tmp_path / "site.sh"
    setup.write_text("module load cuda\nsource venv\n")
    text = run(write_config(), "--time", "60", "--setup", setup).stdout
    assert "\nmodule load cuda\nsource venv\n" in text[: text.index("launch=(")]


def test_submitted_script_lies_in_the_run_directory(
    write_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_sbatch(tmp_path / "bin", monkeypatch, f'echo "$@" > {tmp_path}/asked\necho "17;cluster"')
    result = run(write_config(), "--time", "60", "--run-dir", "r", "--submit")
    run_dir = Path.cwd() / "r"
    assert result.stdout == f"submitted job 17; its log: {run_dir}/slurm-17.out\n"
    assert (tmp_path / "asked").read_text() == f"--parsable {run_dir}/run.sbatch\n"
    assert (run_dir / "run.sbatch").read_text().startswith("#!/bin/bash\n# AsyncFlow run 'tiny' on 1 node.")


def test_what_sbatch_says_is_passed_on(
    write_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_sbatch(tmp_path / "bin", monkeypatch, "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    result = run(write_config(), "--time", "60", "--run-dir", "r", "--submit")
    assert result.exit_code == 2
    assert "run.sbatch: invalid partition specified: gpu; correct the options" in result.stderr
    assert result.stderr.count("\n") == 1


def test_without_slurm_there_is_nothing_to_submit_to(
    write_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refuse(write_config(), "--time", "60", "--submit").startswith(
        "--submit: there is no sbatch on this machine; "
    )
