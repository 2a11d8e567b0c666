"""Two ranks save together, beside collectives of their own: all of them save, or none does; any number restores."""

import json
from pathlib import Path
from typing import Any

import pytest
from rank_processes import run_script

SCRIPT = Path(__file__).with_name("checkpoint_rank.py")
DEADLINE_S = 120


def run_ranks(root: Path, mode: str, num_ranks: int) -> list[dict[str, Any]]:
    run_script(SCRIPT, root, mode, num_ranks=num_ranks, deadline_s=DEADLINE_S)
    return [json.loads((root / f"{mode}-{num_ranks}-{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.fixture(scope="module", name="saved")
def _saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("ranks")
    (root / "config.yaml").write_text("steps: 3\n")
    return root, run_ranks(root, "save", 2)


@pytest.mark.gate
def test_rank_that_cannot_write_fails_the_save_for_all_and_the_next_one_succeeds(
    saved: tuple[Path, list[dict[str, Any]]],
) -> None:
    root, told = saved
    assert told[0] == told[1]
    assert (told[0]["1"], told[0]["3"]) == ("saved", "saved")
    assert "step_000002: cannot be written (rank 1: OSError: [Errno 27] File too large" in told[0]["2"]
    assert sorted(path.name for path in (root / "checkpoints").iterdir()) == ["step_000001", "step_000003"]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_any_number_of_ranks_restores_the_state_of_the_step(
    saved: tuple[Path, list[dict[str, Any]]], num_ranks: int
) -> None:
    for restored in run_ranks(saved[0], "restore", num_ranks):
        assert restored["weight"] == [3.0], "not what the updates after it made of it"
        assert restored["num_steps"] > 0
