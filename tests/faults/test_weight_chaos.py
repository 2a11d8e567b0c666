"""kill -9 in the middle of weight transfers, each victim by each path once: everybody goes on, nothing is mixed."""

from benchmarks.weightsync.chaos import chaos


def test_everybody_goes_on_though_processes_die_in_the_middle_of_transfers() -> None:
    report = chaos(kills=6, seed=1, model_bytes=10_000_000, num_receivers=2, deadline_s=40.0)
    assert report.num_kills == report.survived, report.failures
    assert report.mixed_reads == 0, report.failures
    assert report.outputs > 0
    assert report.mid_transfer > 0
