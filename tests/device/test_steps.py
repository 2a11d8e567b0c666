"""Steps of the trainer on `late`: they give what they give on the CPU, and the host waits for one only at its end."""

import pytest

from .conftest import Run
from .plants import mistakes


@pytest.mark.parametrize("schedule", ["copies", "kernels"])
def test_steps_equal_those_of_the_cpu_and_wait_for_the_device_once_an_update(run: Run, schedule: str) -> None:
    """Of several ranks FSDP2 itself waits; what it does is not counted here."""
    expected, said = run("steps", device="cpu"), run("steps", schedule)
    assert len(said[0]["dapo"]["updates"]) == 2 and len(said[0]["grpo"]["micro_batches"]) == 5
    assert mistakes(expected, said) == []
