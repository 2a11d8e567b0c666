"""Checks what callers pass to a client: a wrong argument is a `ConfigError` before anything is sent. Pure."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from asyncflow.errors import ConfigError
from tq.columns import Column, column_of
from tq.messages import LeaseGrant

_MOST = 2**63 - 1
_LONGEST_S = 10**9


def as_columns(columns: Mapping[str, Any]) -> tuple[dict[str, Column], int]:
    """Return a put's columns, packed, and their number of rows; `columns` holds `Column`s or what `tq.column` accepts.

    Raises:
        ConfigError: these are not columns, differ in length, or one has no name.
    """
    if not isinstance(columns, Mapping):
        raise ConfigError(f"a put needs columns by name, not a {type(columns).__name__}")
    if "" in columns.keys():  # noqa: SIM118 - a TensorDict refuses `in`
        raise ConfigError('a column is named ""; give it a name')
    packed = {}
    for name, data in columns.items():
        if not isinstance(name, str):
            raise ConfigError(f"a column is named {name!r}, a {type(name).__name__}; name it with a string")
        try:
            packed[name] = column_of(data)
        except ConfigError as error:
            raise ConfigError(f"column {name!r}: {error}") from error
    lengths = {name: len(column) for name, column in packed.items()}
    if len(set(lengths.values())) != 1:
        raise ConfigError(f"a put needs columns, all with the same number of rows, not {lengths}")
    return packed, next(iter(lengths.values()))


def check_names(names: Sequence[str]) -> list[str]:
    """Return the columns to read as a list; raises ConfigError when these are not names."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ConfigError(f"give a list of column names, not {names!r}")
    asked = list(names)
    wrong = [name for name in asked if not isinstance(name, str)]
    if wrong:
        raise ConfigError(f"a column name is a string, not {wrong[0]!r}, a {type(wrong[0]).__name__}")
    return asked


def check_numbers(what: str, numbers: Iterable[int], *, least: int = 0, most: int = _MOST) -> list[int]:
    """Return rows, groups, partitions, ... as plain integers; ConfigError names the offender."""
    try:
        plain = [int(operator.index(number)) for number in numbers]
    except TypeError as error:
        raise ConfigError(f"{what}: not a whole number ({error})") from error
    beyond = [number for number in plain if not least <= number <= most]
    if beyond:
        raise ConfigError(f"{what}: {beyond[0]} is not in {least} .. {'2**63 - 1' if most == _MOST else most}")
    return plain


def check_number(what: str, number: int, *, least: int = 0, most: int = _MOST) -> int:
    return check_numbers(what, [number], least=least, most=most)[0]


def check_timeout(timeout_s: float) -> float:
    """Return a timeout (s) as a float; raises ConfigError unless it is a number in 0 .. 10**9."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, Real) or not 0 <= timeout_s <= _LONGEST_S:
        raise ConfigError(f"timeout_s: {timeout_s!r} is not a number of seconds in 0 .. 10**9")
    return float(timeout_s)


def check_marks(commits: Mapping[str, Sequence[int]], num_rows: int) -> dict[str, list[int]]:
    """Return what tasks are done with from the start; raises ConfigError unless it is positions of the put's rows."""
    if not isinstance(commits, Mapping) or not all(isinstance(task, str) for task in commits):
        raise ConfigError(f"commits map names of tasks to positions of rows; got {commits!r}")
    return {
        task: check_numbers(f"commits of {task}", positions, most=num_rows - 1) for task, positions in commits.items()
    }


def check_task(task: str, known: Sequence[str]) -> None:
    """Raise ConfigError, which lists the queue's tasks, if this is none of them."""
    if task not in known:
        raise ConfigError(f"no task is named {task!r}; known: {' '.join(known)}")


def check_rows_of(grant: LeaseGrant, rows: Sequence[int]) -> list[int]:
    """Return rows of a lease as plain integers; ConfigError names those that are not in it."""
    plain = check_numbers("rows", rows)
    foreign = set(plain).difference(grant.rows)
    if foreign:
        raise ConfigError(f"rows {sorted(foreign)[:8]} are not in the lease {grant.token} of {grant.task}")
    return plain
