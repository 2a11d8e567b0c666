"""`report.html` of a run: curves, where the time went, samples and settings on one page that needs nothing else."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader

from asyncflow.errors import ConfigError
from asyncflow.run_files import CONFIG_FILE, REPORT_FILE
from launcher.cli.samples import samples_text
from launcher.report.curves import read_curves
from launcher.timeline.run_timeline import RunTimeline, account_text

_FIRST = (
    "reward_mean",
    "accuracy",
    "evaluation/accuracy",
    "response_tokens_mean",
    "loss",
    "kl",
    "entropy",
    "grad_norm",
)
_HIDDEN = frozenset({"step", "lineage", "time_s", "evaluation/step", "evaluation/lineage", "evaluation/time_s"})
_WIDTH, _HEIGHT = 300, 110
"""Of a curve (pixels)."""


@dataclass(frozen=True)
class Picture:
    """A curve.

    Attributes:
        points: of an SVG polyline.
        low, high, last: least, largest and newest value.
    """

    points: str
    low: float
    high: float
    last: float

    @staticmethod
    def of(curve: Mapping[int, float]) -> "Picture":
        """Scale a curve to its picture; it has two different values."""
        steps, values = list(curve), list(curve.values())
        low, high = min(values), max(values)
        across, up = _WIDTH / (max(steps) - min(steps)), _HEIGHT / (high - low)
        places = ((across * (step - min(steps)), up * (high - value)) for step, value in curve.items())
        return Picture(" ".join(f"{x:.1f},{y:.1f}" for x, y in places), low, high, values[-1])


def write_report(run_dir: Path) -> Path:
    """Write the report of a run, which may be live, and return its path.

    Raises:
        ConfigError: the run has no finished step, or the file cannot be written.
    """
    curves = {name: curve for name, curve in read_curves(run_dir).items() if name not in _HIDDEN}
    names = [name for name in dict.fromkeys((*_FIRST, *sorted(curves))) if name in curves]
    changing = {name: curves[name] for name in names if len(set(curves[name].values())) > 1}
    constant = {name: list(curves[name].values())[-1] for name in names if name not in changing}
    page = Environment(loader=PackageLoader("launcher.report", "."), autoescape=True).get_template("report.html.jinja")
    try:
        settings = (run_dir / CONFIG_FILE).read_text()
        text = page.render(
            title=run_dir.name,
            steps=max(curves["reward_mean"], default=0),
            curves={name: Picture.of(curve) for name, curve in changing.items()},
            constant=constant,
            account=_or_why_not(lambda: account_text(RunTimeline.read(run_dir).account())),
            samples=_or_why_not(lambda: samples_text(run_dir, step=None, worst=2, best=2, number=4)),
            settings=settings,
            width=_WIDTH,
            height=_HEIGHT,
        )
        path = run_dir / REPORT_FILE
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"RUN: no report can be written: {error}; make {run_dir} readable and writable") from error
    return path


def _or_why_not(text: Callable[[], str]) -> str:
    """Return a part of the page, or, of a run that does not have it, the line that says so."""
    try:
        return text()
    except ConfigError as error:
        return str(error)
