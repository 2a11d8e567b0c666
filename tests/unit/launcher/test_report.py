"""Curves from a run's files, and `asyncflow plot`."""

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

import pytest

from asyncflow.errors import ConfigError
from launcher.report.report import grouped_runs, mean_curve, plot, read_curves
from tests.support.logged_runs import add_steps, append, make_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = make_run(tmp_path / "<run>", "[]")
    add_steps(directory, 1, 2)
    add_steps(directory, 3, 3, reward=0.75)
    append(directory / "evaluation.jsonl", {"step": 2, "lineage": 0, "accuracy": 0.125})
    return directory


def test_curves_of_metrics_and_evaluations_go_by_step(run_dir: Path) -> None:
    curves = read_curves(run_dir)
    assert curves["reward_mean"] == {1: 0.5, 2: 0.5, 3: 0.75}
    assert curves["evaluation/accuracy"] == {2: 0.125}
    assert curves["idle_fraction/actor"] == dict.fromkeys((1, 2, 3), 0.25)
    assert "loss" not in curves, "null is not a number"


def test_runs_are_drawn_into_one_picture(run_dir: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib: pip install -e '.[plot]'")
    other = make_run(tmp_path / "other", "[]")
    add_steps(other, 1, 2)
    output = tmp_path / "curves.svg"
    plot([run_dir, other, other], ["reward_mean", "evaluation/accuracy"], output)
    plot([run_dir, other], ["reward_mean"], output, steps=(1, 2), group="seed")
    with pytest.raises(ConfigError, match="--step: no run has reward_mean in steps 4 to 9; they have steps 1 to 3"):
        plot([run_dir], ["reward_mean"], output, steps=(4, 9))
    assert ElementTree.parse(output).getroot().tag.endswith("svg")
    with pytest.raises(ConfigError, match="--metric: no run has 'rewards_mean'; did you mean 'reward_mean'"):
        plot([run_dir], ["rewards_mean"], output)
    with pytest.raises(ConfigError, match=r"-o: .*curves.foo cannot be written .*name a .png"):
        plot([run_dir], ["reward_mean"], tmp_path / "curves.foo")
    with pytest.raises(ConfigError, match="g.png cannot be written: No such file or directory; name a file elsewhere"):
        plot([run_dir], ["reward_mean"], tmp_path / "none" / "g.png")


def test_runs_with_the_same_setting_are_one_curve_with_a_band(run_dir: Path, tmp_path: Path) -> None:
    others = [make_run(tmp_path / name, "[]") for name in ("b", "c")]
    (others[1] / "config.yaml").write_text("actor: {lr: 0.5}\n")
    groups = grouped_runs([run_dir, *others], "actor.lr")
    assert list(groups.values()) == [[run_dir, others[0]], [others[1]]]
    assert list(groups)[1] == "actor.lr 0.5, 1 run" and next(iter(groups)).endswith(", 2 runs")
    with pytest.raises(ConfigError, match=r"--group: no run has a setting 'actor.lrr'; did you mean 'actor.lr'\?"):
        grouped_runs([run_dir], "actor.lrr")
    with pytest.raises(ConfigError, match=r"--group: no run has a setting 'nosuch.key'; they differ in .*actor.lr"):
        grouped_runs([run_dir, others[1]], "nosuch.key")
    spread = 2**0.5
    assert mean_curve([{1: 1.0, 2: 4.0}, {1: 3.0}]) == (
        [1, 2], [2.0, 4.0], pytest.approx([2 - spread, 4.0]), pytest.approx([2 + spread, 4.0]),
    )  # fmt: skip


def test_without_matplotlib_one_line_says_what_to_do(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncflow.extras.is_installed", lambda name: False)
    with pytest.raises(ConfigError, match=r"matplotlib is not installed; pip install .*report.html"):
        plot([run_dir], ["reward_mean"], run_dir / "curves.png")
