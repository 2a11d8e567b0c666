"""Makes arithmetic.jsonl and arithmetic_held_out.jsonl: distinct sums and differences of 1 to 30 and 1 to 9, no
result below 0.

python configs/data/make_arithmetic.py            writes both beside itself
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
@click.option("--target", type=click.Path(path_type=Path), default=Path(__file__).parent, help="Folder to write into.")
@click.option("--rows", default=400, show_default=True, help="To train on.")
@click.option("--held-out", default=64, show_default=True, help="To evaluate on; none of them is trained on.")
@click.option("--seed", default=0, show_default=True)
def main(target: Path, rows: int, held_out: int, seed: int) -> None:
    """Write the files."""
    problems = make_rows(rows + held_out, seed)
    for name, part in (("arithmetic.jsonl", problems[:rows]), ("arithmetic_held_out.jsonl", problems[rows:])):
        (target / name).write_text("".join(json.dumps(row) + "\n" for row in part))
        click.echo(f"{len(part)} problems in {target / name}")


if __name__ == "__main__":
    main()
