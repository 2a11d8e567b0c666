"""The tables of a row's life: what docs/architecture.md shows is what the code has, and what it refuses."""

from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path

import pytest

from tq.control.row_table import TASK_TRANSITIONS, TRANSITIONS, Row, RowState, UnitLife

PAGE = Path(__file__).parents[3] / "docs" / "architecture.md"


def table(transitions: Mapping[IntEnum, Mapping[IntEnum, str]]) -> list[str]:
    return [
        f"| {old.name.lower()} | {new.name.lower()} | {cause} |"
        for old, following in transitions.items()
        for new, cause in following.items()
    ]


@pytest.mark.parametrize("transitions", [TRANSITIONS, TASK_TRANSITIONS], ids=["rows", "rows of a task"])
def test_page_shows_the_table(transitions: Mapping[IntEnum, Mapping[IntEnum, str]]) -> None:
    assert "\n".join(table(transitions)) in PAGE.read_text()


def test_row_changes_its_state_as_the_table_has_it_only() -> None:
    row = Row(UnitLife("storage-0"), 1, 0, 1, 0, 1, tokens=0, num_bytes=0)
    row.to(RowState.STORED)
    row.to(RowState.FINISHED)
    with pytest.raises(AssertionError, match="FINISHED cannot become LOST"):
        row.to(RowState.LOST)
