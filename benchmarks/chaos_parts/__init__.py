"""Parts of `benchmarks/chaos.py`."""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # last, for tests.support: `weightsync` may be the benchmark

# PyTorch looks up the name of every peer of a TCPStore; a resolver that does not answer would cost 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else it warns of every such peer
