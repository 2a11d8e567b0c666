"""`deterministic: true`: the same bits, whether a step is streamed or done one task after the other."""

from pathlib import Path
from typing import Any

from . import command

STEPS = 6


def run(mode: str, cwd: Path) -> Path:
    """Train the quickstart with every role on its own; returns the run directory."""
    done = command.run(
        "--run-dir", mode, "--steps", str(STEPS), "--roles", "rollout:2,actor:2,ref:1", "--set", "deterministic=true",
        "--set", f"schedule.mode={mode}", "--set", "algorithm.kl_coef=0.01", "--set", "rollout.batch_size=32",
        cwd=cwd,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return cwd / mode


def trained(run_dir: Path) -> list[tuple[Any, ...]]:
    """Return what every group's responses were."""
    return sorted((line["step"], line["group"], line["token_hash"]) for line in command.lines(run_dir / "ledger.jsonl"))


def test_streamed_and_sequential_steps_end_with_the_same_bits(tmp_path: Path) -> None:
    one, other = run("sync", tmp_path), run("periodic", tmp_path)
    assert trained(one) == trained(other)
    for name in ("loss", "kl", "grad_norm", "reward_mean"):
        first, second = ([line[name] for line in command.lines(each / "metrics.jsonl")] for each in (one, other))
        assert first == second, name
    files = [each / "checkpoints" / f"step_{STEPS:06d}" / "hf" / "model.safetensors" for each in (one, other)]
    assert files[0].read_bytes() == files[1].read_bytes()
