"""Part `faults`: the storm, as figures."""

from pathlib import Path

from benchmarks.transferqueue.part import Result, Settings
from benchmarks.transferqueue.storm import storm


def run(settings: Settings) -> Result:
    """Kill `settings.faults` times; the ledgers stay in the run's directory."""
    directory = Path(settings.directory) / "storm"
    directory.mkdir(exist_ok=True)
    report = storm(directory, kills=settings.faults, work_s=0.5, say=settings.say)
    verdict = report.verdict
    for example in verdict.examples:
        settings.say(f"faults: {example}")
    settings.say(
        f"faults: {sum(report.kills.values())} kills {dict(report.kills)}, {verdict.rows} rows: "
        f"{verdict.lost} lost, {report.untold} untold, {verdict.twice} twice, {verdict.corrupt} corrupt, "
        f"{report.miscounted} miscounted"
    )
    return Result(
        {
            "faults": sum(count for kind, count in report.kills.items() if kind != "gave up"),
            "rows_lost": verdict.lost,
            "rows_untold": report.untold + report.miscounted,
            "rows_twice": verdict.twice,
            "rows_corrupt": verdict.corrupt,
        },
        {"faults": report.summary()},
    )
