"""Parse and check `--roles rollout:8,actor:4,ref:2`: canonical role name -> number of ranks. Pure."""

import difflib
import re
from collections.abc import Collection, Mapping

from asyncflow.errors import ConfigError
from workers.dataflow import ALIASES, ROLES

REQUIRED = ("rollout", "actor")
EXAMPLE = "rollout:8,actor:4,ref:2"
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,9}")


def parse_roles(text: str, users: Collection[str] = ()) -> dict[str, int]:
    """Parse the option's value.

    Args:
        text: of the option.
        users: roles of users' tasks.

    Raises:
        ConfigError: not `role:ranks` pairs, a role given twice, or what `check_roles` refuses.
    """
    roles: dict[str, int] = {}
    for part in text.split(","):
        if not part.strip():
            raise ConfigError(f"--roles: {text!r} has an empty entry (a comma too many?); give e.g. --roles {EXAMPLE}")
        name, colon, count = (piece.strip() for piece in part.partition(":"))
        if not colon or not name:
            raise ConfigError(f"--roles: {part.strip()!r} is not role:ranks; give e.g. --roles {EXAMPLE}")
        role = _canonical(name, users)
        if role in roles:
            raise ConfigError(f"--roles: {role!r} is given twice; give it once, with all its ranks")
        if not _WHOLE_NUMBER.fullmatch(count):
            raise ConfigError(f"--roles: {name}:{count} is not a whole number of ranks; give e.g. {name}:2")
        roles[role] = int(count)
    return check_roles(roles, users)


def check_roles(roles: Mapping[str, int], users: Collection[str] = ()) -> dict[str, int]:
    """Return `roles` with canonical names, in the order of `ROLES`, then of `users`, the roles of users' tasks.

    Raises:
        ConfigError: unknown role (with the nearest name), less than one rank, a required role missing, or one role
            under two names.
    """
    counts: dict[str, int] = {}
    for name, count in roles.items():
        role = _canonical(name, users)
        if role in counts:
            raise ConfigError(f"roles: {role!r} is given twice (as {name!r} too); give it once")
        if count < 1:
            raise ConfigError(
                f"roles: {name}:{count} must have at least 1 rank; give {name}:1 or more, or leave it out"
            )
        counts[role] = count
    for role in REQUIRED:
        if role not in counts:
            raise ConfigError(f"roles: {role!r} is missing; add {role}:1 or more, e.g. --roles {EXAMPLE}")
    return {role: counts[role] for role in dict.fromkeys((*ROLES, *users)) if role in counts}


def _canonical(name: str, users: Collection[str]) -> str:
    role, known = ALIASES.get(name, name), (*ROLES, *users)
    if role not in known:
        near = difflib.get_close_matches(name, (*known, *ALIASES), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known roles: {' '.join(known)}"
        raise ConfigError(f"roles: {name!r} is not a role; {hint}")
    return role
