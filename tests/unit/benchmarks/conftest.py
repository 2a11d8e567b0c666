"""Benchmarks are not package: their parts are imported from their directory."""

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[3]
sys.path += [str(_ROOT), str(_ROOT / "benchmarks")]  # in this order: `weightsync` is the package, not the benchmark
