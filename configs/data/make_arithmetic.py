"""Makes arithmetic.jsonl: distinct sums and differences of numbers below 100 with results from 0 on.

python configs/data/make_arithmetic.py            writes configs/data/arithmetic.jsonl
"""

import json
import random
from pathlib import Path

import click


def make_rows(num_rows: int, seed: int) -> list[dict[str, str | int]]:
    """Return distinct problems, half sums and half differences, drawn by `seed`."""
    generator = random.Random(seed)
    rows: dict[str, int] = {}
    while len(rows) < num_rows:
        left, right = generator.randrange(1, 100), generator.randrange(1, 100)
        if len(rows) % 2 == 0:
            rows[f"{left} + {right}"] = left + right
        else:
            rows[f"{max(left, right)} - {min(left, right)}"] = abs(left - right)
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
