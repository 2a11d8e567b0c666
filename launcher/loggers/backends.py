"""Loggers: what one is, and TensorBoard, Weights & Biases, SwanLab, MLflow and Trackio. Torch-free.

A class imports its library when it is constructed, in the logger's process, and passes the options of its `Config` to
it; None means the library's default.
"""

import html
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from asyncflow.errors import ConfigError
from asyncflow.extras import is_installed, pip_line
from asyncflow.run_files import LOGGERS
from asyncflow.settings import Settings, own_options
from workers.calls.user_function import check_function, load_function
from workers.settings.run import LOGGERS as NAMES
from workers.settings.run import LoggerConfig

# What a logger is: it takes the figures of a run to a place where people look at them.

Histogram = Mapping[float, int]
"""Value, rounded to two digits -> number of a step's responses that have it; ascending."""

COLUMNS = ("step", "group", "prompt", "response", "ground_truth", "reward", "response_tokens", "truncated")
"""Columns of a table of samples."""


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger is made for.

    Attributes:
        directory: of the run; loggers write local files into `loggers/` there.
        project: `name` of the configuration.
        config: the resolved configuration, as JSON has it.
        id: of the logger's own run that an earlier start began; "": none.
    """

    directory: Path
    project: str
    config: Mapping[str, Any]
    id: str = ""


class Logger:
    """Made in a process of its own as `Class(run, **options)`; an exception ends only that process.

    A `Config` of the class, derived from `asyncflow.settings.Settings`, checks the options before a run starts.

    Attributes:
        id: of the logger's own run; the next start gets it as `LoggedRun.id`.
    """

    id: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the figures of a step, or those of an evaluation (`evaluation/...`) of an earlier step's weights."""
        raise NotImplementedError

    def show(self, step: int, rows: Sequence[Mapping[str, Any]], histograms: Mapping[str, Histogram]) -> None:
        """Take samples (`COLUMNS`) up to the last logged step, and that step's histograms. Called once a minute."""

    def rewind(self, step: int) -> bool:
        """Forget this step and later ones, since the run repeats them. False: they stay, and are not logged again."""
        return False

    def close(self) -> None:
        """Send what is left."""


TABLE = "shown_samples"
"""Name of the table of samples; `samples` is already a figure."""


class TensorBoard(Logger):
    """TensorBoard's event files."""

    # Uses the package `tensorboard` itself: the writers of torch and tensorboardX import torch, and write an event per
    # figure instead of one per step.

    id = "events"

    class Config(Settings):
        """Options of the event files."""

        log_dir: str | None = None

    def __init__(self, run: LoggedRun, *, log_dir: str | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._session, self._summary = Event, SessionLog, Summary
        self._writer = EventFileWriter(log_dir or str(run.directory / LOGGERS / "tensorboard"), flush_secs=10)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add_event(step, summary=self._summary(value=values))

    def show(self, step: int, rows: Sequence[Mapping[str, Any]], histograms: Mapping[str, Histogram]) -> None:
        import numpy
        from tensorboard.plugins.histogram.summary_v2 import histogram_pb
        from tensorboard.plugins.text.summary_v2 import text_pb

        for name, counts in histograms.items():
            self._add_event(step, summary=histogram_pb(name, numpy.repeat([*counts], [*counts.values()])))
        lines = [COLUMNS, ["-"] * len(COLUMNS), *_cells(rows)]
        text = "\n".join("|".join(html.escape(str(cell)).replace("|", "&#124;") for cell in line) for line in lines)
        self._add_event(step, summary=text_pb(TABLE, text))

    def rewind(self, step: int) -> bool:
        """Make TensorBoard drop what it has read of this step and later ones."""
        self._add_event(step, session_log=self._session(status=self._session.START))
        return True

    def close(self) -> None:
        self._writer.close()

    def _add_event(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._event(step=step, wall_time=time.time(), **what))


class _InitOptions(Settings):
    """Options that all three `init` functions have."""

    project: str | None = None
    name: str | None = None
    group: str | None = None


class _InitLogFinish(Logger):
    """Common part of wandb, SwanLab and Trackio."""

    def __init__(self, library: Any, run: LoggedRun, arguments: Mapping[str, Any]) -> None:
        common = {"project": run.project, "name": run.directory.name, "config": dict(run.config), "resume": "allow"}
        given = {name: value for name, value in arguments.items() if value is not None}
        self._library, self._run = library, library.init(**{**common, **given})
        self.id = str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def show(self, step: int, rows: Sequence[Mapping[str, Any]], histograms: Mapping[str, Histogram]) -> None:
        shown = {name: self._make_histogram([*counts], [*counts.values()]) for name, counts in histograms.items()}
        self._run.log({**shown, TABLE: self._make_table(rows)}, step=step)

    def close(self) -> None:
        self._run.finish()

    def _make_table(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        return self._library.Table(columns=list(COLUMNS), data=_cells(rows))

    def _make_histogram(self, values: list[float], counts: list[int]) -> Any:
        # A histogram has one edge more than it has counts.
        return self._library.Histogram(np_histogram=(counts, [*values, values[-1] + 1]))


class Wandb(_InitLogFinish):
    """Weights & Biases."""

    class Config(_InitOptions):
        """Options of `wandb.init`."""

        entity: str | None = None
        mode: Literal["online", "offline", "disabled", "shared"] | None = None
        notes: str | None = None
        tags: list[str] | None = None
        job_type: str | None = None
        dir: str | None = None
        save_code: bool | None = None
        settings: dict[str, Any] | None = None

    def __init__(
        self, run: LoggedRun, *, dir: str | None = None, settings: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        import wandb

        # The machine's own statistics would cost more than all of the run's figures.
        own = wandb.Settings(**{"x_disable_stats": True, "console": "off", "silent": True, **(settings or {})})
        arguments = {"id": run.id or None, "dir": dir or str(run.directory / LOGGERS), "settings": own, **options}
        super().__init__(wandb, run, arguments)
        self._run.define_metric("evaluation/*", step_metric="evaluation/step")
        self._newest = int(self._run.step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # wandb refuses steps behind its newest one. A late evaluation is logged there, with its own step as a figure.
        self._newest = max(step, self._newest)
        super().log(self._newest, metrics)


class SwanLab(_InitLogFinish):
    """SwanLab. Samples are texts, and histograms are bar charts."""

    class Config(_InitOptions):
        """Options of `swanlab.init`."""

        workspace: str | None = None
        mode: Literal["disabled", "online", "local", "offline"] | None = None
        description: str | None = None
        tags: list[str] | None = None
        job_type: str | None = None
        public: bool | None = None
        color: str | None = None
        log_dir: str | None = None

    def __init__(self, run: LoggedRun, *, log_dir: str | None = None, **options: Any) -> None:
        import swanlab

        directory = run.directory / LOGGERS / "swanlab"
        directory.mkdir(exist_ok=True)
        super().__init__(swanlab, run, {"id": run.id or None, "log_dir": log_dir or str(directory), **options})

    def _make_table(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        texts = [(f"{row['prompt']}\n\n{row['response']}", f"reward {row['reward']}") for row in rows]
        return [self._library.Text(text, caption=caption) for text, caption in texts]

    def _make_histogram(self, values: list[float], counts: list[int]) -> Any:
        bars = self._library.echarts.Bar()
        return bars.add_xaxis([f"{value:g}" for value in values]).add_yaxis("responses", counts)


class Trackio(_InitLogFinish):
    """Trackio, which identifies a run by its name."""

    class Config(_InitOptions):
        """Options of `trackio.init`."""

        space_id: str | None = None
        server_url: str | None = None
        dataset_id: str | None = None
        bucket_id: str | None = None
        private: bool | None = None
        embed: bool = False
        auto_log_gpu: bool | None = None
        gpu_log_interval: float | None = None
        auto_log_cpu: bool | None = None
        cpu_log_interval: float | None = None
        webhook_url: str | None = None
        webhook_min_level: str | None = None

    def __init__(self, run: LoggedRun, *, name: str | None = None, **options: Any) -> None:
        import trackio

        super().__init__(trackio, run, {"name": run.id or name, **options})
        self.id = str(self._run.name)


class MLflow(Logger):
    """MLflow, on a server (`tracking_uri`, else MLFLOW_TRACKING_URI), or else in files of the run."""

    class Config(Settings):
        """Where figures go, and under which experiment."""

        tracking_uri: str | None = None
        experiment: str | None = None

    def __init__(self, run: LoggedRun, *, tracking_uri: str | None = None, experiment: str | None = None) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # without a server there is no database either
        from mlflow import MlflowClient

        here = (run.directory / LOGGERS / "mlflow").as_uri()
        self._client = MlflowClient(tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or here)
        self.id = run.id
        if self.id:
            self._client.update_run(self.id, status="RUNNING")
            return
        known = self._client.get_experiment_by_name(experiment or run.project)
        number = known.experiment_id if known else self._client.create_experiment(experiment or run.project)
        self.id = str(self._client.create_run(number, run_name=run.directory.name).info.run_id)
        self._client.log_dict(self.id, dict(run.config), "config.yaml")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self.id, [Metric(name, value, now, step) for name, value in metrics.items()])

    def show(self, step: int, rows: Sequence[Mapping[str, Any]], histograms: Mapping[str, Histogram]) -> None:
        shown = {"columns": COLUMNS, "data": _cells(rows), "histograms": histograms}
        self._client.log_dict(self.id, shown, f"samples/step_{step:06}.json")

    def close(self) -> None:
        self._client.set_terminated(self.id)


def check_loggers(loggers: Sequence[LoggerConfig]) -> None:
    """Raise ConfigError for a name that is given twice, or for a library or module that is not installed."""
    names = [logger.name for logger in loggers]
    for number, name in enumerate(names):
        field = f"loggers.{number}.name"
        if name in names[:number]:
            raise ConfigError(f"{field}: {name} is given twice; give it once")
        if ":" in name:
            check_function(name, field=field)
        elif not is_installed(name):
            raise ConfigError(f"{field}: {name} is not installed here; {pip_line(name)}, or leave it out")


def make_logger(config: LoggerConfig, run: LoggedRun) -> Logger:
    """Return a logger. Call it in the logger's process only: it imports the library, or the user's module.

    Raises:
        ConfigError: the class rejects its options.
    """
    kind = load_function(NAMES.locate_class(config.name), field="loggers", arguments=None)
    options = own_options(kind, config.options, name=config.name, section="loggers.options", first=(run,))
    logger: Logger = kind(run, **options)
    return logger


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    return [[row.get(name) for name in COLUMNS] for row in rows]
