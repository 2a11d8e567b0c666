"""`asyncflow report` and `asyncflow plot`."""

import importlib.util
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from asyncflow.errors import ConfigError
from launcher.report.report import plot, polyline, read_curves, write_report
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


def test_a_curve_fills_its_picture() -> None:
    assert polyline({1: 2.0, 2: 1.0, 3: 3.0}) == "0.0,55.0 150.0,110.0 300.0,0.0"


def test_the_report_shows_curves_samples_and_settings_and_needs_no_other_file(run_dir: Path) -> None:
    page = write_report(run_dir).read_text()
    body = ElementTree.fromstring(page.partition("\n")[2])
    assert len(list(body.iter("polyline"))) == 1, "the figure that changes"
    assert "&lt;run&gt;: 3 steps" in page and "idle_fraction/actor 0.25" in page
    assert "has no timeline" in page and "max_staleness" in page and "1 | &lt;b&gt;" in page
    assert not re.search(r"https?:|src=|href=|@import|url\(", page.partition("<h2>Settings")[0])


def test_a_run_without_a_finished_step_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no finished step"):
        write_report(make_run(tmp_path / "run", "[]"))


def test_runs_are_drawn_into_one_picture(run_dir: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib: pip install -e '.[plot]'")
    other = make_run(tmp_path / "other", "[]")
    add_steps(other, 1, 2)
    output = tmp_path / "curves.svg"
    plot([run_dir, other, other], ["reward_mean", "evaluation/accuracy"], output)
    assert ElementTree.parse(output).getroot().tag.endswith("svg")
    with pytest.raises(ConfigError, match="--metric: no run has 'rewards_mean'; did you mean 'reward_mean'"):
        plot([run_dir], ["rewards_mean"], output)
    with pytest.raises(ConfigError, match=r"-o: .*curves.foo cannot be written"):
        plot([run_dir], ["reward_mean"], tmp_path / "curves.foo")


def test_without_matplotlib_one_line_says_what_to_do(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.report.report.is_installed", lambda name: False)
    with pytest.raises(ConfigError, match=r"matplotlib is not installed; pip install .*report.html"):
        plot([run_dir], ["reward_mean"], run_dir / "curves.png")
