"""Logs as lines of JSON."""

import json
import logging
from pathlib import Path

from launcher.process.launcher_process import logging_to


def test_json_logs_have_an_object_per_line_with_place_level_and_stack(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "launcher-2.log"
    with logging_to(path, "json", 2):
        logging.getLogger("a.b").warning("two\nlines %s", "\u202e")
        try:
            raise ValueError("no")
        except ValueError:
            logging.getLogger("a.b").exception("it failed")
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first.pop("time").endswith("Z")
    place = {"role": "launcher", "gang": "launcher", "rank": 2, "logger": "a.b"}
    assert first == {**place, "level": "WARNING", "message": "two\nlines \u202e"}
    assert second["message"] == "it failed" and second["error"].endswith("ValueError: no")
