"""The storm lives with the benchmark; its long form is `python benchmarks/transferqueue.py --only faults`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
