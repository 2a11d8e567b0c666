"""A model that several ranks share and none trains: its numbers are those of the whole model in one process."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import shared_models
from tests.support.shared_models import CASES

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared")
    shared_models.save_models(path)
    return path


@pytest.mark.parametrize("case", CASES)
def test_ranks_find_what_one_with_the_whole_model_does(root: Path, case: str) -> None:
    if case not in shared_models.available():
        pytest.skip("needs megatron-core")
    wanted = shared_models.expected(root, case)
    for found in shared_models.run_case(root, case):
        for what, values in wanted.items():
            torch.testing.assert_close(found[what], values, rtol=0, atol=1e-5, msg=what)
    if "loaded" in wanted:
        assert not torch.allclose(wanted["loaded"], wanted["initial"], atol=0.1), "the second model is another one"
        written = load_file(root / f"written-{case}" / "model.safetensors")
        expected = shared_models.weights_of(root, CASES[case][0])
        assert written.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(written[name], value), name
