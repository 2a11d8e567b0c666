"""Every promise names a test that exists."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLE = TESTS.parent / "docs" / "invariants.md"
ROWS = [row for row in TABLE.read_text().splitlines() if row.startswith("| ") and "::" in row]


@pytest.mark.parametrize("row", ROWS, ids=[row.split(" | ")[0].removeprefix("| ") for row in ROWS])
def test_a_promise_names_tests_that_exist(row: str) -> None:
    found = re.findall(r"`([\w/.]+\.py)::(\w+)`", row)
    assert len(found) == row.count("::")
    for path, name in found:
        assert re.search(rf"^(def {name}\(|{name} = )", (TESTS / path).read_text(), re.MULTILINE), f"{path}::{name}"
