"""FSDP over two Gloo ranks trains the same parameters as one rank, also across a checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from rank_processes import run_script
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from weightsync.plan import Box
from workers.engines.lora import trained_parameters
from workers.settings.lora import LoraConfig

SCRIPT = Path(__file__).with_name("fsdp_rank.py")
DEADLINE_S = 120


def run_ranks(root: Path, mode: str, num_ranks: int) -> None:
    run_script(SCRIPT, root, mode, num_ranks=num_ranks, deadline_s=DEADLINE_S)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory after all runs. 13 rows of vocabulary and 5 of hidden units per head do not divide by two."""
    root = tmp_path_factory.mktemp("fsdp")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=13,
        hidden_size=30,
        intermediate_size=41,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(root / "model")
    run_ranks(root, "train", 1)
    run_ranks(root, "train", 2)
    run_ranks(root, "resume", 1)
    run_ranks(root, "forward", 1)
    run_ranks(root, "forward", 2)
    return root


@pytest.fixture(scope="module")
def hybrid(root: Path) -> Path:
    """The same after runs of two replicas of two ranks, and of what resumes their state or is resumed by them."""
    run_ranks(root, "hybrid", 4)
    run_ranks(root, "resume-hybrid", 4)
    run_ranks(root, "resume-plain", 2)
    return root


@pytest.fixture(scope="module")
def adapted(root: Path) -> Path:
    """The same after runs that train an adapter."""
    for mode, num_ranks in (("lora", 1), ("lora", 2), ("resume-lora", 1), ("lora-adapter", 2)):
        run_ranks(root, mode, num_ranks)
    return root


def exported(root: Path, name: str) -> dict[str, Tensor]:
    return load_file(root / f"export-{name}" / "model.safetensors")


@pytest.mark.parametrize("other", ["train-2", "resume-1"])
def test_parameters_equal_those_of_one_rank(root: Path, other: str) -> None:
    initial = load_file(root / "model" / "model.safetensors")
    expected, actual = exported(root, "train-1"), exported(root, other)
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=2e-6)
        assert not value.equal(initial[name])


def test_gradients_are_summed_over_ranks(root: Path) -> None:
    one, two = (json.loads((root / f"norms-train-{num_ranks}-0.json").read_text()) for num_ranks in (1, 2))
    assert two == pytest.approx(one, rel=1e-4)
    assert (root / "norms-train-2-1.json").read_text() == (root / "norms-train-2-0.json").read_text()


def test_ranks_without_rows_take_part_in_log_probs(root: Path) -> None:
    one, two = (torch.load(root / f"log-probs-{num_ranks}-0.pt") for num_ranks in (1, 2))
    for name, expected, actual in zip(("before", "between", "after"), one, two, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, msg=name)
    assert one[0].equal(one[1]) and not torch.allclose(one[1], one[2], atol=1e-3)
    assert [part.shape for part in torch.load(root / "log-probs-2-1.pt")] == [(0,)] * 3


def test_shards_of_two_ranks_make_the_whole_parameters(root: Path) -> None:
    expected = exported(root, "train-2")
    covered = {name: torch.full(value.shape, float("nan")) for name, value in expected.items()}
    pieces = 0
    for rank in range(2):
        for name, shape, offset, size, values in torch.load(root / f"shards-train-2-{rank}.pt"):
            part = covered[name][Box(offset, size).slices]
            assert shape == expected[name].shape and values.dtype == torch.float32
            assert bool(part.isnan().all())
            part.copy_(values)
            pieces += 1
    assert pieces == 2 * len(expected)
    for name, value in expected.items():
        assert covered[name].equal(value), name


@pytest.mark.parametrize("name", ["train-1", "train-2"])
def test_ranks_together_write_the_export_of_a_single_process(root: Path, name: str) -> None:
    whole, shared = root / f"export-{name}", root / f"shared-{name}"
    assert sorted(path.name for path in shared.iterdir()) == sorted(path.name for path in whole.iterdir())
    assert all(path.read_bytes() == (whole / path.name).read_bytes() for path in shared.iterdir())


def test_export_of_two_ranks_is_loaded_by_transformers(root: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(root / "export-train-2")
    assert model.model.embed_tokens.weight.equal(exported(root, "train-2")["model.embed_tokens.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("other", ["hybrid-4", "resume-hybrid-4", "resume-plain-2"])
def test_replicas_train_what_one_rank_does_across_checkpoints(hybrid: Path, other: str) -> None:
    expected, actual = exported(hybrid, "train-1"), exported(hybrid, other)
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.slow
def test_replicas_sum_gradients_and_hold_the_same_shards(hybrid: Path) -> None:
    one = json.loads((hybrid / "norms-train-1-0.json").read_text())
    for rank in range(4):
        assert json.loads((hybrid / f"norms-hybrid-4-{rank}.json").read_text()) == pytest.approx(one, rel=1e-4)
    shards = [torch.load(hybrid / f"shards-hybrid-4-{rank}.pt") for rank in range(4)]
    for own, replica in ((0, 2), (1, 3)):
        for (name, *box, values), (other, *same, others) in zip(shards[own], shards[replica], strict=True):
            assert (name, box) == (other, same) and values.equal(others)
    assert sum(values.numel() for *_, values in shards[0] + shards[1]) == sum(
        value.numel() for value in exported(hybrid, "hybrid-4").values()
    )


@pytest.mark.slow
@pytest.mark.parametrize("other", ["lora-2", "resume-lora-1", "lora-adapter-2"])
def test_ranks_train_the_adapter_of_a_single_one_across_checkpoints(adapted: Path, other: str) -> None:
    expected, actual = exported(adapted, "lora-1"), exported(adapted, other)
    base, moved = load_file(adapted / "model" / "model.safetensors"), 0
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=2e-6, msg=name)
        moved += not value.equal(base[name])
    assert moved == 2 * 7
    file = "adapter/adapter_model.safetensors"
    one, two = (load_file(adapted / f"export-{name}" / file) for name in ("lora-1", other))
    for name, value in two.items():
        torch.testing.assert_close(value, one[name], rtol=1e-4, atol=2e-6, msg=name)
    one_norms, two_norms = (json.loads((adapted / f"norms-{name}-0.json").read_text()) for name in ("lora-1", other))
    assert two_norms[-1] == pytest.approx(one_norms[-1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "file"), [("lora", ""), ("lora-adapter", "adapter/adapter_")])
def test_shards_of_two_ranks_make_the_whole_model_or_the_adapter(adapted: Path, mode: str, file: str) -> None:
    """Merged where they are read, with no collective then (`fsdp_rank`)."""
    expected = load_file(adapted / f"export-{mode}-2" / f"{file}model.safetensors")
    covered = {name: torch.full(value.shape, float("nan")) for name, value in expected.items()}
    for rank in range(2):
        for name, _, offset, size, values in torch.load(adapted / f"shards-{mode}-2-{rank}.pt"):
            part = covered[name][Box(offset, size).slices]
            assert bool(part.isnan().all())
            part.copy_(values.reshape(size))
    for name, value in expected.items():
        torch.testing.assert_close(covered[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.slow
def test_ranks_that_merge_have_every_a_whole_as_is_estimated_and_not_asleep(adapted: Path) -> None:
    shapes = {name: tuple(value.shape) for name, value in load_file(adapted / "model" / "model.safetensors").items()}
    trained = trained_parameters(shapes, LoraConfig(rank=3))
    found = {name: json.loads((adapted / f"all-a-{name}.json").read_text()) for name in ("1-0", "2-0", "2-1")}
    assert found == {"1-0": [0, 0], "2-0": [4 * trained.all_a, 0], "2-1": [4 * trained.all_a, 0]}


@pytest.mark.parametrize("name", ["lora-1", "lora-2"])
def test_ranks_together_write_the_export_of_an_adapter(adapted: Path, name: str) -> None:
    whole, shared = adapted / f"export-{name}", adapted / f"shared-{name}"
    files = sorted(str(path.relative_to(whole)) for path in whole.rglob("*.*"))
    assert "adapter/adapter_config.json" in files and "model.safetensors" in files
    assert all((shared / file).read_bytes() == (whole / file).read_bytes() for file in files)


def test_every_rank_drops_inputs_of_its_own(root: Path) -> None:
    run_ranks(root, "dropout", 2)
    (first, one), (same, other) = (torch.load(root / f"dropout-{rank}.pt") for rank in range(2))
    torch.testing.assert_close(first, same)  # B is 0 yet
    assert (one - other).abs().max() > 1e-3
