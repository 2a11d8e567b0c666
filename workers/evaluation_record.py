"""`evaluation.jsonl`: one line per evaluated version. Several instances append to it, a line with one write.

Pure but for `evaluated_steps`, which reads what an earlier start of the run left.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weightsync.version import Version
from workers.engines.base import Generation
from workers.rewards.scorer import ScoredAnswer

FILE_NAME = "evaluation.jsonl"
_Z_95 = 1.959964
"""Standard normal quantile of 0.975."""


def wilson_interval(share: float, number: int) -> tuple[float, float]:
    """Return the 95 % score interval of a share of successes among `number` independent trials.

    Unlike the normal approximation it stays inside 0..1 and is of use for few trials and for shares of 0 and 1.
    Source: Wilson 1927, Probable inference, the law of succession, and statistical inference, JASA 22 (158), p. 209.
    """
    z2 = _Z_95**2 / number
    center = (share + z2 / 2) / (1 + z2)
    half = math.sqrt(share * (1 - share) * z2 + z2**2 / 4) / (1 + z2)
    return max(0.0, center - half), min(1.0, center + half)


def evaluation_line(
    answers: Sequence[Generation],
    scores: Sequence[ScoredAnswer],
    *,
    version: Version,
    num_prompts: int,
    time_s: float,
    seconds: float,
) -> dict[str, Any]:
    """Return the line of one evaluation.

    The interval of the accuracy counts prompts, not answers: several answers to one prompt are no independent trials.

    Args:
        answers, scores: of all prompts, equally many of each, in any order; at least one could be scored.
        version: of the weights that gave all of them.
        num_prompts: that were answered.
        time_s: since the command started.
        seconds: that the evaluation took.
    """
    num_samples, known = len(answers), [score for score in scores if not score.failure]
    accuracy = sum(score.correct for score in known) / len(known)
    low, high = wilson_interval(accuracy, max(1, num_prompts * len(known) // num_samples))
    return {
        "step": version.step,
        "lineage": version.lineage,
        "accuracy": round(accuracy, 6),
        "accuracy_low": round(low, 6),
        "accuracy_high": round(high, 6),
        "reward_mean": round(sum(score.reward for score in known) / len(known), 6),
        "reward_failures": num_samples - len(known),
        "response_tokens_mean": round(sum(answer.response_R.numel() for answer in answers) / num_samples, 3),
        "truncated_fraction": round(sum(answer.truncated for answer in answers) / num_samples, 6),
        "num_prompts": num_prompts,
        "num_samples": num_samples,
        "time_s": round(time_s, 3),
        "seconds": round(seconds, 4),
    }


def evaluated_steps(run_dir: Path) -> frozenset[int]:
    """Return the steps that a run's file has; the launcher has cut it to whole lines of the surviving lineage."""
    path = run_dir / FILE_NAME
    lines = path.read_text().splitlines() if path.is_file() else []
    return frozenset(int(json.loads(line)["step"]) for line in lines)
