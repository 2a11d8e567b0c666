"""How errors become exit codes of the command line; those of a started run are the supervisor's (0, 1, 75)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from asyncflow.errors import AsyncFlowError, ConfigError

FAILED = 1
USAGE = 2


class _OneLine(click.ClickException):
    """Prints `Error: ...` as one line on stderr."""

    def __init__(self, error: Exception) -> None:
        super().__init__(" ".join(str(error).splitlines()))

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"Error: {self.message}", file=file, err=file is None)


class _InputRefused(_OneLine):
    exit_code = USAGE


class _RunFailed(_OneLine):
    exit_code = FAILED


@contextmanager
def errors_as_exits() -> Iterator[None]:
    """Turn AsyncFlow's errors into one line on stderr and an exit code: 2 for the user's input, 1 for a failed run."""
    try:
        yield
    except ConfigError as error:
        raise _InputRefused(error) from error
    except AsyncFlowError as error:
        raise _RunFailed(error) from error
