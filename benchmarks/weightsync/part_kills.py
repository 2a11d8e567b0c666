"""`kills` and `kills_survived`: the chaos, as figures."""

from benchmarks.transferqueue.part import Result
from benchmarks.weightsync.chaos import chaos
from benchmarks.weightsync.options import Options


def run(options: Options) -> Result:
    """Kill so many processes as the options say."""
    report = chaos(kills=options.kills, seed=0, model_bytes=min(50_000_000, options.model_bytes), say=options.say)
    options.say(f"kills: {report.num_kills}, survived {report.survived}, mixed reads {report.mixed_reads}")
    return Result({"kills": report.num_kills, "kills_survived": report.survived}, {"kills": report.summary()})
