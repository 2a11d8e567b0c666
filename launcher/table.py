"""Plain text tables of the command line. Pure."""

from collections.abc import Sequence


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows as lines, every column but the last as wide as its widest cell; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join((*cells, row[-1])).rstrip())
    return "\n".join(lines)
