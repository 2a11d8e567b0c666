"""Makes problems to train on and others to evaluate on: arithmetic*.jsonl (sums and differences of 1 to 30 and 1 to 9)
and two_digit_sums*.jsonl (sums of two numbers of two digits).

python configs/data/make_arithmetic.py            writes all of them beside itself
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

import click

LARGEST_LEFT, LARGEST_RIGHT = 30, 9
"""Small enough that a model of 135 M parameters is sometimes right, so that its answers can be told apart."""
Problems = dict[str, int]
"""Text of a problem -> its result."""


def make_arithmetic(num_rows: int, seed: int) -> Problems:
    """Return distinct problems, half sums and half differences, no result below 0."""
    generator = random.Random(seed)
    rows: Problems = {}
    while len(rows) < num_rows:
        left, right = generator.randint(1, LARGEST_LEFT), generator.randint(1, LARGEST_RIGHT)
        if len(rows) % 2 == 0:
            rows[f"{left} + {right}"] = left + right
        elif left >= right:
            rows[f"{left} - {right}"] = left - right
    return rows


def make_two_digit_sums(num_rows: int, seed: int) -> Problems:
    """Return distinct sums of two numbers of 10 to 99."""
    generator = random.Random(seed)
    rows: Problems = {}
    while len(rows) < num_rows:
        left, right = generator.randint(10, 99), generator.randint(10, 99)
        rows[f"{left} + {right}"] = left + right
    return rows


DATA_SETS: tuple[tuple[str, Callable[[int, int], Problems], int, int], ...] = (
    ("arithmetic", make_arithmetic, 400, 64),
    ("two_digit_sums", make_two_digit_sums, 800, 400),
)
"""Name, who makes it, problems to train on, others to evaluate on."""


@click.command(help=__doc__.splitlines()[0])
@click.option("--target", type=click.Path(path_type=Path), default=Path(__file__).parent, help="Folder to write into.")
@click.option("--seed", default=0, show_default=True)
def main(target: Path, seed: int) -> None:
    """Write the files."""
    for name, make, num_rows, num_held_out in DATA_SETS:
        rows = [{"prompt": text, "answer": result} for text, result in make(num_rows + num_held_out, seed).items()]
        for file_name, part in ((f"{name}.jsonl", rows[:num_rows]), (f"{name}_held_out.jsonl", rows[num_rows:])):
            (target / file_name).write_text("".join(json.dumps(row) + "\n" for row in part))
            click.echo(f"{len(part)} problems in {target / file_name}")


if __name__ == "__main__":
    main()
