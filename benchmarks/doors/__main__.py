"""What the doors of a run cost, and what goes through them.

    python benchmarks/doors [--json [FILE]] [--only loggers,outside,feed,dry_run] [--steps 60]

`loggers`, some two minutes: a run of `sim` engines with steps of a second, with tensorboard and wandb (offline) and
beside it one without, from the tenth step on:

    logger_cpu       CPU time of the loggers' processes, and of those that they start (cores)
    logger_overhead  median time of a step, with loggers / without

`outside`, some two minutes: the quickstart with `rollout:0`, so that `examples/external_generator.py` generates all:

    external_generator_kills  how often it was killed, each time with prompts in hand
    skipped, twice            groups that were left out, or trained twice; exit_code: of the run

`feed`, half a minute: puts of 512 rows of 240 tokens; each is checked, appended and synced before it is answered:

    feed_rows_per_s        rows a second of a process that joined with `connect`, one put after the other
    feed_rows_per_s_local  of the process that keeps the feed, which does the same without a client
    feed_rows_share        the first by the second

`dry_run`, some twenty seconds on an idle machine; needs git and the repository's history:

    dry_run_s      median time of the quickstart's `--dry-run` (s); dry_run_before_s: of the first edition's
    dry_run_ratio  the first / the second
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the clone, for `benchmarks` and its packages

from benchmarks.doors import dry_run, feed, loggers, outside
from benchmarks.json_option import report

Part = Callable[[int], Mapping[str, float]]
"""Takes the number of steps of a run; returns figures by name."""
PARTS: Mapping[str, Part] = {
    "loggers": loggers.measure,
    "outside": outside.measure,
    "feed": feed.measure,
    "dry_run": dry_run.measure,
}


def _chosen(_: click.Context, __: click.Parameter, text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(PARTS):
        raise click.BadParameter(f"there is no part {' '.join(sorted(unknown))}; there are {' '.join(PARTS)}")
    return names


@click.command(help=__doc__)
@click.option("--json", "target", is_flag=False, flag_value="-", metavar="FILE", help="One JSON object; to FILE: too.")
@click.option("--only", default=",".join(PARTS), show_default=True, callback=_chosen, help="Parts.")
@click.option("--steps", type=click.IntRange(20), default=60, show_default=True, help="Of each run.")
def main(target: str | None, *, only: list[str], steps: int) -> None:
    """Measure and print."""
    figures: dict[str, Any] = {}
    for name in only:
        figures |= PARTS[name](steps)
    report(target, figures, "\n".join(f"{name:20} {value:10.4g}" for name, value in figures.items()))


if __name__ == "__main__":
    sys.exit(main())
