"""Makes arithmetic.jsonl: distinct sums and differences of 1 to 30 and 1 to 9, no result below 0.

python configs/data/make_arithmetic.py            writes configs/data/arithmetic.jsonl
"""

import json
import random
from pathlib import Path

import click

LARGEST_LEFT, LARGEST_RIGHT = 30, 9
"""Small enough that a model of 135 M parameters is sometimes right, so that its answers can be told apart."""


def make_rows(num_rows: int, seed: int) -> list[dict[str, str | int]]:
    """Return distinct problems, half sums and half differences, drawn by `seed`."""
    generator = random.Random(seed)
    rows: dict[str, int] = {}
    while len(rows) < num_rows:
        left, right = generator.randint(1, LARGEST_LEFT), generator.randint(1, LARGEST_RIGHT)
        if len(rows) % 2 == 0:
            rows[f"{left} + {right}"] = left + right
        elif left >= right:
            rows[f"{left} - {right}"] = left - right
    return [{"prompt": prompt, "answer": answer} for prompt, answer in rows.items()]


@click.command(help=__doc__.splitlines()[0])
@click.option("--target", type=click.Path(path_type=Path), default=Path(__file__).parent / "arithmetic.jsonl")
@click.option("--rows", default=400, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(target: Path, rows: int, seed: int) -> None:
    """Write the file."""
    target.write_text("".join(json.dumps(row) + "\n" for row in make_rows(rows, seed)))
    click.echo(f"{rows} problems in {target}")


if __name__ == "__main__":
    main()
