"""The packages behind an extra of this distribution, as a working pip command: no index has the distribution itself."""

import importlib.metadata
import importlib.util
import re
import shlex

from asyncflow.errors import ConfigError

DISTRIBUTION = "asyncflow-rl"


def pip_line(extra: str) -> str:
    """Return the command that installs an extra's packages, according to the installed metadata.

    Where AsyncFlow runs without being installed there is no metadata, and the command is the one for its clone.
    """
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return f"pip install -e '.[{extra}]' in AsyncFlow's clone"
    belongs = re.compile(rf"\bextra == ['\"]{re.escape(extra)}['\"]")
    split = (text.partition(";") for text in requirements)
    packages = [shlex.quote(package.strip()) for package, _, marker in split if belongs.search(marker)]
    assert packages, f"there is no extra {extra!r}"
    return f"pip install {' '.join(packages)}"


def check_installed(module: str, extra: str, prefix: str, otherwise: str) -> None:
    """Raise ConfigError, which says what to install, if a module does not exist.

    `prefix`: what needs it, e.g. `--view: `; `otherwise`: what else to do.
    """
    if not is_installed(module):
        raise ConfigError(f"{prefix}{module} is not installed; {pip_line(extra)}, {otherwise}")


def is_installed(module: str) -> bool:
    """Return whether a module exists; imports only its parent packages."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # a parent package is missing
        return False
