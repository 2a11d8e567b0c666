"""The storm lives with the benchmark; its long form is `python benchmarks/transferqueue.py --only faults`."""

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
sys.path += [str(_ROOT), str(_ROOT / "benchmarks")]  # in this order: `weightsync` is the package, not the benchmark
