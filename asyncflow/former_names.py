"""Import paths that pages of 0.1 named, and where they lead now. Importing one warns."""

import importlib
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

FORMER = {
    "launcher.loggers.base": "launcher.loggers.backends",
    "weightsync.external": "weightsync.export",
    "workers.agents.environment": "workers.agents.api",
    "workers.agents.messages": "workers.agents.turns",
    "workers.algorithms.config": "workers.settings.algorithms",
    "workers.config": "workers.settings.run",
    "workers.engines.model_files": "workers.data.model_files",
    "workers.engines.setup": "workers.engines.base",
}


class FormerNames:
    """Finder and loader of a former module: a copy of today's namespace, so that classes are the same objects."""

    # Without the bases in importlib.abc, whose import costs every process some ten milliseconds.

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in FORMER else None  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Have the import system create the module as usual."""

    def exec_module(self, module: ModuleType) -> None:
        now = FORMER[module.__name__]
        warnings.warn(f"{module.__name__} is now {now}", DeprecationWarning, stacklevel=2)
        vars(module).update({k: v for k, v in vars(importlib.import_module(now)).items() if not k.startswith("__")})


if not any(isinstance(finder, FormerNames) for finder in sys.meta_path):
    sys.meta_path.append(FormerNames())
