"""Metrics that processes outside a run report: written by the client of `asyncflow.connect`, read by actor rank 0.

Each process has one key in the job store, with its latest metrics. A step's line of `metrics.jsonl` gets those that are
new since the previous line; reports that come faster than steps end are replaced, not summed.
"""

import json
import math
from collections.abc import Mapping

from asyncflow.errors import ConfigError
from asyncflow.sealed_store import SealedStore

_ANY = "outside/any_metrics"
_METRICS = "outside/metrics/"


def report_metrics(store: SealedStore, name: str, metrics: Mapping[str, float], *, stamp: str) -> None:
    """Write a process's metrics; `stamp` differs for each report. Raises ConfigError, and writes nothing, if a value is
    not a finite number."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics: {metrics!r} is not a dict; give names with a float or an int each")
    for metric, value in metrics.items():
        if not isinstance(metric, str) or isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"metric {metric!r}: {value!r} is not a number; give names with a float or an int each")
        try:
            finite = math.isfinite(value)
        except OverflowError:
            raise ConfigError(f"metric {metric}: an integer too large for a float; leave it out") from None
        if not finite:
            raise ConfigError(f"metric {metric}: {value} is not finite; leave it out")
    store.set(f"{_METRICS}{name}", json.dumps({"stamp": stamp, "metrics": dict(metrics)}))
    store.put(_ANY, "1")


class OutsideMetrics:
    """Reads new reports; one per recorder."""

    def __init__(self, store: SealedStore) -> None:
        self._store = store
        self._stamps: dict[str, str] = {}

    def read_new(self) -> dict[str, float]:
        """Return `outside/PROCESS/METRIC` -> value for what was reported since the last call."""
        if not self._store.check([_ANY]):
            return {}
        metrics: dict[str, float] = {}
        for name, text in self._store.read_below(_METRICS).items():
            report = json.loads(text)
            if self._stamps.get(name) != report["stamp"]:
                self._stamps[name] = report["stamp"]
                metrics |= {f"outside/{name}/{metric}": value for metric, value in report["metrics"].items()}
        return metrics
