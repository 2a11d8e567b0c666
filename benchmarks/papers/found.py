"""What an experiment found: a table, figures for `--json`, and a picture; how experiments take part in the command."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.intervals import mean_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Given:
    """What the command line asks for.

    Attributes:
        seeds: how many, from 0.
        steps: of each run; 0: the experiment's own number.
        directory: for runs; temporary.
        bounds: of staleness.
        units: of scaling, each with four instances.
        model: Hugging Face directory of SmolLM2-135M, for stability; None: the quickstart's model.
    """

    seeds: int
    steps: int
    directory: Path
    bounds: Sequence[int]
    units: Sequence[int]
    model: Path | None


@dataclass(frozen=True)
class Found:
    """The results of one experiment.

    Attributes:
        title: of table and picture.
        columns, rows: of the table, in Markdown.
        figures: by key.
        draw: draws the picture into an empty figure.
        size: of the picture (inches).
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    figures: Mapping[str, float]
    draw: Callable[["Figure"], None]
    size: tuple[float, float] = (13.0, 4.2)

    def table(self) -> str:
        """Return the table, and the figures below it."""
        figures = (f"{name:40} {value:10.4g}" for name, value in self.figures.items())
        return "\n".join([self.title, "", *markdown(self.columns, self.rows), "", *figures])

    def save(self, target: Path) -> None:
        """Draw into a file."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=self.size, layout="constrained")
        self.draw(figure)
        figure.suptitle(self.title, fontsize=10)
        figure.savefig(target, dpi=110)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    first, *rest = ("| " + " | ".join(cells) + " |" for cells in (columns, *rows))
    return [first, "|" + "---|" * len(columns), *rest]


def draw_band(axis: "Axes", x: Sequence[float], of_seeds: Sequence[Sequence[float]], color: str, label: str) -> None:
    """Draw the mean over seeds of a curve, and its 95 % interval."""
    means = [mean_of(values) for values in zip(*of_seeds, strict=True)]
    middle = np.array([each.value for each in means])
    axis.plot(x, middle, color=color, label=label, linewidth=1.4)
    if len(of_seeds) > 1:
        half = np.array([each.half_width for each in means])
        axis.fill_between(x, middle - half, middle + half, color=color, alpha=0.15, linewidth=0)
    axis.grid(alpha=0.25)


def draw_bars(axis: "Axes", places: Sequence[float], of_seeds: Sequence[Sequence[float]], **options: Any) -> None:
    """Draw a bar for each group of seeds, with its 95 % interval."""
    means = [mean_of(values) for values in of_seeds]
    halves = [each.half_width if len(of_seeds[0]) > 1 else 0.0 for each in means]
    bars = axis.bar(places, [each.value for each in means], yerr=halves, capsize=3, **options)
    axis.bar_label(bars, fmt="%.3g", fontsize=8, label_type="center")
