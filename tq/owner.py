"""What a consumer is called where its leases are known: its name, and which incarnation of it. Pure.

trainer@5ba7898b          others may have the same name at the same time
rollout-0/0@2.5ba7898b    the process is there once under its name, and this is its third start: what was there
                          before is gone, however that end may have gone unnoticed
"""

import secrets


def new_owner(name: str, attempt: int | None = None) -> str:
    """Return the name of a new incarnation.

    Args:
        name: of the process.
        attempt: counts its starts; None: others may have the same name.
    """
    incarnation = secrets.token_hex(4)
    return f"{name}@{incarnation}" if attempt is None else f"{name}@{attempt}.{incarnation}"


def replaces(owner: str, other: str) -> bool:
    """Return whether `other` must be gone since `owner` is there."""
    name, attempt = _parts(owner)
    other_name, other_attempt = _parts(other)
    return name == other_name and attempt is not None and other_attempt is not None and attempt > other_attempt


def _parts(owner: str) -> tuple[str, int | None]:
    name, _, incarnation = owner.rpartition("@")
    attempt, dot, _ = incarnation.partition(".")
    return name, int(attempt) if dot and attempt.isdigit() else None
