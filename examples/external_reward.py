"""A reward service outside of a run: leases responses, writes rewards back. Start as many as you like, at any time.

    asyncflow-launch --roles rollout:1,actor:1,reward:0 --run-dir runs/mine    a run that is scored from outside
    python examples/external_reward.py runs/mine

Ends with the run. One that leaves or is killed costs nothing: others get what it had in hand, or it does, once it is
back. From another host: `asyncflow.connect("HOST:PORT", key)`.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # at the end of a run the store is gone: no traces of that

import yaml
from transformers import AutoTokenizer

import asyncflow
from asyncflow.errors import AsyncFlowError


def score(response: str, truth: str) -> float:
    """Return the share of characters that are right, and in place."""
    right = sum(given == wanted for given, wanted in zip(response, truth, strict=False))
    return right / max(len(response), len(truth), 1)


def serve(run_dir: Path) -> None:
    """Score until the run ends."""
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    tokenizer = AutoTokenizer.from_pretrained(config["model"]["path"])
    with asyncflow.connect(run_dir, name=f"reward-{os.getpid()}") as run:
        for lease in run.stream("rewards", num_rows=64):
            responses = [text.strip() for text in tokenizer.batch_decode(lease.responses, skip_special_tokens=True)]
            truths = [text.strip() for text in lease["ground_truth"].texts()]
            rewards = [score(*pair) for pair in zip(responses, truths, strict=True)]
            correct = [response == truth for response, truth in zip(responses, truths, strict=True)]
            if lease.put({"rewards": rewards, "correct": correct}):
                print(f"scored {len(lease)} responses of step {lease.partition}", flush=True)  # noqa: T201
                run.log({"mean": sum(rewards) / len(rewards)})


try:
    serve(Path(sys.argv[1]))
except AsyncFlowError as error:
    sys.exit(f"Error: {error}")
