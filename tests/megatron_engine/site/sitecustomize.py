"""Python imports this at the start of every process of the run under test: the CPU shim comes just before the engine.

Only the actor imports `workers.engines.megatron.engine`; processes that run transformers' models stay as they are.
The launcher is told that megatron computes on a CPU.
"""

import importlib.abc
import sys
from pathlib import Path
from typing import Any


class _BeforeMegatron(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "workers.engines.megatron.engine":
            sys.path.append(str(Path(__file__).parent.parent))
            import cpu_shim

            cpu_shim.install()
        if name == "launcher.request.request":
            import launcher.checks.models

            launcher.checks.models.ACCELERATED = ()


sys.meta_path.insert(0, _BeforeMegatron())
