"""Benchmarks are no package: their parts are imported from their directory."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
