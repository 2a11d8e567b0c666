import json
import os
import shutil
import subprocess
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from asyncflow.checkpoint_files import CheckpointMeta, describe
from asyncflow.clock import HostClock
from asyncflow.errors import ConfigError
from asyncflow.job import Job
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.request.request import Request
from launcher.run.restore import (
    Checkpoint,
    check_resume,
    cut_lines,
    find_checkpoint,
    newest_checkpoint,
    next_lineage,
    rewind_run,
    rewind_to_start,
    unsaved_run,
)
from launcher.run.rundir import running_launcher
from workers.data.model_files import model_fingerprint, weights_fingerprint
from workers.data.task_source import data_identity
from workers.data.tokenizer import tokenizer_files
from workers.settings.run import RunConfig

SHARD = "dcp/__0_0.distcp"
EXPORT = "hf/model.safetensors"


def make_checkpoint(run_dir: Path, step: int, *, lineage: int = 0) -> Path:
    path = run_dir / "checkpoints" / f"step_{step:06d}"
    for name in (SHARD, EXPORT):
        (path / name).parent.mkdir(parents=True)
        (path / name).write_bytes(f"{name} of {step}".encode())
    (path / "config.yaml").write_text("steps: 1\n")
    meta = CheckpointMeta(
        step=step, lineage=lineage, model_fingerprint="f", data_hash="d", num_ranks=1, saved_at=0.0,
        files=describe(path, [SHARD, EXPORT, "config.yaml"]),
    )  # fmt: skip
    meta.write(path)
    return path


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def make_run(path: Path, *steps: int) -> Path:
    (path / "checkpoints").mkdir(parents=True)
    (path / "config.yaml").write_text("steps: 1\n")
    for step in steps:
        make_checkpoint(path, step)
    return path


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def write_steps(path: Path, *steps: int, torn: str = "") -> None:
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps) + torn)


def test_latest_is_the_newest_valid_checkpoint_and_the_others_are_told_of(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 10, 20)
    (make_checkpoint(run, 30) / "meta.json").unlink()
    (make_checkpoint(run, 40) / SHARD).unlink()
    (make_checkpoint(run, 50) / "meta.json").write_text('{"step": 50, "line')
    (make_checkpoint(run, 60) / "meta.json").write_text('{"step": 60}')
    flip_a_bit(make_checkpoint(run, 70) / SHARD)
    (make_checkpoint(run, 80) / SHARD).write_bytes(b"dcp/__0_0.dist")
    make_checkpoint(run, 90).rename(run / "checkpoints" / "step_000091")
    told: list[str] = []
    newest = newest_checkpoint(run, tell=told.append)
    assert newest is not None
    assert (newest.step, newest.lineage, newest.fingerprint, newest.data_hash) == (20, 0, "f", "d")
    reasons = [
        "is of step 90",
        "has 14 bytes, not 22",
        "was changed",
        "missing",
        "truncated",
        "missing",
        "never completed",
    ]
    assert len(told) == len(reasons)
    for line, reason in zip(told, reasons, strict=True):
        assert line.startswith("checkpoint passed over: ") and reason in line, line
    assert find_checkpoint("latest", run).step == 20


def test_damaged_checkpoint_that_is_named_is_refused_in_one_line(tmp_path: Path) -> None:
    path = make_checkpoint(make_run(tmp_path / "run", 10), 20)
    flip_a_bit(path / SHARD)
    with pytest.raises(
        ConfigError, match=r"^--resume: .*step_000020 is not a valid checkpoint: .* was changed .*; name"
    ):
        find_checkpoint(str(path), None)


def test_checkpoint_with_a_damaged_export_is_used_with_a_warning(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 10)
    flip_a_bit(run / "checkpoints" / "step_000010" / EXPORT)
    told: list[str] = []
    newest = newest_checkpoint(run, tell=told.append)
    assert newest is not None and newest.step == 10
    assert len(told) == 1 and "without its export" in told[0]


def test_run_without_a_valid_checkpoint_has_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 10)
    flip_a_bit(run / "checkpoints" / "step_000010" / SHARD)
    assert newest_checkpoint(run, tell=lambda _: None) is None
    write_steps(run / "ledger.jsonl", 1, 2, 3)
    rewind_to_start(run)
    assert steps_in(run / "ledger.jsonl") == []
    assert (run / "checkpoints/abandoned/step_000010-damaged/meta.json").is_file()


def test_latest_without_run_dir_means_the_run_started_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    older, newer = make_run(tmp_path / "runs/b", 30), make_run(tmp_path / "runs/a", 10)
    os.utime(older / "config.yaml", (1000, 1000))
    checkpoint = find_checkpoint("latest", None)
    assert (checkpoint.run_dir, checkpoint.step) == (newer, 10)


def test_checkpoint_on_another_disk_belongs_to_the_run_that_links_to_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 10, 20)
    disk = (run / "checkpoints").rename(tmp_path / "checkpoints")
    (run / "checkpoints").symlink_to(disk)
    (disk / "best").symlink_to(disk / "step_000010")
    for name in ("step_000010", "best"):
        found = find_checkpoint(str(run / "checkpoints" / name), None)
        assert (found.run_dir, found.path) == (run, run / "checkpoints" / "step_000010")


def test_directory_of_checkpoints_is_neither_a_run_nor_one_without_any(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 10)
    with pytest.raises(ConfigError, match=r"^--resume: .*name one of them, or their run$"):
        find_checkpoint(str(run / "checkpoints"), None)


def test_run_or_checkpoint_may_be_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 10, 20)
    assert find_checkpoint(str(run), None).step == 20
    assert find_checkpoint(str(run / "checkpoints/step_000010"), None).step == 10
    assert find_checkpoint(str(run / "checkpoints/step_000010"), run).run_dir == run


@pytest.mark.parametrize("target", ["latest", "missing", "empty", "empty/checkpoints/step_000005"])
def test_nothing_to_resume_is_refused(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "empty")
    (tmp_path / "empty/checkpoints/step_000005").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"^--resume: .*; (name|give)"):
        find_checkpoint(target, None)


def test_run_without_checkpoint_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for target, run_dir in (("latest", run), (str(run), None), ("latest", tmp_path / "missing")):
        with pytest.raises(ConfigError, match=r"^--resume: .* holds no complete checkpoint"):
            find_checkpoint(target, run_dir)


def test_run_that_saved_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs/a")
    assert [unsaved_run("latest", None), unsaved_run("latest", run), unsaved_run("runs/a", None)] == [run] * 3
    assert unsaved_run(str(run), tmp_path / "other") is None
    assert unsaved_run("latest", tmp_path / "missing") is None
    make_checkpoint(run, 10)
    assert unsaved_run("latest", run) is None


def test_checkpoint_is_no_run_that_saved_nothing(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(make_run(tmp_path / "run"), 10)
    assert unsaved_run(str(checkpoint), None) is None
    (checkpoint / "meta.json").unlink()
    assert unsaved_run(str(checkpoint), None) is None


def test_what_no_run_wrote_is_no_run_that_saved_nothing(tmp_path: Path) -> None:
    """A project's own configuration would be overwritten; a checkpoint set aside has one, too, whatever its name."""
    checkpoint = make_checkpoint(make_run(tmp_path / "run"), 10)
    (checkpoint / "meta.json").unlink()
    aside = checkpoint.rename(checkpoint.with_name("step_000010-damaged"))
    project = tmp_path / "project"
    project.mkdir()
    (project / "config.yaml").write_text("steps: 7\n")
    for path in (aside, project):
        assert unsaved_run(str(path), None) is None
        with pytest.raises(ConfigError, match="holds no complete checkpoint"):
            find_checkpoint(str(path), None)


def test_run_whose_checkpoints_are_away_does_not_start_over(tmp_path: Path) -> None:
    """`checkpoints/` may be a link to a disk that is not mounted now."""
    run = make_run(tmp_path / "run")
    (run / "checkpoints").rmdir()
    (run / "checkpoints").symlink_to(tmp_path / "scratch")
    assert unsaved_run("latest", run) is None


def test_run_that_was_killed_before_it_had_a_configuration_starts_over(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    assert unsaved_run("latest", tmp_path) == tmp_path


def test_run_whose_checkpoints_cannot_be_read_does_not_start_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 10)
    (run / "checkpoints/step_000010/meta.json").write_text("{")
    assert unsaved_run("latest", run) is None
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        find_checkpoint("latest", run)


def test_lineage_of_a_resumed_run_is_newer_than_any_that_was_saved_or_not(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 10)
    checkpoint = find_checkpoint("latest", run)
    assert next_lineage(run, checkpoint) == 1
    (run / "metrics.jsonl").write_text('{"step": 10, "lineage": 0}\n{"step": 11, "lineage": 2}\n')
    assert next_lineage(run, checkpoint) == 3, "steps of lineage 2 were shown, though not saved"
    (run / "job.json").write_text('{"lineage": 4}')
    assert next_lineage(run, checkpoint) == 5, "the launcher was killed before lineage 4 finished a step"


def test_rewind_to_the_start_leaves_no_step_and_takes_the_next_lineage_after_a_kill(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_steps(run / "metrics.jsonl", 1, 2)
    write_steps(run / "ledger.jsonl", 1, 1, 2, 2)
    write_steps(run / "evaluation.jsonl", 0, 2)
    rewind_to_start(run)
    assert steps_in(run / "metrics.jsonl") == steps_in(run / "ledger.jsonl") == []
    assert steps_in(run / "evaluation.jsonl") == [0]
    assert next_lineage(run, None) == 0
    make_job(run, os.getpid(), time.time())
    assert next_lineage(run, None) == 1


def test_another_run_dir_than_the_checkpoint_s_is_refused(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "run", 10), make_run(tmp_path / "other", 10)
    with pytest.raises(ConfigError, match=r"--run-dir: .*leave --run-dir out"):
        find_checkpoint(str(run), other)


def test_rewind_cuts_what_the_steps_wrote_and_sets_newer_checkpoints_aside(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 10, 20, 30)
    write_steps(run / "metrics.jsonl", *range(1, 34))
    write_steps(run / "ledger.jsonl", *(step for step in range(1, 34) for _ in range(2)), torn='{"step": 3')
    write_steps(run / "updates.jsonl", *(step for step in range(1, 35) for _ in range(2)))
    write_steps(run / "evaluation.jsonl", 0, 20, 10, 30)  # of two instances
    rewind_run(find_checkpoint(str(run / "checkpoints/step_000020"), None))
    assert steps_in(run / "updates.jsonl") == [step for step in range(1, 21) for _ in range(2)]
    assert steps_in(run / "metrics.jsonl") == list(range(1, 21))
    assert steps_in(run / "ledger.jsonl") == [step for step in range(1, 21) for _ in range(2)]
    assert steps_in(run / "evaluation.jsonl") == [0, 20, 10]
    assert (run / "checkpoints/abandoned/step_000030-before-lineage1/meta.json").is_file()
    assert find_checkpoint("latest", run).step == 20
    assert not list(run.glob("*.tmp"))


def test_copies_of_checkpoints_are_neither_taken_nor_set_aside(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 10, 20)
    for copy in ("step_000020_backup", "step_000020.old"):
        (run / "checkpoints/step_000020").rename(run / "checkpoints" / copy)
        make_checkpoint(run, 20)
    newest = find_checkpoint("latest", run)
    assert newest.path.name == "step_000020"
    rewind_run(find_checkpoint(str(run / "checkpoints/step_000010"), None))
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert left == ["abandoned", "step_000010", "step_000020.old", "step_000020_backup"]


def test_rewinding_twice_keeps_both_abandoned_checkpoints(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 10, 30)
    oldest = str(run / "checkpoints/step_000010")
    rewind_run(find_checkpoint(oldest, None))
    make_checkpoint(run, 30)
    rewind_run(find_checkpoint(oldest, None))
    abandoned = list((run / "checkpoints/abandoned").iterdir())
    assert len(abandoned) == 2
    with pytest.raises(ConfigError, match="is not in the checkpoints/ of a run"):
        find_checkpoint(str(abandoned[0]), None)


def test_torn_last_line_is_dropped_and_a_whole_one_without_newline_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2, torn='{"step"')
    cut_lines(path, 2)
    assert steps_in(path) == [1, 2]
    path.write_text('{"step": 1}\n{"step": 2}')
    cut_lines(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_broken_line_in_the_middle_is_refused_and_the_file_kept(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    text = '{"step": 1}\nnonsense\n{"step": 2}\n'
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"ledger.jsonl:2: not JSON"):
        cut_lines(path, 1)
    assert path.read_text() == text


def make_job(run_dir: Path, pid: int, started_at: float, *, host: str | None = None) -> None:
    run_dir.mkdir(exist_ok=True)
    clock = HostClock.from_wall_clock()
    clock = HostClock(host or clock.host, clock.offset_s)
    Job("127.0.0.1", 1, "00", pid, (), 0, "", 1, started_at, clock).save(run_dir)


def test_live_launcher_is_seen(tmp_path: Path) -> None:
    make_job(tmp_path, os.getpid(), time.time())
    assert running_launcher(tmp_path) == os.getpid()


def test_a_copy_of_a_live_run_is_not_live(tmp_path: Path) -> None:
    make_job(tmp_path / "run", os.getpid(), time.time())
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert running_launcher(tmp_path / "copy") is None
    (tmp_path / "run").rename(tmp_path / "moved")
    assert running_launcher(tmp_path / "moved") == os.getpid()


def test_launcher_that_is_gone_or_whose_process_id_was_reused_is_not_running(tmp_path: Path) -> None:
    assert running_launcher(tmp_path) is None
    ended = subprocess.Popen(["true"])
    ended.wait()
    make_job(tmp_path, ended.pid, time.time())
    assert running_launcher(tmp_path) is None
    make_job(tmp_path, os.getpid(), time.time() - 10 * 24 * 3600)
    assert running_launcher(tmp_path) is None


def test_process_id_of_another_host_is_not_looked_up_here(tmp_path: Path) -> None:
    make_job(tmp_path, os.getpid(), time.time(), host="another boot")
    assert running_launcher(tmp_path) is None


def sampled(*settings: str) -> RunConfig:
    return load_config(find_recipe("quickstart"), overrides=("data.sampler=own:Curriculum", *settings))


def resumable(tmp_path: Path, config: RunConfig) -> Checkpoint:
    """A checkpoint of step 10 of a run of this configuration."""
    run = make_run(tmp_path / "run", 10)
    config.save(run)
    config.save(run / "checkpoints" / "step_000010")
    for name in ("ledger.jsonl", "sampler.jsonl"):
        size = config.schedule.rollout_batch_size if name == "ledger.jsonl" else 1
        lines = [{"step": step, "group": step * size + k} for step in range(1, 11) for k in range(size)]
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    fingerprint = model_fingerprint(Path(config.model.path))
    return Checkpoint(run / "checkpoints/step_000010", 10, 0, fingerprint, data_identity(config.data))


def test_options_of_a_sampler_are_compared_as_a_whole(tmp_path: Path) -> None:
    before = sampled("data.sampler_options={width: 1}", "steps=20")
    checkpoint = resumable(tmp_path, before)
    check_resume(checkpoint, before)
    for options in ("{width: 2}", "{width: 1, height: 2}", "{}", "{height: 1}"):
        with pytest.raises(ConfigError, match=r"^data.sampler_options: .* not what the run began with \({'width': 1}"):
            check_resume(checkpoint, sampled(f"data.sampler_options={options}", "steps=20"))


def test_state_of_a_sampler_is_missed_before_anything_is_cut(tmp_path: Path) -> None:
    config = sampled("steps=20")
    checkpoint = resumable(tmp_path, config)
    (checkpoint.run_dir / "sampler.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"^data.sampler: its state is missing, .*sampler.jsonl; restore the file"):
        check_resume(checkpoint, config)


def test_rows_of_a_feed_are_missed_before_anything_is_cut(tmp_path: Path) -> None:
    config = load_config(find_recipe("quickstart"), overrides=("data.path=null", "data.source=feed", "steps=20"))
    checkpoint = resumable(tmp_path, config)
    with pytest.raises(ConfigError, match=r"^data.source: .*feed.jsonl is missing, and with it the rows; restore it"):
        check_resume(checkpoint, config)
    (checkpoint.run_dir / "feed.jsonl").touch()
    check_resume(checkpoint, config)


def test_a_changed_tokenizer_or_template_is_refused(tmp_path: Path) -> None:
    model = shutil.copytree(load_config(find_recipe("quickstart")).model.path, tmp_path / "model")
    config = load_config(find_recipe("quickstart"), overrides=("steps=20", f"model.path={model}"))
    checkpoint = replace(resumable(tmp_path, config), tokenizer_files=tokenizer_files(Path(model)))
    check_resume(checkpoint, config)
    Path(model, "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(
        ConfigError, match=r"^model.path: chat_template.jinja of .* is not what the run began with, and "
    ):
        check_resume(checkpoint, config)
    Path(model, "chat_template.jinja").unlink()
    settings = Path(model, "tokenizer_config.json")
    settings.write_text(settings.read_text() + "\n")
    with pytest.raises(ConfigError, match=r"^model.path: tokenizer_config.json of .* is not what the run began with"):
        check_resume(checkpoint, config)
    Path(model, "tokenizer.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"^model.path: tokenizer.json, tokenizer_config.json of .* are not what the "
    ):
        check_resume(checkpoint, config)
    for name in checkpoint.tokenizer_files:
        Path(model, name).unlink()
    with pytest.raises(ConfigError, match=r"^model.path: .*model no longer holds a tokenizer; put it back, or start a"):
        check_resume(checkpoint, config)


def test_a_run_goes_on_at_the_time_that_its_templates_were_told(tmp_path: Path) -> None:
    told = "2001-02-03T04:05:06"
    recipe = str(find_recipe("quickstart"))
    before = load_config(find_recipe("quickstart"), overrides=("steps=20", f"data.template_time={told}"))
    checkpoint = resumable(tmp_path, before)
    for config in (None, recipe):  # with the run's own configuration, and with the file that it began with
        loaded = (
            Request(config=config, resume=str(checkpoint.run_dir), steps=20)._load_config(checkpoint.run_dir).config
        )
        assert loaded.data.template_time == told
        check_resume(checkpoint, loaded)
    other = ("data.template_time=2001-02-04T00:00:00",)
    changed = Request(config=recipe, resume=str(checkpoint.run_dir), steps=20, overrides=other)
    with pytest.raises(ConfigError, match=r"^data.template_time: '2001-02-04T00:00:00' is not what the run began with"):
        check_resume(checkpoint, changed._load_config(checkpoint.run_dir).config)


def test_a_new_run_is_told_the_time_of_its_start() -> None:
    began = datetime.now().replace(microsecond=0)
    told = Request(config=str(find_recipe("quickstart")))._load_config(None).config.data.template_time
    assert told is not None
    assert began <= datetime.fromisoformat(told) <= datetime.now()


def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    before = load_config(find_recipe("quickstart"), overrides=("steps=20",))
    checkpoint = resumable(tmp_path, before)
    loaded = Request(resume=str(checkpoint.run_dir), steps=20)._load_config(checkpoint.run_dir).config
    assert loaded.data.template_time is not None
    check_resume(checkpoint, loaded)


ADAPTED = ("steps=20", "lora={rank: 4, targets: [q_proj]}")


def adapted(tmp_path: Path, *settings: str) -> RunConfig:
    """A configuration that trains an adapter on a copy of the recipe's model."""
    model = tmp_path / "model"
    if not model.exists():
        shutil.copytree(load_config(find_recipe("quickstart")).model.path, model)
    return load_config(find_recipe("quickstart"), overrides=(*ADAPTED, f"model.path={model}", *settings))


def resumable_adapter(tmp_path: Path) -> Checkpoint:
    config = adapted(tmp_path)
    return replace(resumable(tmp_path, config), weights_fingerprint=weights_fingerprint(Path(config.model.path)))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("lora.rank=8", r"^lora.rank: rank 8 is not what .*step_000010 was trained with \(4\)"),
        ("lora.alpha=8", r"^lora.alpha: scaling 2.0 is not what .* was trained with \(1.0\)"),
        ("lora.targets=all-linear", r"^lora.targets: targets 'all-linear' is not what .* \(\('q_proj',\)\)"),
        ("lora.modules_to_save=[norm]", r"^lora.modules_to_save: "),
        ("lora.path=.", r"^lora.path: .* would not be read, since .*step_000010 holds the adapter as it was trained"),
        ("lora=null", r"^lora: .*step_000010 holds an adapter alone; resume with lora as it was"),
    ],
)
def test_another_adapter_than_the_checkpoint_s_is_refused(tmp_path: Path, setting: str, message: str) -> None:
    checkpoint = resumable_adapter(tmp_path)
    check_resume(checkpoint, adapted(tmp_path, "lora.dropout=0.1", "lora.alpha=4"))
    with pytest.raises(ConfigError, match=message):
        check_resume(checkpoint, adapted(tmp_path, setting))


def test_adapter_is_not_resumed_on_a_base_with_other_values(tmp_path: Path) -> None:
    checkpoint = resumable_adapter(tmp_path)
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if "up_proj" in name)
    save_file({**weights, name: weights[name] + 1}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"^model.path: .* has other weights .* than the base of the adapter in .*"):
        check_resume(checkpoint, adapted(tmp_path))


def moved_weights(model_dir: Path) -> None:
    """Change every weight of a model a little, as training it further would."""
    file = model_dir / "model.safetensors"
    save_file({name: value * 1.01 for name, value in load_file(file).items()}, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("model.path", ("algorithm.kl_coef=0.1",)),
        ("ref.path", ("ref.path={other}",)),
        ("ref.path", ("algorithm={{name: distill}}", "ref.path={other}")),
        (
            "teacher.sources.hard.path",
            (
                "algorithm={{name: distill, teacher_coef: 1.0}}",
                "teacher={{path: {model}, sources: {{hard: {{path: {other}}}}}}}",
                "roles={{rollout: 1, actor: 1, teacher: 1}}",
            ),
        ),
        ("reward.model.path", ("reward.model={{path: {other}}}", "roles={{rollout: 1, actor: 1, reward: 1, ref: 1}}")),
    ],
)
def test_model_that_scores_is_not_resumed_with_other_weights_in_its_place(
    tmp_path: Path, key: str, settings: tuple[str, ...]
) -> None:
    names = {name: tmp_path / name for name in ("model", "other", "third")}
    for path in names.values():
        shutil.copytree(load_config(find_recipe("quickstart")).model.path, path)

    def configured(**paths: Path) -> RunConfig:
        given = [setting.format(**{**names, **paths}) for setting in settings]
        return load_config(find_recipe("quickstart"), overrides=("steps=20", f"model.path={names['model']}", *given))

    config = configured()
    weights = {path: weights_fingerprint(Path(path)) for path in config.scoring_models.values()}
    checkpoint = replace(resumable(tmp_path, config), scoring_weights=weights)
    check_resume(checkpoint, config)
    replaced = names["model" if key == "model.path" else "other"]
    moved_weights(replaced)
    with pytest.raises(ConfigError, match=rf"^{key}: {replaced} has other weights than the run began with, whose .*"):
        check_resume(checkpoint, config)
    check_resume(replace(checkpoint, scoring_weights={}), config)  # an earlier version wrote none down
    check_resume(checkpoint, configured(other=names["third"]) if key != "model.path" else without_reference(config))


def without_reference(config: RunConfig) -> RunConfig:
    """The run without its reference, whose weights then do not matter."""
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"kl_coef": 0.0})})


def test_adapter_is_not_resumed_from_whole_weights(tmp_path: Path) -> None:
    before = load_config(find_recipe("quickstart"), overrides=("steps=20",))
    checkpoint = resumable(tmp_path, before)
    with pytest.raises(ConfigError, match=r"^lora: .*step_000010 holds all weights; resume with lora as it was"):
        check_resume(checkpoint, load_config(find_recipe("quickstart"), overrides=ADAPTED))
