"""`asyncflow prometheus`: the figures of runs at an address that Prometheus scrapes. Torch-free.

    asyncflow_reward_mean{run="quickstart-20261126-120000"} 0.71       each figure of metrics.jsonl, of the newest step
    asyncflow_idle_fraction{run="...", role="rollout"} 0.04            what differs within a figure is a label
    asyncflow_evaluation_accuracy, asyncflow_queue_rows, asyncflow_rank_idle_seconds, asyncflow_run_state, ...

It reads what the page of `asyncflow view` reads, by the same reader, when it is scraped; the runs notice nothing.
`dashboard.json` is a Grafana dashboard of these names. Numbers and the names of runs, roles and tasks are all that is
served: no text of a run.
"""

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncflow.errors import ConfigError
from asyncflow.job import PAUSED
from launcher.loggers.feed import HISTOGRAMS
from launcher.run.several_runs import check_runs, run_names
from launcher.view.run_reader import Have, RunReader

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

DASHBOARD = Path(__file__).parent / "dashboard.json"
_STATES = ("running", "done", "stopped", "failed", "killed", "unknown")
# Figures of metrics.jsonl in whose name a part is a label: pattern, name, labels of its groups.
_LABELLED = (
    (re.compile(r"idle_fraction/(.+)"), "idle_fraction", ("role",)),
    (re.compile(r"mismatch/age_(\d+)_(\w+)"), "mismatch", ("age", "figure")),
    (re.compile(r"reward/(.+)_mean"), "reward_part_mean", ("part",)),
    (re.compile(r"source/([^/]+)/(.+)"), "source", ("source", "figure")),
    (re.compile(r"outside/([^/]+)/(.+)"), "outside", ("process", "figure")),
)

Sample = tuple[str, str, dict[str, str], float]
"""Name, help, labels, value."""


class RunCollector:
    """A collector of `prometheus_client`: reads the runs anew for each scrape."""

    def __init__(self, run_dirs: Sequence[Path]) -> None:
        self._runs = [RunReader(path, name) for path, name in zip(run_dirs, run_names(run_dirs), strict=True)]
        self._lock = threading.Lock()  # a reader serves one thread at a time, and every scrape has its own

    def collect(self) -> "Iterator[GaugeMetricFamily]":
        from prometheus_client.core import GaugeMetricFamily

        families: dict[str, GaugeMetricFamily] = {}
        with self._lock:
            samples = [sample for run in self._runs for sample in run_samples(run.state(Have()), run.name)]
        for name, what, labels, value in samples:
            if name not in families:
                families[name] = GaugeMetricFamily(name, what)
            families[name].add_sample(name, labels, value)
        yield from families.values()

    def describe(self) -> "Sequence[GaugeMetricFamily]":
        return ()  # so that registering reads nothing


def run_samples(state: Mapping[str, Any], run: str) -> Iterator[Sample]:
    """Yield what a run's state (`RunReader.state`) is for Prometheus."""
    who = {"run": run}
    for each in _STATES:
        yield (
            "asyncflow_run_state",
            "1 for the state that the run is in",
            {**who, "state": each},
            state["state"] == each,
        )
    yield "asyncflow_step", "The last finished step", who, state["step"]
    if state["steps"] is not None:
        yield "asyncflow_steps", "The run's last step", who, state["steps"]
    for name, value in state["newest"].items():
        if value is not None and not name.startswith(HISTOGRAMS):
            yield _metric(name, value, who)
    evaluations = state["evaluations"] or ()
    for name, value in (evaluations[-1] if evaluations else {}).items():
        if isinstance(value, int | float):
            yield f"asyncflow_evaluation_{_plain_name(name)}", f"{name} of evaluation.jsonl", who, value
    if state["live"] is not None:
        yield from _live_samples(state["live"], who)


def _metric(name: str, value: float, who: Mapping[str, str]) -> Sample:
    for pattern, metric, labels in _LABELLED:
        if match := pattern.fullmatch(name):
            given = {**who, **dict(zip(labels, match.groups(), strict=True))}
            return f"asyncflow_{metric}", f"{metric} of metrics.jsonl", given, value
    return f"asyncflow_{_plain_name(name)}", f"{name} of metrics.jsonl, of the newest step", dict(who), value


def _plain_name(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _live_samples(live: Mapping[str, Any], who: Mapping[str, str]) -> Iterator[Sample]:
    paused = live["pause"].startswith(PAUSED)
    yield "asyncflow_run_paused", "1 while the run is paused and everything rests", dict(who), paused
    for rank in live["ranks"]:
        here = {**who, "rank": rank["name"], "role": re.sub(r"(-\d+)?/\d+$", "", rank["name"])}
        yield "asyncflow_rank_idle_seconds", "Time since the rank last made progress", here, rank["idle_s"]
        yield "asyncflow_rank_restarts", "How often the rank's gang was started again", here, rank["restarts"]
        if rank["version"] is not None:
            yield "asyncflow_rank_version", "Step of the weights that the rank holds", here, rank["version"]
    for task in live["queue"]:
        for state in ("waiting", "ready", "leased", "acked"):
            there = {**who, "task": task["task"], "state": state}
            yield "asyncflow_queue_rows", "Rows of a task by state", there, task[state]
        yield (
            "asyncflow_queue_rows_per_second",
            "Rows that a task finishes",
            {**who, "task": task["task"]},
            task["rows_per_s"],
        )
    for room in live["room"]:
        for name in ("live_rows", "live_bytes", "waiting_puts", "lost_rows"):
            yield f"asyncflow_queue_{name}", f"{name} of the queue", dict(who), room[name]
    yield "asyncflow_restores", "How often the run went back to a checkpoint", dict(who), live["restarts"]["restores"]


def serve_figures(run_dirs: Sequence[Path], *, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C, and say the address.

    Args:
        port: 0: any free one.

    Raises:
        ConfigError: one is no run's directory, or the address cannot be used.
    """
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    collector: Any = RunCollector([path.resolve() for path in check_runs(run_dirs)])
    registry.register(collector)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigError(f"--host, --port: {host}:{port} cannot be used ({error.strerror}); choose others") from error
    say(f"serving http://{host}:{server.server_port}/metrics")
    say(f"a Grafana dashboard: {DASHBOARD}")
    try:
        thread.join()
    except KeyboardInterrupt:
        server.shutdown()
    finally:
        server.server_close()
