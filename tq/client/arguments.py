"""What callers may say to a `QueueClient`; anything else is a `ConfigError` before a service hears of it. Pure."""

import operator
from collections.abc import Iterable, Mapping, Sequence

from asyncflow.errors import ConfigError
from tq.batch import Column
from tq.messages import Granted

_MOST = 2**63 - 1


def common_length(columns: Mapping[str, Column]) -> int:
    """Return the number of rows of a put's columns.

    Raises:
        ConfigError: these are no columns, or not equally long.
    """
    if not isinstance(columns, Mapping):
        raise ConfigError(f"a put needs columns by name, not a {type(columns).__name__}")
    for name, column in columns.items():
        if not isinstance(column, Column):
            raise ConfigError(f"column {name!r} is a {type(column).__name__}; make it a column: tq.column([...])")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) != 1:
        raise ConfigError(f"a put needs columns, all with the same number of rows, not {lengths}")
    return next(iter(lengths.values()))


def check_numbers(what: str, numbers: Iterable[int]) -> None:
    """Refuse what is no row, group or partition; ConfigError says which."""
    try:
        beyond = [number for number in numbers if not 0 <= operator.index(number) <= _MOST]
    except TypeError as error:
        raise ConfigError(f"{what}: not a whole number ({error})") from error
    if beyond:
        raise ConfigError(f"{what}: {beyond[0]} is not in 0 .. 2**63 - 1")


def check_lease(task: str, granted: Granted, rows: Sequence[int]) -> None:
    """Refuse a lease of another task, and rows that are not in it."""
    if granted.task != task:
        raise ConfigError(f"the lease {granted.token} is {granted.task}'s, not {task}'s")
    foreign = set(rows).difference(granted.rows)
    if foreign:
        raise ConfigError(f"rows {sorted(foreign)[:8]} are not in the lease {granted.token}")
