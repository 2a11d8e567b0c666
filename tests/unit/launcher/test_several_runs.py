"""`asyncflow ls`, `diff` and `logs` read what runs left."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from asyncflow.errors import ConfigError
from launcher.cli.commands import main
from launcher.run.several_runs import diff_text, find_logs, list_runs, list_text, log_lines
from launcher.run.status import RunEnd
from tests.support.logged_runs import append


def made_run(
    path: Path, *, steps: int = 3, code: int | None = 0, reward: float = 0.5, settings: Mapping[str, Any] | None = None
) -> Path:
    """Write a run's files; `code` None: it ended without a word."""
    (path / "logs" / "rollout").mkdir(parents=True)
    values = {"name": path.name, "steps": 4, "actor": {"lr": 1e-3}} | dict(settings or {})
    (path / "config.yaml").write_text(yaml.safe_dump(values))
    lines = [
        {"step": k, "lineage": 0, "time_s": 60.0 * k, "reward_mean": reward + k, "kl": 0.1} for k in range(1, steps + 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for rank in (0, 2, 10):
        (path / "logs" / "rollout" / f"{rank}.log").write_text(f"first of {rank}\nlast of {rank}\n")
    (path / "logs" / "launcher.log").write_text("the launcher\x1b[31m\n")
    if code is not None:
        RunEnd(path, ["over"], code, 0.0).write()
    return path


def test_list_says_how_each_run_ended_and_one_damaged_run_hides_no_other(tmp_path: Path) -> None:
    for name, code in (("a", 0), ("b", 75), ("c", 1), ("d", None)):
        made_run(tmp_path / name, code=code)
    broken = made_run(tmp_path / "e", steps=0)
    (broken / "config.yaml").write_text("steps: [1")
    (broken / "metrics.jsonl").write_text("no json\n")
    (tmp_path / "no-run").mkdir()
    odd = made_run(tmp_path / "f", steps=0)
    (odd / "metrics.jsonl").write_text('{"step": null, "reward_mean": "?"}\n{"step": 2, "reward_mean": 1}\n')
    runs = {run.path.name: run for run in list_runs(tmp_path)}
    assert {name: run.state for name, run in runs.items()} == {
        "a": "done", "b": "stopped", "c": "failed", "d": "killed", "e": "done", "f": "done",
    }  # fmt: skip
    assert (runs["a"].step, runs["a"].steps, runs["a"].reward) == (3, 4, 2.5)
    assert (runs["f"].step, runs["f"].reward) == (2, 1)
    assert (runs["e"].step, runs["e"].steps, runs["e"].reward) == (0, 0, None)
    assert runs["a"].problem == "" and runs["f"].problem == "metrics.jsonl:1: step None is not a whole number"
    text = list_text(list(runs.values()))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "f: left out is metrics.jsonl:1: step None" in text and "e: left out is metrics.jsonl:1: not JSON" in text


def test_a_run_whose_end_cannot_be_read_is_not_called_killed(tmp_path: Path) -> None:
    for name, text in (("a", "\x00{"), ("b", "[1, 2]"), ("c", '{"code": "x"}')):
        run = made_run(tmp_path / name, code=0)
        (run / "end.json").write_text(text)
        said = CliRunner().invoke(main, ["status", str(run)])
        assert "ended, but end.json cannot be read (" in said.output and "--resume" not in said.output
    assert {run.state for run in list_runs(tmp_path)} == {"unknown"}


@pytest.mark.parametrize("command", ["diff", "plot"])
def test_a_step_that_is_no_number_is_one_line(command: str, tmp_path: Path) -> None:
    if command == "plot":
        pytest.importorskip("matplotlib", reason="pip install -e '.[plot]'")
    run, other = made_run(tmp_path / "a"), made_run(tmp_path / "b")
    (run / "metrics.jsonl").write_text('{"step": 1, "reward_mean": 1}\n{"step": "2", "reward_mean": 1}\n')
    said = CliRunner().invoke(main, [command, str(run), str(other)])
    assert (said.exit_code, said.output.count("\n")) == (2, 1), said.output
    assert "metrics.jsonl:2: step '2' is not a whole number" in said.output


@pytest.mark.parametrize(
    ("pause", "state"), [("", "running"), ("pausing", "running"), ("paused after step 3", "paused")]
)
def test_a_run_that_rests_in_a_pause_is_not_called_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause: str, state: str
) -> None:
    run = made_run(tmp_path / "a", code=None)
    (run / "status.json").write_text(json.dumps({"pause": pause}))
    monkeypatch.setattr("launcher.run.several_runs.is_live", lambda path: True)
    assert [one.state for one in list_runs(tmp_path)] == [state]


def test_logs_are_of_the_newest_run_if_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_run(tmp_path / "runs" / "a")
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(main, ["logs", "-n", "1"])
    assert said.exit_code == 0 and "last of 2" in said.output
    said = CliRunner().invoke(main, ["logs", "rollout/2", "-n", "1"])
    assert (said.exit_code, said.output) == (0, "last of 2\n")
    assert CliRunner().invoke(main, ["logs", "runs/b"]).exit_code == 2
    said = CliRunner().invoke(main, ["logs", "nosuch"])
    assert said.exit_code == 2
    assert "nosuch does not exist, nor is it a role of the newest run: ROLE: 'nosuch' has no log in" in said.output
    monkeypatch.chdir(tmp_path / "runs")
    said = CliRunner().invoke(main, ["logs", "nosuch"])
    assert said.exit_code == 2 and "nosuch does not exist, and there is no run in" in said.output


@pytest.mark.parametrize(
    "command", ["status", "logs", "verify", "timeline", "plot", "view", "report", "samples", "diff", "trace"]
)
@pytest.mark.parametrize(
    ("name", "why"), [("none/such", "does not exist"), ("file.txt", "is a file"), ("empty", "has no config.yaml")]
)
def test_every_command_refuses_what_is_no_run_in_the_same_words(
    command: str, name: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "file.txt").write_text("")
    (tmp_path / "empty").mkdir()
    more = {"trace": ["1"], "diff": [str(tmp_path)]}.get(command, [])
    said = CliRunner().invoke(main, [command, str(tmp_path / name), *more])
    assert (said.exit_code, said.output.count("\n")) == (2, 1)
    assert f"{name} is not a run directory (it {why}); name one" in said.output


def test_no_key_of_a_configuration_commands_the_terminal(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / name, settings={"x\x1b[2J": name}) for name in ("a", "b")]
    assert "\x1b" not in diff_text(runs) and "x\\x1b[2J" in diff_text(runs)


def test_directory_without_runs_is_one_line(tmp_path: Path) -> None:
    said = CliRunner().invoke(main, ["ls", str(tmp_path)])
    assert (said.exit_code, said.output.count("\n")) == (2, 1)


def test_difference_has_the_settings_that_differ_and_figures_of_the_same_steps(tmp_path: Path) -> None:
    one = made_run(tmp_path / "one", steps=2)
    other = made_run(tmp_path / "other", steps=3, reward=1.5, settings={"actor": {"lr": 1e-4}})
    rows = {line.split()[0]: line.split()[1:] for line in diff_text([one, other]).splitlines() if line}
    assert rows["actor.lr"] == ["0.001", "0.0001"]
    assert "steps" in rows  # "steps finished": 2 and 3; the setting `steps` is the same
    assert rows["reward_mean"][0] == "2"  # steps 1 and 2, not 3
    assert rows["reward_mean"][3] == "3"
    assert "name" in rows


def test_time_of_a_resumed_run_is_that_of_all_its_starts(tmp_path: Path) -> None:
    resumed, whole = (made_run(tmp_path / name, steps=0) for name in ("resumed", "whole"))
    for step, resumed_at, at in ((1, 60.0, 60.0), (2, 120.0, 120.0), (3, 90.0, 180.0)):
        for run, time_s in ((resumed, resumed_at), (whole, at)):
            append(run / "metrics.jsonl", {"step": step, "time_s": time_s, "cross_entropy": 2.0})
    rows = [line.split() for line in diff_text([resumed, whole]).splitlines()]
    assert ["minutes", "to", "that", "step", "3.5", "3.0"] in rows
    assert ["cross_entropy", "2", "+-", "0", "2", "+-", "0"] in rows


def test_an_evaluation_has_no_steps(tmp_path: Path) -> None:
    made_run(tmp_path / "evaluate-a", steps=0, settings={"roles": {"evaluate": 2}})
    (run,) = list_runs(tmp_path)
    assert run.steps == 0 and list_text([run]).splitlines()[1].split()[:4] == ["evaluate-a", "done", "-", "-"]


def test_comparison_that_is_wider_than_the_terminal_has_a_block_for_each_setting_and_figure(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / f"run-with-a-long-name-{k}", reward=k) for k in range(6)]
    text = diff_text(runs)
    assert max(map(len, text.splitlines())) <= 80
    assert "\nreward_mean\n  run-with-a-long-name-0  2 +- 1\n  run-with-a-long-name-1  3 +- 1\n" in text
    assert len(diff_text(runs, width=400).splitlines()) < len(text.splitlines())


def test_runs_that_cannot_be_compared_are_one_line(tmp_path: Path) -> None:
    one = made_run(tmp_path / "one")
    for others in ((tmp_path / "absent",), (made_run(tmp_path / "empty", steps=0),)):
        with pytest.raises(ConfigError):
            diff_text([one, *others])
    said = CliRunner().invoke(main, ["diff", str(one)])
    assert (said.exit_code, said.output.count("\n")) == (2, 1)


def test_logs_are_chosen_by_role_and_rank_and_cannot_command_the_terminal(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    assert [log.label for log in find_logs(run, "rollout")] == ["rollout/0", "rollout/2", "rollout/10"]
    assert list(log_lines(find_logs(run, "rollout/2"), number=1)) == ["last of 2"]
    assert list(log_lines(find_logs(run, "launcher"), number=9)) == ["the launcher\\x1b[31m"]
    (run / "logs" / "logger-wandb.log").write_text("no network\n")
    assert [log.label for log in find_logs(run, "logger-wandb")] == ["logger-wandb"]
    for who in ("nobody", "../../etc", "rollout/7"):
        with pytest.raises(ConfigError, match=f"has no log in {run}"):
            find_logs(run, who)


def test_a_long_log_is_read_from_its_end(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    (log,) = find_logs(run, "rollout/0")
    log.path.write_text("\n".join(f"line {k}" for k in range(50_000)))
    log.skip_to_last(3)
    assert 0 < log.path.stat().st_size - log.position <= 64 * 1024
    for number in (0, 1, 3, 20_000, 60_000):
        lines = list(log_lines(find_logs(run, "rollout/0"), number=number))
        assert lines == [f"line {k}" for k in range(50_000)][max(0, 50_000 - number) :]


def test_following_prints_every_line_once_and_ends_with_the_run(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    (log,) = find_logs(run, "rollout/0")
    asked = threading.Event()
    goes_on = iter([True, True, False])

    def lives() -> bool:
        asked.set()
        with log.path.open("a") as file:
            file.write("half a li" if not log.partial else "ne\n")
        return next(goes_on)

    # The last words have no line's end.
    assert list(log_lines([log], number=0, follow=lives)) == ["half a line", "half a li"]
    assert asked.is_set()
    assert list(log_lines(find_logs(run, "rollout/0"), number=2)) == ["half a line", "half a li"]


def test_following_a_run_that_is_just_starting_finds_the_logs_that_come(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    goes_on = iter([True, False])

    def lives() -> bool:
        (run / "logs" / "actor").mkdir(exist_ok=True)
        (run / "logs" / "actor" / "0.log").write_text("hello\n")
        return next(goes_on)

    lines = log_lines(find_logs(run, None), number=0, follow=lives, find=lambda: find_logs(run, None))
    assert [line.split() for line in lines] == [["actor/0", "hello"]]


def test_log_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    (log,) = find_logs(made_run(tmp_path / "run"), "rollout/0")
    assert log.read_lines() == ["first of 0", "last of 0"]
    log.path.write_text("new\n")
    assert log.read_lines() == ["new"]
