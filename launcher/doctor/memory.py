"""Memory of the host against the least that the run takes; shared memory counts as memory."""

from dataclasses import dataclass
from pathlib import Path

from asyncflow.size_text import size_text
from launcher.doctor.cgroup import Allowance, memory_allowance
from launcher.doctor.finding import Finding
from launcher.doctor.needs import Needs

CHECK = "memory"
_LEAST_BYTES = 2 * 10**9
"""What any run takes, with the smallest model."""
_TIGHT = 1.25


@dataclass(frozen=True)
class MemoryFacts:
    """Bytes.

    Attributes:
        total, available: of the machine.
        allowance: of the control group; None: no limit.
    """

    total: int
    available: int
    allowance: Allowance | None


def check(needs: Needs) -> list[Finding]:
    """Look and judge."""
    return judge(gather(), needs)


def gather(meminfo: Path = Path("/proc/meminfo")) -> MemoryFacts:
    """Read what there is."""
    lines = (line.split(":", 1) for line in meminfo.read_text().splitlines())
    fields = {name: int(value.split()[0]) * 1024 for name, value in lines}
    return MemoryFacts(fields["MemTotal"], fields["MemAvailable"], memory_allowance())


def judge(facts: MemoryFacts, needs: Needs) -> list[Finding]:
    """Compare."""
    allowance = facts.allowance
    total = facts.total if allowance is None else min(facts.total, allowance.limit)
    free = facts.available if allowance is None else min(facts.available, allowance.free)
    wanted = needs.memory_bytes or _LEAST_BYTES
    parts = f" ({needs.memory_parts})" if needs.memory_parts else ""
    room = f"{size_text(free)} of {size_text(total)} free"
    bounded = allowance is not None and allowance.limit < facts.total
    if total < wanted:
        remedy = "launch fewer ranks (--roles), or a smaller model"
        if bounded:
            remedy = "sbatch --mem=0, docker run without --memory; or launch fewer ranks (--roles)"
        return [Finding.error(CHECK, f"{room}; the run takes {size_text(wanted)} or more{parts}", remedy)]
    if free < _TIGHT * wanted:
        text = f"{room}; the run takes {size_text(wanted)} or more{parts}, without activations and caches"
        return [Finding.warning(CHECK, text, "ps aux --sort=-rss | head shows who has the rest; or launch fewer ranks")]
    known = f"; the run takes {size_text(wanted)} or more{parts}" if needs.memory_bytes else ""
    return [Finding.ok(CHECK, f"{room}{' in this control group' if bounded else ''}{known}")]
