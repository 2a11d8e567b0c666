"""Slurm's short form of host names, `gpu[001-003,7],login1`, written out. Pure."""

from collections.abc import Iterator

from asyncflow.errors import ConfigError

_MOST_NAMES = 65536


def expand_nodelist(text: str) -> tuple[str, ...]:
    """Return all host names, in Slurm's order.

    Args:
        text: e.g. of SLURM_JOB_NODELIST: names with numbers, ranges and leading zeros in brackets, also several.
    Raises:
        ConfigError: it is no such list, or one of more than 65,536 names.
    """
    names: list[str] = []
    for part in _parts(text):
        for name in _names(part, text):
            names.append(name)
            if len(names) > _MOST_NAMES:
                raise ConfigError(f"node list: {text!r} names more than {_MOST_NAMES} hosts; correct it")
    return tuple(names)


def _parts(text: str) -> Iterator[str]:
    """Cut at the commas that are not in brackets."""
    begin = depth = 0
    for position, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            yield text[begin:position]
            begin = position + 1
    yield text[begin:]


def _names(part: str, text: str) -> Iterator[str]:
    """Yield the names of one part; the brackets further left count slower."""
    before, bracket, rest = part.partition("[")
    if "]" in before or not part:
        raise _unreadable(text)
    if not bracket:
        yield part
        return
    inside, bracket, after = rest.partition("]")
    if not bracket or "[" in inside:
        raise _unreadable(text)
    for number in _numbers(inside, text):
        for end in _names(after, text) if after else ("",):
            yield f"{before}{number}{end}"


def _numbers(inside: str, text: str) -> Iterator[str]:
    for piece in inside.split(","):
        low, dash, high = piece.partition("-")
        if not (low.isdecimal() and low.isascii()) or (dash and not (high.isdecimal() and high.isascii())):
            raise _unreadable(text)
        for number in range(int(low), int(high or low) + 1):
            yield f"{number:0{len(low)}d}"


def _unreadable(text: str) -> ConfigError:
    return ConfigError(f"node list: {text!r} is no list of host names such as n[1-4,7]; correct it, or give --head")
