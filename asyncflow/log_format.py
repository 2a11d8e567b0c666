"""How a run's processes write their logs: as lines of text, or of JSON (`launcher.log_format`)."""

import json
import logging
import time
from typing import Literal

LogFormat = Literal["text", "json"]

TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def log_formatter(form: LogFormat, *, role: str, gang: str, rank: int) -> logging.Formatter:
    """Return the formatter of a process's log handlers."""
    return JsonFormatter(role=role, gang=gang, rank=rank) if form == "json" else logging.Formatter(TEXT)


class JsonFormatter(logging.Formatter):
    """One JSON object per message: `time` (UTC), `role`, `gang`, `rank`, `level`, `logger`, `message`, and the stack of
    an error as `error`."""

    def __init__(self, **place: str | int) -> None:
        super().__init__()
        self._place = place

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            **self._place,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)
