"""Plug-ins by name: what a setting that names a class or a function may say. Torch-free; imports no plug-in."""

# A setting has a built-in's name, `module:Class`, or a name that an installed package registered as an entry point:
#
#     [project.entry-points."asyncflow.rollout_engines"]
#     mine = "my_package.engine:MyEngine"
#
# Each kind of plug-in has one registry, beside its code; docs/outside.md has the table. A checked configuration holds
# only built-ins' names and `module:Class`.

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationInfo


@dataclass(frozen=True)
class Registry:
    """The names of one kind of plug-in."""

    group: str  # of entry points
    built_in: Mapping[str, str]  # name -> `module:Class`, which a worker imports
    form: str = "module:Class"  # how to name one's own, for messages

    def resolve_name(self, name: str) -> str:
        """Return `module:Class` for an entry point, and any other name unchanged. Pydantic calls it.

        Raises ValueError, which lists the known names, if there is no such name, or if two packages registered it.
        """
        if name in self.built_in or ":" in name:
            return name
        entries = importlib.metadata.entry_points(group=self.group)
        found = sorted({entry.value for entry in entries if entry.name == name})
        if not found:
            raise ValueError(self.explain_unknown(name))
        if len(found) > 1:
            raise ValueError(f"two packages registered it; name one of {' '.join(found)}")
        return found[0]

    def options(self, given: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Return the options of a plug-in, whose name is the field `engine` or `kind` before them; raises ValueError
        if it is built in: these have settings of their own. Pydantic calls it."""
        name = info.data.get("engine", info.data.get("kind"))
        if given and name in self.built_in:
            raise ValueError(f"only a class of your own takes options, not {name}; remove them")
        return given

    def explain_unknown(self, name: str) -> str:
        """Say what a name must be, and which one was probably meant."""
        known = [*self.built_in, *sorted(importlib.metadata.entry_points(group=self.group).names)]
        near = get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        names = f"one of {' '.join(known)} or " if known else ""
        return f"it must be {names}{self.form}{hint}"

    def locate_class(self, name: str) -> str:
        """Return `module:Class` of any name; raises ValueError like `resolve_name`."""
        name = self.resolve_name(name)
        return self.built_in.get(name, name)
