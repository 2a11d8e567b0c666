"""Steps of the trainer on `late`: they give what they give on the CPU, and the host waits for one only at its end."""

import importlib.util

import pytest

from .conftest import Run
from .plants import mistakes


@pytest.mark.parametrize("schedule", ["copies", "kernels"])
def test_steps_equal_those_of_the_cpu_and_wait_for_the_device_once_an_update(run: Run, schedule: str) -> None:
    """Of several ranks FSDP2 itself waits; what it does is not counted here."""
    expected, said = run("steps", device="cpu"), run("steps", schedule)
    assert len(said[0]["dapo"]["updates"]) == 2 and len(said[0]["grpo"]["micro_batches"]) == 5
    assert mistakes(expected, said) == []


needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs megatron-core: pip install -e '.[megatron]'"
)


@needs_megatron
@pytest.mark.parametrize("schedule", ["copies", "kernels"])
def test_megatron_equals_that_of_the_cpu_and_never_waits_in_a_micro_batch(run: Run, schedule: str) -> None:
    """With recomputed layers; its rotary embedding would wait three times a call for the ends of sequences."""
    expected, said = run("megatron", device="cpu"), run("megatron", schedule)
    assert len(said[0]["megatron"]["micro_batches"]) == 4
    assert said[0]["megatron"]["micro_batches"] == [{}] * 4
    assert mistakes([one["megatron"]["norms"] for one in expected], [one["megatron"]["norms"] for one in said]) == []
    assert (
        mistakes([one["megatron"]["log_probs"] for one in expected], [one["megatron"]["log_probs"] for one in said])
        == []
    )


@needs_megatron
@pytest.mark.slow
@pytest.mark.parametrize("divided", ["pipeline_parallel", "tensor_parallel"])
def test_two_ranks_of_megatron_equal_one_on_a_device(run: Run, monkeypatch: pytest.MonkeyPatch, divided: str) -> None:
    """Transfers between stages, and what tensor-parallel ranks gather, are ordered on the device."""
    monkeypatch.setenv("MEGATRON_DIVIDED", divided)
    (expected,) = run("megatron", device="cpu")
    for one in run("megatron", "kernels", num_ranks=2):
        # The group of the fake device copies through the host; nothing else waits.
        assert {kind for waits in one["megatron"]["micro_batches"] for kind in waits} <= {"copy to the host"}
        assert mistakes(expected["megatron"]["norms"], one["megatron"]["norms"]) == []
        assert mistakes(expected["megatron"]["log_probs"], one["megatron"]["log_probs"]) == []
