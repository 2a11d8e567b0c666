"""Turns errors into one line on stderr and an exit code; a started run's codes are the supervisor's (0, 1, 75)."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from asyncflow.errors import AsyncFlowError, ConfigError
from launcher.process.run_events import FAILED, USAGE

_LONGEST = 1000
"""In characters; a longer line, caused by a user's value, loses its middle."""


class _OneLine(click.ClickException):
    def __init__(self, text: str) -> None:
        super().__init__(_as_one_line(text))

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"Error: {self.message}", file=file, err=file is None)


class _InputRefused(_OneLine):
    exit_code = USAGE


class _RunFailed(_OneLine):
    exit_code = FAILED


class OneLineCommand(click.Command):
    """A command whose usage errors are one line too: option, value, where to look."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            path = " ".join(part for part in (parent.command_path if parent else "", info_name or "") if part)
            raise _InputRefused(f"{_without_preamble(error)}; see {path} --help") from error


class OneLineGroup(click.Group):
    """A group of commands; naming one that does not exist gives one line."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise _InputRefused(f"{_without_preamble(error)}; see {ctx.command_path} --help") from error


def prepare_streams() -> None:
    """Make sure that all three standard streams exist, and never fail on a character that one cannot encode."""
    # Without them (a daemon's child), the next file or socket would get their numbers, in workers too.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def errors_as_exits() -> Iterator[None]:
    """Turn AsyncFlow's errors into one line on stderr and an exit code: 2 for user input, 1 for a failed run."""
    try:
        yield
    except ConfigError as error:
        raise _InputRefused(str(error)) from error
    except AsyncFlowError as error:
        raise _RunFailed(str(error)) from error


def _without_preamble(error: click.UsageError) -> str:
    """Return click's message; for a bad value in our own form: the option, the value, what is wrong."""
    missing = isinstance(error, click.MissingParameter)
    if isinstance(error, click.BadParameter) and error.param is not None and not missing:
        name = error.param.opts[0] if isinstance(error.param, click.Option) else error.param.human_readable_name
        return f"{name}: {error.message.rstrip('.').replace('a valid integer range', 'a whole number')}"
    return error.format_message().rstrip(".")


def _as_one_line(text: str) -> str:
    """Join lines, escape control characters, and cut the middle."""
    line = " ".join(text.splitlines())
    # No terminal should obey a data file.
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
    if len(line) <= _LONGEST:
        return line
    return f"{line[: _LONGEST * 2 // 3]} ... {line[-_LONGEST // 3 :]}"
