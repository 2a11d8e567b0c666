"""What every command says about itself."""

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from launcher.cli.commands import main


def _commands(group: click.Group) -> Iterator[tuple[str, click.Command]]:
    yield "asyncflow", group
    yield from sorted(group.commands.items())


@pytest.mark.parametrize(("name", "command"), list(_commands(main)))
def test_help_fits_80_columns_and_says_when_to_use_the_command(name: str, command: click.Command) -> None:
    shown = CliRunner().invoke(command, ["--help"], prog_name=name, terminal_width=80)
    assert shown.exit_code == 0
    assert max(map(len, shown.output.splitlines())) <= 80
    assert "Use " in shown.output.split("Options:")[0]
    summary = command.get_short_help_str(limit=200)
    assert len(summary) <= 59, "the list of commands shows it in one line of 80 columns, of which click uses 78"
