"""How findings are shown: a line each, with the remedy below, and a summary; or one JSON object. Pure."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from launcher.doctor.finding import Finding, Level

_LEVEL_WIDTH = max(len(level) for level in Level)
_CHECK_WIDTH = 15


def as_text(finding: Finding) -> str:
    """Return one line, or two with the remedy."""
    line = f"{finding.level.value:<{_LEVEL_WIDTH}}  {finding.check:<{_CHECK_WIDTH}}  {finding.text}"
    if not finding.remedy:
        return line
    return f"{line}\n{'':<{_LEVEL_WIDTH}}  {'':<{_CHECK_WIDTH}}  -> {finding.remedy}"


def summary(findings: Sequence[Finding], seconds: float) -> str:
    """Return the last line."""
    count = {level: sum(1 for finding in findings if finding.level is level) for level in Level}
    errors, warnings = count[Level.ERROR], count[Level.WARNING]
    parts = [
        f"{errors} error{'s' * (errors != 1)}",
        f"{warnings} warning{'s' * (warnings != 1)}",
        f"{count[Level.OK]} ok",
    ]
    return f"{', '.join(parts)}, {seconds:.1f} s"


def as_json(findings: Sequence[Finding], seconds: float) -> str:
    """Return everything as one JSON object."""
    counts = {f"num_{level.name.lower()}": sum(1 for each in findings if each.level is level) for level in Level}
    return json.dumps({"findings": [asdict(finding) for finding in findings], **counts, "time_s": round(seconds, 3)})


def failed(findings: Sequence[Finding]) -> bool:
    """Return whether a check found an error."""
    return any(finding.level is Level.ERROR for finding in findings)
