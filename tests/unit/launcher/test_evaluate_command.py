"""`asyncflow evaluate` without its processes: what it takes for a model, and what it makes of the answers."""

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

import configs
from asyncflow.errors import ConfigError
from asyncflow.json_lines import JsonLines
from launcher.cli.commands import main
from launcher.request.evaluation import accept_evaluation, read_answers, table_of
from workers.rollout.evaluate import ANSWERS, Answer

MODEL = Path(configs.__path__[0]) / "quickstart" / "model"


def write_answers(run_dir: Path, instance: int, answers: list[Answer]) -> None:
    (run_dir / ANSWERS).mkdir(exist_ok=True)
    lines = JsonLines(run_dir / ANSWERS / f"evaluate-{instance}.jsonl")
    lines.write([asdict(answer) for answer in answers])
    lines.close()


def test_answers_of_all_instances_make_one_line_and_a_row_per_set(tmp_path: Path) -> None:
    def answer(name: str, prompt: int, member: int, *, right: bool) -> Answer:
        took = 1.5 if name == "sums" else 0.25
        return Answer(name, prompt, member, float(right), correct=right, tokens=4, truncated=not right, seconds=took)

    for instance in (0, 1):
        sums = [answer("sums", prompt, k, right=prompt < 2) for prompt in range(instance, 4, 2) for k in range(2)]
        write_answers(tmp_path, instance, [*sums, answer("words", instance, 0, right=instance == 0)])
    line = read_answers(tmp_path, ["words", "sums"], seconds=3.0)
    assert (line["accuracy"], line["words/accuracy"], line["sums/accuracy"]) == (0.5, 0.5, 0.5)
    assert (line["sums/num_prompts"], line["sums/num_samples"], line["sums/pass_at_2"]) == (4, 8, 0.5)
    assert (line["seconds"], line["words/seconds"], line["sums/seconds"]) == (3.0, 0.25, 1.5)
    heading, words, sums = table_of(line, ["words", "sums"])
    assert (heading[0], words[0], sums[0]) == ("set", "words", "sums")
    assert (words[3], sums[3]) == ("-", "0.500 (k 2)")
    assert (words[7], table_of({**line, "words/reward_failures": 1}, ["words"])[1][7]) == ("2", "2, 1 without a score")
    assert sums[1:3] == ("0.500", f"{line['sums/accuracy_low']:.3f} to {line['sums/accuracy_high']:.3f}")


@pytest.mark.parametrize(
    ("model", "config", "complaint"),
    [
        ("nowhere", "quickstart", "^MODEL: 'nowhere' is not there; name a model's directory"),
        ("run/checkpoints/step_000009", "quickstart", "^MODEL: 'run/checkpoints/step_000009' is not there"),
        ("adapter/adapter_config.json", "quickstart", "^MODEL: 'adapter/adapter_config.json' is a file"),
        ("run", "quickstart", "^MODEL: run is no model, since it has no config.json"),
        ("run/checkpoints/step_000005", "quickstart", "^MODEL: .*step_000005 is not a valid checkpoint: "),
        (str(MODEL), None, "CONFIG: is missing, and .* is not a run that has one"),
        (str(MODEL), "quickstart-ppo-cpu.yaml", "CONFIG|evaluate"),
        ("adapter", "quickstart", "^MODEL: adapter is an adapter, .*; name the merged model: hf/"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    model: str, config: str | None, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("adapter").mkdir()
    Path("adapter", "adapter_config.json").write_text("{}")
    Path("run", "checkpoints", "step_000005").mkdir(parents=True)
    with pytest.raises(ConfigError, match=complaint):
        accept_evaluation(model, config, overrides=["evaluate.path=null"], ranks=1, run_dir=None)


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("data.ground_truth_field=null", "evaluate.ground_truth_field: null"),
        (
            "evaluate={engine: sim, sets: {a: {path: quickstart/held_out.jsonl, temperature: 0.5}, "
            "b: {path: quickstart/held_out.jsonl}}}",
            "evaluate.sets: they draw in different ways",
        ),
        (
            "evaluate.sets={a: {path: quickstart/held_out.jsonl}}",
            r"evaluate: \{path, interval, sets\} cannot be used \(.*quickstart.yaml:\d+, and --set evaluate.sets",
        ),
        ("vllm={max_model_len: 6}", "vllm.max_model_len: 6 is less than data.max_prompt_tokens"),
        ("vllm={tensor_parallel_size: 3}", "vllm.tensor_parallel_size: 3 does not divide"),
    ],
)
def test_what_would_make_every_answer_wrong_or_end_late_is_refused(override: str, complaint: str) -> None:
    overrides = [override, *(["evaluate.engine=vllm"] if override.startswith("vllm") else [])]
    with pytest.raises(ConfigError, match=f"^{complaint}"):
        accept_evaluation(str(MODEL), "quickstart", overrides=overrides, ranks=3, run_dir=None)


def test_a_reward_model_that_evaluations_do_not_use_is_not_looked_for(tmp_path: Path) -> None:
    unread = "reward.model={path: nowhere/model}"
    accepted = accept_evaluation(str(MODEL), "quickstart", overrides=[unread], ranks=1, run_dir=str(tmp_path / "out"))
    assert accepted.config.data.template_time is not None, "all instances tell templates the same time"


@pytest.mark.parametrize("override", ["lora.path=somewhere", "lora={rank: 4}", "model.path=somewhere"])
def test_settings_that_name_other_weights_than_the_model_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=f"^{override.partition('=')[0]}: .*remove this"):
        accept_evaluation(str(MODEL), "quickstart", overrides=[override], ranks=1, run_dir=None)


def test_a_run_without_an_export_says_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    shutil.copy(Path(configs.__path__[0]) / "quickstart.yaml", run / "config.yaml")
    done = CliRunner().invoke(main, ["evaluate", str(run)])
    assert done.exit_code == 2
    assert str(run) in done.output and len(done.output.strip().splitlines()) == 1
    assert "MODEL: " in done.output and "--resume" not in done.output


def test_another_runs_directory_is_refused_without_a_way_to_continue_it(tmp_path: Path) -> None:
    shutil.copy(Path(configs.__path__[0]) / "quickstart.yaml", tmp_path / "config.yaml")
    (tmp_path / "logs").mkdir()
    with pytest.raises(ConfigError, match=r"already holds a run \(config.yaml\); choose another --run-dir$"):
        accept_evaluation(str(MODEL), "quickstart", overrides=[], ranks=1, run_dir=str(tmp_path))


def test_all_of_a_model_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    model = Path(shutil.copytree(MODEL, tmp_path / "model"))
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model.path: .*model"):
        accept_evaluation(str(model), "quickstart", overrides=[], ranks=1, run_dir=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_model_that_its_devices_cannot_hold_is_refused(tmp_path: Path) -> None:
    small = ["launcher.device_memory_gb=0.001", "weightsync.path=broadcast"]  # without a trainer it has no buckets
    with pytest.raises(ConfigError, match=r"^launcher.device_memory_gb: a rank of evaluate needs about 1.01 GB = "):
        accept_evaluation(str(MODEL), "quickstart", overrides=small, ranks=1, run_dir=str(tmp_path / "out"))


def test_a_run_whose_evaluators_took_turns_is_placed_without_the_other_roles(tmp_path: Path) -> None:
    here = Path(configs.__path__[0])
    (tmp_path / "quickstart").symlink_to(here / "quickstart")
    values = yaml.safe_load((here / "quickstart.yaml").read_text())
    config = tmp_path / "turns.yaml"
    config.write_text(yaml.safe_dump({**values, "roles": {"rollout+actor+evaluate": 2, "ref": 1}}))
    model = Path(shutil.copytree(MODEL, tmp_path / "model"))
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model.path: "):  # what is checked after the placement
        accept_evaluation(str(model), str(config), overrides=[], ranks=2, run_dir=str(tmp_path / "out"))
