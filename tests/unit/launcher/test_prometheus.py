"""`asyncflow prometheus`: what it serves, and the dashboard that asks for it."""

import json
import re
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from asyncflow.job import GangSpec
from launcher.process.progress import Status
from launcher.run.status import RunStatus
from launcher.view.prometheus import DASHBOARD, run_samples, serve_figures
from launcher.view.run_reader import RunReader
from tests.support.logged_runs import append, make_run

STEP = {
    "step": 7, "lineage": 0, "reward_mean": 0.5, "accuracy": 0.25, "kl": 0.1, "entropy": 1.5, "grad_norm": 1.0,
    "rollout_log_prob_diff_mean": 0.001, "rollout_log_prob_diff_max": 0.01, "staleness_mean": 0.5, "staleness_max": 1,
    "staleness_bound": 2, "train_tokens_per_s": 100.0, "step_time_s": 2.0, "response_tokens_mean": 12.0,
    "truncated_fraction": 0.0, "idle_fraction": {"actor": 0.25, "rollout": 0.5}, "mismatch/age_1_k3": 0.5,
    "reward/format_mean": 0.75, "source/gsm8k/accuracy": 0.125, "outside/judge/wait": 3.0, "loss": None,
    "histograms": {"reward": {"1": 4}},
}  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A live run with everything that there is to serve."""
    run = make_run(tmp_path / 'r"un', "[]")
    append(run / "metrics.jsonl", {**STEP, "step": 6})
    append(run / "metrics.jsonl", STEP)
    append(run / "evaluation.jsonl", {"step": 5, "lineage": 0, "accuracy": 0.75})
    actor = GangSpec("actor", "actor", 0, 1, ("cpu",))
    tasks = [{"task": "actor", "controller": "controller-0", "waiting": 1, "ready": 2, "leased": 3, "acked": 4,
              "rows_per_s": 5.0}]  # fmt: skip
    room = {"live_rows": 6, "row_limit": 9, "live_bytes": 7, "waiting_puts": 0, "lost_rows": 0}
    status = RunStatus(
        run, 1.0, (actor,), {("actor", 0): Status("training", idle_s=0.5, version=6)}, [{**room, "tasks": tasks}]
    )
    monkeypatch.setattr("launcher.view.run_reader.is_live", lambda path: True)
    monkeypatch.setattr(RunStatus, "read", lambda path: status)
    return run


def served(run: Path) -> dict[str, float]:
    return {
        f"{name}{json.dumps(labels, sort_keys=True)}": value
        for name, _, labels, value in run_samples(RunReader(run, "a").state(), "a")
    }


def test_figures_of_the_newest_step_are_served_with_their_parts_as_labels(run_dir: Path) -> None:
    found = served(run_dir)
    for name, value in {
        'asyncflow_reward_mean{"run": "a"}': 0.5,
        'asyncflow_idle_fraction{"role": "rollout", "run": "a"}': 0.5,
        'asyncflow_mismatch{"age": "1", "figure": "k3", "run": "a"}': 0.5,
        'asyncflow_reward_part_mean{"part": "format", "run": "a"}': 0.75,
        'asyncflow_source{"figure": "accuracy", "run": "a", "source": "gsm8k"}': 0.125,
        'asyncflow_outside{"figure": "wait", "process": "judge", "run": "a"}': 3.0,
        'asyncflow_evaluation_accuracy{"run": "a"}': 0.75,
        'asyncflow_run_state{"run": "a", "state": "running"}': 1,
        'asyncflow_run_state{"run": "a", "state": "killed"}': 0,
        'asyncflow_run_paused{"run": "a"}': 0,
        'asyncflow_step{"run": "a"}': 7,
        'asyncflow_queue_rows{"run": "a", "state": "ready", "task": "actor"}': 2,
        'asyncflow_rank_idle_seconds{"rank": "actor/0", "role": "actor", "run": "a"}': 0.5,
    }.items():
        assert found[name] == value
    assert not any("loss" in name or "histograms" in name for name in found)
    assert all(re.fullmatch(r"asyncflow_[a-z0-9_]+\{.*", name) for name in found)


def test_the_dashboard_asks_for_what_is_served(run_dir: Path) -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    targets = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    asked = {name for expression in targets for name in re.findall(r"asyncflow_\w+", expression)}
    assert len(asked) > 20
    assert asked <= {name.partition("{")[0] for name in served(run_dir)}


def test_prometheus_gets_it_on_loopback(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    said: list[str] = []
    found: list[Any] = []

    # Instead of waiting for Ctrl-C.
    def ask(thread: threading.Thread, timeout: float | None = None) -> None:
        if said and not found:
            with urllib.request.urlopen(said[0].split()[1], timeout=10) as answer:
                found.extend(text_string_to_metric_families(answer.read().decode()))
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", ask)
    serve_figures([run_dir], host="127.0.0.1", port=0, say=said.append)
    assert said[0].startswith("serving http://127.0.0.1:")
    values = {(sample.name, sample.labels.get("run")): sample.value for family in found for sample in family.samples}
    assert values["asyncflow_reward_mean", 'r"un'] == 0.5
