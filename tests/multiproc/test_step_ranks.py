"""A step over two ranks with unequal shares is that of one rank with all rows, for every algorithm."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_script

SCRIPT = Path(__file__).with_name("step_rank.py")
DEADLINE_S = 400


def run_ranks(root: Path, num_ranks: int) -> dict[str, dict[str, Any]]:
    run_script(SCRIPT, root, num_ranks=num_ranks, deadline_s=DEADLINE_S)
    found: dict[str, dict[str, Any]] = torch.load(root / f"found-{num_ranks}.pt")
    return found


@pytest.mark.timeout(1000)
def test_unequal_shares_of_two_ranks_train_as_all_rows_on_one(tmp_path: Path) -> None:
    one, two = run_ranks(tmp_path, 1), run_ranks(tmp_path, 2)
    assert one.keys() == two.keys()
    for name, expected in one.items():
        for key, numbers in expected.items():
            assert two[name][key] == pytest.approx(numbers, rel=1e-4, abs=2e-5), f"{name}: {key}"
        assert min(expected["grad_norm"]) > 0, name
