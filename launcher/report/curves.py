"""The curves of runs: read from their files, and drawn into one picture by matplotlib (extra `plot`). Torch-free."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from asyncflow.errors import ConfigError
from asyncflow.extras import is_installed, pip_line
from asyncflow.json_lines import LineTail
from asyncflow.run_files import EVALUATION_FILE, METRICS_FILE
from launcher.loggers.feed import figures

Curves = Mapping[str, Mapping[int, float]]
"""Name of a figure -> step -> value."""


def read_curves(run_dir: Path) -> Curves:
    """Read every figure of a run, which may be live; those of evaluations are `evaluation/...`.

    Raises:
        ConfigError: it has no finished step, or a line is not JSON.
    """
    curves: dict[str, dict[int, float]] = {}
    try:
        lines = [(line["step"], line) for line in LineTail(run_dir / METRICS_FILE).read()]
        evaluations = LineTail(run_dir / EVALUATION_FILE).read()
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ConfigError(f"RUN: {run_dir}: its metrics cannot be read ({error}); repair the file") from error
    for step, line in [*lines, *((each["step"], {"evaluation": each}) for each in evaluations)]:
        for name, value in figures(line).items():
            curves.setdefault(name, {})[step] = value
    if not lines:
        raise ConfigError(f"RUN: {run_dir} has no finished step; name the directory of a run that has begun")
    return curves


def plot(run_dirs: Sequence[Path], metrics: Sequence[str], output: Path) -> None:
    """Draw a panel for each metric, with a curve for each run, into a PNG, SVG or PDF file.

    Raises:
        ConfigError: matplotlib is not installed, a run has no such figure, or the file cannot be written.
    """
    if not is_installed("matplotlib"):
        raise ConfigError(f"plot: matplotlib is not installed; {pip_line('plot')}, or see each run's report.html")
    runs = {run_dir: read_curves(run_dir) for run_dir in run_dirs}
    known = sorted(set().union(*runs.values()))
    for metric in metrics:
        if metric not in known:
            near = get_close_matches(metric, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"they have {' '.join(known)}"
            raise ConfigError(f"--metric: no run has {metric!r}; {hint}")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2 * len(metrics)), layout="constrained")
    for number, metric in enumerate(metrics, start=1):
        axes = figure.add_subplot(len(metrics), 1, number, xlabel="step", ylabel=metric)
        for run_dir, curves in runs.items():
            if curve := curves.get(metric):
                axes.plot(list(curve), list(curve.values()), label=str(run_dir))
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        figure.savefig(output, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"-o: {output} cannot be written ({error}); name a .png, .svg or .pdf file") from error
