"""The reference over several ranks on the CPU (Gloo), against one that a process has whole."""

from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support import shared_models


def run(**_: int) -> dict[str, float]:
    """Return the largest difference of a log-probability, over all layouts whose libraries are installed."""
    with TemporaryDirectory() as directory:
        root = Path(directory)
        shared_models.save_models(root)
        return {"sharded_ref_max_abs": max(_difference(root, case) for case in shared_models.available())}


def _difference(root: Path, case: str) -> float:
    wanted = shared_models.expected(root, case)
    return max(
        float((found[what] - log_probs_A).abs().max())
        for found in shared_models.run_case(root, case)
        for what, log_probs_A in wanted.items()
    )
