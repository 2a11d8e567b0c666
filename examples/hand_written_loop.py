"""A training loop written by hand, in one process: generate, score, update, publish. Learns the quickstart's sums.

    python examples/hand_written_loop.py [STEPS]

The calls are those of AsyncFlow's paper (section 5). Rows go through a queue, so any of the four parts may move into
threads of its own: `engines.queue.client("name")`. Another way to generate or to update: a subclass of
`asyncflow.LocalEngines`, `trainer.init_engines(Mine)`. What a loop by hand lacks (rollouts that go on while the trainer
works, checkpoints, recovery) has `trainer.fit()`.
"""

import json
import random
import sys
from pathlib import Path

import asyncflow


def score(response: str, truth: str) -> float:
    """Return half for the exact ground truth, and half for the share of characters that are right and in place."""
    right = sum(given == wanted for given, wanted in zip(response, truth, strict=False))
    return 0.5 * (response == truth) + 0.5 * right / max(len(response), len(truth))


def main(steps: int = 40) -> float:
    """Train; return the accuracy of the last step."""
    trainer = asyncflow.Trainer("quickstart", overrides={"algorithm.kl_coef": 0.0}, steps=steps)
    with Path(trainer.config.data.path or "").open() as file:
        rows = [json.loads(line) for line in file]
    chance, figures = random.Random(0), {"accuracy": 0.0}
    with trainer.init_engines() as engines:
        for _ in range(steps):
            engines.put_prompts_data(chance.sample(rows, 32))
            prompts = engines.get_experience_data("actor_rollout")
            engines.put_experience_data(prompts, engines.generate_sequences(prompts))

            batch = engines.get_experience_data("rewards")
            pairs = zip(engines.responses(batch), batch["ground_truth"].texts(), strict=True)
            rewards = [score(response.strip(), truth.strip()) for response, truth in pairs]
            engines.put_experience_data(batch, {"rewards": rewards, "correct": [reward == 1 for reward in rewards]})

            batch = engines.get_experience_data("actor_train")
            figures = engines.update(batch)
            engines.put_experience_data(batch)
            engines.weight_sync_notify()
            print("  ".join(f"{name} {value:.3g}" for name, value in figures.items()), flush=True)  # noqa: T201
    return figures["accuracy"]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
