"""TensorBoard, Weights & Biases, SwanLab, MLflow and Trackio, each behind `launcher.loggers.base.Logger`. Torch-free.

A class imports its library when it is made, in the logger's process. Its arguments are the logger's `options`; what it
does not name goes to the library's own `init`.
"""

import html
import os
import time
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from asyncflow.errors import ConfigError
from asyncflow.extras import pip_line
from asyncflow.run_files import LOGGERS
from launcher.checks.engine_libraries import is_installed
from launcher.loggers.base import COLUMNS, Histogram, LoggedRun, Logger
from workers.calls.user_function import check_function, load_function
from workers.config import LoggerConfig


class TensorBoard(Logger):
    """Event files in `loggers/tensorboard`. Written by the package `tensorboard` itself: the writers of torch and of
    tensorboardX import torch, and write an event for each figure instead of one for each step."""

    id = "events"

    def __init__(self, run: LoggedRun, *, log_dir: str | None = None) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(log_dir or str(run.directory / LOGGERS / "tensorboard"), flush_secs=10)

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        for name, counts in histograms.items():
            histogram = HistogramProto(
                min=min(counts),
                max=max(counts),
                num=sum(counts.values()),
                sum=sum(value * count for value, count in counts.items()),
                sum_squares=sum(value**2 * count for value, count in counts.items()),
                bucket_limit=list(counts),
                bucket=list(counts.values()),
            )
            values.append(Summary.Value(tag=f"histograms/{name}", histo=histogram))
        self._add(step, summary=Summary(value=values))

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        lines = [COLUMNS, ["-"] * len(COLUMNS), *_cells(rows)]
        text = "\n".join("|".join(html.escape(str(cell)).replace("|", "&#124;") for cell in line) for line in lines)
        self._add(step, summary=text_pb(TABLE, text.replace("\r", "")))

    def rewind(self, step: int) -> bool:
        """TensorBoard drops what it read of this step and later ones."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._add(step, session_log=SessionLog(status=SessionLog.START))
        return True

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(step=step, wall_time=time.time(), **what))


class _InitLogFinish(Logger):
    """What wandb, swanlab and trackio have in common: `init`, `log` and `finish`; a step once logged stays."""

    def __init__(self, library: Any, run: LoggedRun, arguments: Mapping[str, Any]) -> None:
        common = {"project": run.project, "name": run.name, "config": dict(run.config), "resume": "allow"}
        self._library = library
        self._run = library.init(**{**common, **arguments})
        self.id = str(getattr(self._run, "id", "")) or run.name

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        drawn = {f"histograms/{name}": self._histogram(counts) for name, counts in histograms.items()}
        self._run.log({**metrics, **drawn}, step=step)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._run.log({TABLE: self._library.Table(columns=list(COLUMNS), data=_cells(rows))}, step=step)

    def close(self) -> None:
        self._run.finish()

    def _histogram(self, counts: Histogram) -> Any:
        values = list(counts)
        last_bin = values[-1] - values[-2] if len(values) > 1 else 1.0
        return self._library.Histogram(np_histogram=(list(counts.values()), [*values, values[-1] + last_bin]))


class Wandb(_InitLogFinish):
    """Weights & Biases; files in `loggers/wandb`."""

    def __init__(self, run: LoggedRun, **options: Any) -> None:
        import wandb

        # The machine's own figures cost more than all of ours, and the launcher's output is not this process's.
        quiet = wandb.Settings(x_disable_stats=True, console="off", silent=True)
        arguments = {"id": run.id or None, "dir": str(run.directory / LOGGERS), "settings": quiet, **options}
        super().__init__(wandb, run, arguments)
        self._run.define_metric("evaluation/*", step_metric="evaluation/step")
        self._newest = 0

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        """Wandb takes no step behind the newest, so a late evaluation goes to that, with its own step."""
        self._newest = max(step, self._newest)
        super().log(self._newest, metrics, histograms)


class SwanLab(_InitLogFinish):
    """SwanLab; files in `loggers/swanlab`."""

    def __init__(self, run: LoggedRun, **options: Any) -> None:
        import swanlab

        directory = run.directory / LOGGERS / "swanlab"
        directory.mkdir(parents=True, exist_ok=True)
        self._histograms: Mapping[str, Histogram] = {}
        super().__init__(swanlab, run, {"id": run.id or None, "log_dir": str(directory), **options})

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        """A histogram is a chart in a file of its own: those of a step with a table are drawn."""
        self._histograms = histograms or self._histograms
        super().log(step, metrics, {})

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """As texts: it has no tables."""
        texts = [
            self._library.Text(f"{row['prompt']}\n\n{row['response']}", caption=f"reward {row['reward']}")
            for row in rows
        ]
        bars = {f"histograms/{name}": self._bars(counts) for name, counts in self._histograms.items()}
        self._run.log({TABLE: texts, **bars}, step=step)

    def _bars(self, counts: Histogram) -> Any:
        bars = self._library.echarts.Bar()
        bars.add_xaxis([f"{value:g}" for value in counts])
        bars.add_yaxis("responses", list(counts.values()))
        return bars


class Trackio(_InitLogFinish):
    """Trackio, which finds a run by its name; a local dashboard, or a Space."""

    def __init__(self, run: LoggedRun, **options: Any) -> None:
        import trackio

        super().__init__(trackio, run, {"name": run.id or run.name, "embed": False, **options})
        self.id = str(self._run.name)


class MLflow(Logger):
    """MLflow: a server's (`tracking_uri`, or the environment's MLFLOW_TRACKING_URI), else files in `loggers/mlflow`."""

    def __init__(self, run: LoggedRun, *, tracking_uri: str | None = None, experiment: str | None = None) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # without a server there is no database either
        from mlflow import MlflowClient

        here = (run.directory / LOGGERS / "mlflow").as_uri()
        self._client = MlflowClient(tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or here)
        self._histograms: Mapping[str, Histogram] = {}
        if run.id:
            self.id = run.id
            self._client.update_run(self.id, status="RUNNING")
            return
        name = experiment or run.project
        known = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if known is None else known.experiment_id
        self.id = str(self._client.create_run(number, run_name=run.name).info.run_id)
        self._client.log_dict(self.id, dict(run.config), "config.yaml")

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        """MLflow has no histograms: they are in the files of samples."""
        from mlflow.entities import Metric

        self._histograms = histograms or self._histograms
        now = int(time.time() * 1000)
        self._client.log_batch(self.id, [Metric(name, value, now, step) for name, value in metrics.items()])

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        table = {"columns": list(COLUMNS), "data": _cells(rows), "histograms": self._histograms}
        self._client.log_dict(self.id, table, f"samples/step_{step:06}.json")

    def close(self) -> None:
        self._client.set_terminated(self.id)


TABLE = "shown_samples"
"""`samples` is a figure already."""
BUILT_IN = {"tensorboard": TensorBoard, "wandb": Wandb, "swanlab": SwanLab, "mlflow": MLflow, "trackio": Trackio}
"""Name, which is that of its library and of its extra, too -> class."""


def check_loggers(loggers: Sequence[LoggerConfig]) -> None:
    """Check that this machine has what the loggers need, without importing it.

    Raises:
        ConfigError: an unknown name, one that is given twice, or a library or module that is not there.
    """
    names = [logger.name for logger in loggers]
    for number, name in enumerate(names):
        field = f"loggers.{number}.name"
        if name in names[:number]:
            raise ConfigError(f"{field}: {name} is given twice; give it once")
        if ":" in name:
            check_function(name, field=field)
        elif name not in BUILT_IN:
            near = get_close_matches(name, BUILT_IN, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(BUILT_IN)}, or module:Class"
            raise ConfigError(f"{field}: unknown logger {name!r}; {hint}")
        elif not is_installed(name):
            raise ConfigError(f"{field}: {name} is not installed here; {pip_line(name)}, or leave it out")


def make_logger(config: LoggerConfig, run: LoggedRun) -> Logger:
    """Return a logger; in its own process, since this imports its library, or the user's module."""
    made = BUILT_IN.get(config.name) or load_function(config.name, field="loggers", arguments=None)
    logger: Logger = made(run, **config.options)
    return logger


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    return [[row.get(name) for name in COLUMNS] for row in rows]
