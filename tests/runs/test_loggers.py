"""A whole run with a logger of the user's that fails once, and its resume."""

import json
from pathlib import Path

import pytest

from . import command

LOGGER = """
import json
from launcher.loggers.backends import Logger

class Notes(Logger):
    def __init__(self, run):
        self.id, self.resumed = "notes", bool(run.id)
        self._file = run.directory / "notes.jsonl"
    def log(self, step, metrics):
        if step == 2 and not self.resumed:
            raise ConnectionError("no route")
        with self._file.open("a") as file:
            file.write(json.dumps([step, metrics["reward_mean"]]) + "\\n")
"""


@pytest.mark.timeout(400)
def test_a_failing_logger_costs_a_warning_and_a_resumed_run_goes_on_with_it(tmp_path: Path) -> None:
    (tmp_path / "my_logger.py").write_text(LOGGER)
    small = ("--set", "schedule.rollout_batch_size=8", "--roles", "rollout:1,actor:2,ref:1")
    first = command.run(
        *("--run-dir", "run", "--steps", "3", "--set", "loggers=['my_logger:Notes']"), *small, cwd=tmp_path
    )
    assert first.returncode == 0, first.stderr
    assert "warning: logger my_logger:Notes: ConnectionError: no route; the run continues" in first.stdout
    second = command.run("--resume", "run", "--steps", "5", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert "warning" not in second.stdout
    run_dir = tmp_path / "run"
    metrics = command.lines(run_dir / "metrics.jsonl")
    noted = [json.loads(line) for line in (run_dir / "notes.jsonl").read_text().splitlines()]
    assert noted == [[line["step"], line["reward_mean"]] for line in metrics if line["step"] != 2], "2 was under way"
    for line in metrics:
        totals = {name: sum(counts.values()) for name, counts in line["histograms"].items()}
        assert totals == dict.fromkeys(("reward", "response_tokens", "staleness"), line["samples"])
    assert "5 steps" in (run_dir / "report.html").read_text()
