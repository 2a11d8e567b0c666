"""`report.html` of a run: curves, where the time went, samples and settings on one page that needs nothing else."""

from collections.abc import Callable, Mapping
from pathlib import Path

from jinja2 import Environment, PackageLoader

from asyncflow.errors import ConfigError
from asyncflow.run_files import CONFIG_FILE, REPORT_FILE
from launcher.report.curves import read_curves
from launcher.report.samples import samples_text
from launcher.timeline.run_timeline import RunTimeline, account_text

_FIRST = ("reward_mean", "accuracy", "evaluation/accuracy", "response_tokens_mean", "loss", "kl", "entropy")
_HIDDEN = frozenset({"step", "lineage", "time_s", "evaluation/step", "evaluation/lineage", "evaluation/time_s"})


def write_report(run_dir: Path) -> Path:
    """Write the report of a run, which may be live, and return its path.

    Raises:
        ConfigError: the run has no finished step, or the file cannot be written.
    """
    curves = read_curves(run_dir)
    names = [name for name in dict.fromkeys((*_FIRST, *sorted(curves))) if name in curves and name not in _HIDDEN]
    template = Environment(loader=PackageLoader("launcher.report", "."), autoescape=True)
    try:
        text = template.get_template("report.html.jinja").render(
            title=run_dir.name,
            steps=max(curves["step"]),
            curves={name: polyline(curves[name]) for name in names if len(set(curves[name].values())) > 1},
            ranges={name: f"{min(curves[name].values()):.4g} to {max(curves[name].values()):.4g}" for name in names},
            newest={name: list(curves[name].values())[-1] for name in names},
            account=_or_why_not(lambda: account_text(RunTimeline.read(run_dir).account())),
            samples=_or_why_not(lambda: samples_text(run_dir, step=None, worst=2, best=2, number=4)),
            settings=(run_dir / CONFIG_FILE).read_text(),
        )
        (run_dir / REPORT_FILE).write_text(text)
    except OSError as error:
        raise ConfigError(f"RUN: no report can be written: {error}; make {run_dir} readable and writable") from error
    return run_dir / REPORT_FILE


def polyline(curve: Mapping[int, float]) -> str:
    """Return the points of a curve that has two values, scaled to 300 x 110 pixels."""
    low, high, first = min(curve.values()), max(curve.values()), min(curve)
    across, up = 300 / (max(curve) - first), 110 / (high - low)
    return " ".join(f"{across * (step - first):.1f},{up * (high - value):.1f}" for step, value in curve.items())


def _or_why_not(text: Callable[[], str]) -> str:
    """Return a part of the page, or, of a run that does not have it, the line that says so."""
    try:
        return text()
    except ConfigError as error:
        return str(error)
