"""Where users' modules are: after installed packages, beside the configuration, then in the working directory.

So neither of the two can hide an installed module. The variable tells children, too, where the configuration is.
"""

import importlib.util
import os
import sys
from pathlib import Path

_VARIABLE = "ASYNCFLOW_CODE_DIRECTORY"


def search_beside(code_directory: str | None) -> None:
    """Look for users' modules in the run's `code_directory`, too, in this process and in children that it starts."""
    os.environ[_VARIABLE] = code_directory or ""


def extend_path() -> list[Path]:
    """Have Python look there, after all that it knows; return the places, in their order."""
    named = os.environ.get(_VARIABLE)
    places = list(dict.fromkeys([Path(named), Path.cwd()] if named else [Path.cwd()]))
    sys.path.extend(str(place) for place in places if str(place) not in sys.path)
    return places


def hidden_module(module_name: str) -> str:
    """Say which file or directory of the user's has the name of an installed module, which comes first; or nothing."""
    top = module_name.partition(".")[0]
    spec = importlib.util.find_spec(top)
    if spec is None:
        return ""
    found = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else [])]
    for own in (place / name for place in extend_path() for name in (top, f"{top}.py")):
        if own.exists() and not any(Path(place) == own or own in Path(place).parents for place in found):
            return (
                f"{own} is hidden by the installed {top!r} ({found[0] if found else 'built in'}), which comes first; "
                f"rename yours, say to my_{top}"
            )
    return ""
