"""Slurm's ways to write a time limit. Pure."""

import re

from asyncflow.errors import ConfigError

UNLIMITED = ("infinite", "unlimited")
_FORM = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?", re.ASCII)


def time_limit_s(text: str) -> float:
    """Return the seconds that `--time TEXT` means to sbatch; infinity for no limit.

    Args:
        text: `minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours`, `days-hours:minutes`,
            `days-hours:minutes:seconds`, or `UNLIMITED`.
    Raises:
        ConfigError: it is none of them, or nothing at all.
    """
    if text.lower() in UNLIMITED:
        return float("inf")
    match = _FORM.fullmatch(text)
    if match is None:
        raise ConfigError(f"--time: {text!r} is no time limit; give hours:minutes:seconds or days-hours, e.g. 24:00:00")
    numbers = [int(number) for number in match.group("first", "second", "third") if number is not None]
    first_is_hours = match["days"] is not None or len(numbers) == 3
    units_s = (3600, 60, 1) if first_is_hours else (60, 1)
    seconds = int(match["days"] or 0) * 86_400
    seconds += sum(number * unit_s for number, unit_s in zip(numbers, units_s, strict=False))
    if seconds == 0:
        raise ConfigError(f"--time: {text!r} is no time at all; give hours:minutes:seconds, e.g. 24:00:00")
    return float(seconds)
