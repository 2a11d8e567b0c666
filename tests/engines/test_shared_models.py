"""A model that several ranks share and none trains: its numbers are those of the whole model in one process."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support import shared_models
from tests.support.shared_models import CASES

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared")
    shared_models.save_models(path)
    return path


@pytest.mark.parametrize("case", CASES)
def test_log_probs_are_those_of_the_whole_model_on_every_rank(root: Path, case: str) -> None:
    if case not in shared_models.available():
        pytest.skip("needs megatron-core")
    wanted = shared_models.expected(root, case)
    assert not torch.allclose(wanted["loaded"], wanted["initial"], atol=0.1), "the second model is another one"
    for found in shared_models.run_case(root, case):
        for what, log_probs_A in wanted.items():
            torch.testing.assert_close(found[what], log_probs_A, rtol=0, atol=1e-5, msg=what)
    written = _weights(root / f"written-{case}")
    expected = _weights(root / CASES[case][0] / "1")
    assert written.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(written[name], value), name


def _weights(path: Path) -> dict[str, Tensor]:
    return load_file(path / "model.safetensors")
