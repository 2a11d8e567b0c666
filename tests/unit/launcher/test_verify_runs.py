"""`asyncflow verify`: what it says of runs that crashed, run, hold dead-letter groups, or are not runs."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from made_run import MadeRun, fake_readers, make_run

from asyncflow.errors import ConfigError
from launcher.cli.commands import main
from launcher.verify import records as verify_records
from launcher.verify import verify_report as verify
from launcher.verify.records import read_records
from launcher.verify.steps import Check, named
from launcher.verify.verify_report import Report
from launcher.verify.verify_report import verify_records as judge


def report_of(run_dir: Path, **options: Any) -> Report:
    return judge(read_records(run_dir, fake_readers(**options)))


def check(report: Report, name: str) -> Check:
    return next(check for check in report.checks if check.name == name)


def unsaved(seed: int = 1) -> MadeRun:
    """A run whose last steps no checkpoint covers."""
    run = make_run(seed)
    run.checkpoints = {step: facts for step, facts in run.checkpoints.items() if step < run.completed - 1}
    return run


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_crash_between_ledger_and_metrics_leaves_a_sound_run(tmp_path: Path) -> None:
    run = unsaved()
    run.metrics.pop()
    report = report_of(run.write(tmp_path))
    assert report.ok, report.as_text()
    assert report.last_step == run.completed - 1
    assert "the run ended in it" in check(report, "steps").notes[0]


def test_crash_right_after_an_update_leaves_a_sound_run(tmp_path: Path) -> None:
    run = unsaved()
    next_update = {"lineage": 0, "step": run.completed + 1, "update": 1, "optimizer_updates": len(run.updates) + 1}
    run.updates.append(next_update)
    report = report_of(run.write(tmp_path))
    assert report.ok and report.last_step == run.completed


@pytest.mark.parametrize("name", ["ledger", "metrics", "updates"])
def test_last_line_that_a_crash_cut_is_no_damage(tmp_path: Path, name: str) -> None:
    run_dir = unsaved().write(tmp_path)
    append(run_dir / f"{name}.jsonl", '{"lineage": 0, "st')
    report = report_of(run_dir)
    assert report.ok
    assert f"{name}.jsonl: the last line is cut: a crash does that" in check(report, "files").notes[0]
    append(run_dir / f"{name}.jsonl", "\n")
    assert "not JSON" in check(report_of(run_dir), "files").problems[0]


def test_step_that_a_checkpoint_covers_must_be_there_in_full(tmp_path: Path) -> None:
    run = make_run(1)
    run.ledger.pop()
    report = report_of(run.write(tmp_path))
    assert [one.name for one in report.checks if not one.ok] == ["steps", "admission"]
    assert check(report, "steps").problems == (
        f"step {run.completed}: {run.schedule.rollout_batch_size - 1} groups, not {run.schedule.rollout_batch_size}",
    )


def test_live_run_is_judged_up_to_its_last_complete_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger is read after the metrics, and may be ahead by then."""
    monkeypatch.setattr(verify_records, "running_launcher", lambda run_dir: 1)
    run = make_run(3)
    steps = run.completed - 2
    run.checkpoints = {step: facts for step, facts in run.checkpoints.items() if step <= steps}
    run.metrics = run.metrics[:steps]
    run_dir = run.write(tmp_path)
    append(run_dir / "updates.jsonl", '{"lin')
    report = report_of(run_dir)
    assert report.ok, report.as_text()
    assert (report.live, report.last_step) == (True, steps)
    assert "(running)" in report.as_text().splitlines()[0]


def test_look_is_repeated_when_the_run_is_cut_back_meanwhile(tmp_path: Path) -> None:
    run = make_run(4)
    run_dir = run.write(tmp_path)
    readers = fake_readers()
    looks = []

    def cut_once(directory: Path) -> Mapping[int, str]:
        if not looks:
            beside = run_dir / "ledger.jsonl.tmp"
            beside.write_bytes((run_dir / "ledger.jsonl").read_bytes())
            beside.replace(run_dir / "ledger.jsonl")
        looks.append(directory)
        return {}

    records = read_records(run_dir, verify_records.Readers(readers.saved_updates, cut_once, readers.prompts))
    assert judge(records).ok
    assert len(looks) == 2 * len(run.checkpoints)


def test_group_among_dead_letters_is_named_with_its_replacement_and_what_became_of_it(tmp_path: Path) -> None:
    lines = [
        note
        for seed in range(30)
        for note in check(report_of(make_run(seed, starts=2).write(tmp_path / str(seed))), "dead letter").notes
    ]
    assert any("(after 5 deliveries to rewards), replaced by group" in line for line in lines)
    assert any("after a resume" in line for line in lines)


def test_responses_that_a_checkpoint_held_are_compared(tmp_path: Path) -> None:
    run = make_run(5)
    run.checkpoints = {1: (0, 1)}
    later = [line for line in run.ledger if line["step"] > 1 and "indices" in line]
    same, other = later[0], later[1]
    report = report_of(run.write(tmp_path), queue={same["group"]: same["token_hash"], other["group"]: "0" * 16})
    assert check(report, "tokens").notes == (
        "checkpoints hold responses of 2 groups that came later; 1 trained with them, generated again: "
        f"{other['group']}",
    )


def test_update_that_changed_no_weight_is_noted(tmp_path: Path) -> None:
    run = make_run(6)
    run.metrics[1]["grad_norm"] = None
    report = report_of(run.write(tmp_path))
    assert report.ok and "steps 2: a gradient was not finite" in check(report, "updates").notes[0]


def test_bound_is_the_one_that_the_step_had_when_a_resume_changed_it(tmp_path: Path) -> None:
    run = make_run(7)
    for line in run.metrics:
        line["staleness_bound"] = 0
    assert not check(report_of(run.write(tmp_path)), "staleness").ok


def test_run_without_a_step_is_sound(tmp_path: Path) -> None:
    run = make_run(1)
    run.ledger, run.metrics, run.updates, run.checkpoints = [], [], [], {}
    report = report_of(run.write(tmp_path))
    assert report.ok and report.as_text().endswith("ok: no step is complete yet")


def test_a_copied_checkpoint_is_none_of_the_run(tmp_path: Path) -> None:
    run_dir = make_run(1).write(tmp_path)
    newest = max((run_dir / "checkpoints").glob("step_*"))
    shutil.copytree(newest, newest.with_name(f"{newest.name}_backup"))
    assert report_of(run_dir).ok


def test_lost_file_is_found(tmp_path: Path) -> None:
    run_dir = make_run(1).write(tmp_path)
    (run_dir / "updates.jsonl").unlink()
    report = report_of(run_dir)
    assert {"files", "updates", "checkpoints"} <= {one.name for one in report.checks if not one.ok}


def test_command_reports_as_text_or_json_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "readers", fake_readers)
    run = make_run(8)
    run_dir = run.write(tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    result = CliRunner().invoke(main, ["verify", str(run_dir)])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].startswith(f"ok: each group of steps 1 to {run.completed} was trained once")
    run.ledger.append(run.ledger[-1])
    wrong_dir = run.write(tmp_path / "wrong")
    result = CliRunner().invoke(main, ["verify", str(wrong_dir), "--json"])
    assert result.exit_code == 1
    report = json.loads(result.output)
    assert (report["ok"], report["last_step"]) == (False, run.completed)
    once = next(one for one in report["checks"] if one["name"] == "once")
    last, number = run.ledger[-1], len(run.ledger)
    where = f"{wrong_dir}/ledger.jsonl:{number}: group {last['group']}"
    assert once["problems"] == [f"{where} is trained in step {last['step']}, but line {number - 1} has it already"]
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize("config", [None, "steps: [", "steps: many"])
def test_what_is_no_run_is_refused(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.yaml").write_text(config)
    result = CliRunner().invoke(main, ["verify", str(tmp_path)])
    assert result.exit_code == 2
    assert len(result.output.splitlines()) == 1
    with pytest.raises(ConfigError):
        read_records(tmp_path, fake_readers())


def test_directory_with_a_configuration_alone_is_not_called_sound(tmp_path: Path) -> None:
    """A checkpoint and a project have a config.yaml, too; nothing is wrong there, because nothing is there."""
    run_dir = make_run(1).write(tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000777"
    project = tmp_path / "project"
    for directory in (checkpoint, project):
        directory.mkdir(parents=True)
        shutil.copy(run_dir / "config.yaml", directory)
    (checkpoint / "meta.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"is a checkpoint, which proves nothing; name its run, {run_dir}$"):
        read_records(checkpoint, fake_readers())
    with pytest.raises(ConfigError, match="is not a run, it has neither checkpoints/ nor ledger.jsonl"):
        read_records(project, fake_readers())


def test_numbers_are_named_as_ranges_and_many_are_counted() -> None:
    assert named([7, 1, 2, 3]) == "1-3, 7"
    assert named(range(0, 60, 2)).endswith("... (30 in all)")


def test_checkpoint_with_a_changed_file_is_named(tmp_path: Path) -> None:
    run = make_run(1)
    run_dir = run.write(tmp_path)
    saved = next((run_dir / "checkpoints").iterdir()) / "dcp" / "updates"
    saved.write_text("9" * saved.stat().st_size)
    report = report_of(run_dir)
    assert [one.name for one in report.checks if not one.ok] == ["checkpoints"]
    assert "dcp/updates was changed (checksum" in check(report, "checkpoints").problems[0]


def test_a_check_that_failed_does_not_say_what_should_hold(tmp_path: Path) -> None:
    run = make_run(7)
    run.ledger.append(dict(run.ledger[-1]))
    report = report_of(run.write(tmp_path))
    once = check(report, "once")
    assert "none of them trained twice" in once.says
    assert once.as_lines()[0] == "WRONG once: 1 problem"
    assert "none of them trained twice" not in report.as_text() + report.as_json()
