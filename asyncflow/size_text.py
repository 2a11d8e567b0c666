"""Sizes for people. Pure."""

_UNITS = ("B", "kB", "MB", "GB", "TB")


def size_text(num_bytes: float) -> str:
    """Return e.g. `1.5 GB` (decimal units)."""
    for unit in _UNITS[:-1]:
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} {_UNITS[-1]}"
