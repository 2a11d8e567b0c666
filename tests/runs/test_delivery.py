"""An engine that takes only its first weights, in a whole run: it is caught, starts again, is caught, ends the run."""

import re
from pathlib import Path

import pytest

from . import command

LOSING = """
from workers.engines.hf.engine import HfEngine


class Losing(HfEngine):
    def __init__(self, setup):
        super().__init__(setup.model_dir, setup.run.model, sampling=setup.sampling, device=setup.device)

    def load_weights(self, weights, *, adopt=False):
        if not self._loaded:
            super().load_weights(weights, adopt=False)
"""


@pytest.mark.slow
def test_nothing_is_trained_of_weights_that_an_engine_did_not_take(tmp_path: Path) -> None:
    (tmp_path / "losing.py").write_text(LOSING)
    settings = ("--set", "rollout.engine=losing:Losing", "--set", "schedule.rollout_batch_size=8", "--steps", "20")
    failed = command.run("--run-dir", "run", "--roles", "rollout:1,actor:1", *settings, cwd=tmp_path)
    assert failed.returncode == 1, failed.stderr
    told = failed.stdout + failed.stderr
    assert re.search(r"rollout rank 0 failed: WeightsNotDelivered: weights of step \d+ were not delivered to ", told)
    last = re.search(
        r"WeightsNeverDelivered: weights of step (\d+) were not delivered to rollout-0/0: \d+ of \d+ tensors are not "
        r"what the trainer published .*; it has those of step (\d+)",
        failed.stderr.splitlines()[-1],
    )
    assert last is not None, failed.stderr
    lost, kept = map(int, last.groups())
    assert kept < lost
    trained = [line["versions"] for line in command.lines(tmp_path / "run" / "ledger.jsonl")]
    assert trained and max(newest for _, newest in trained) <= kept
