"""How much memory the version slots take on this host, all processes together: PSS, which divides what is shared."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+) +(\S*)")
_PSS = re.compile(r"^Pss: +(\d+) kB")


@dataclass(frozen=True)
class SlotPages:
    """What is mapped.

    Attributes:
        pss_bytes: of all processes' mappings.
        num_memories: different files in memory.
    """

    pss_bytes: int
    num_memories: int


def slot_pages(pids: Iterable[int], region_bytes: int) -> SlotPages:
    """Add up the mappings of anonymous files in memory that are large enough for a version."""
    total, memories = 0, set()
    for pid in pids:
        inode = ""
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if mapping := _MAPPING.match(line):
                start, end, number, path = mapping.groups()
                is_slot = path.startswith("/memfd:") and int(end, 16) - int(start, 16) >= region_bytes
                inode = number if is_slot else ""
            elif inode and (pss := _PSS.match(line)):
                total += 1024 * int(pss[1])
                if int(pss[1]):
                    memories.add(inode)
    return SlotPages(total, len(memories))
