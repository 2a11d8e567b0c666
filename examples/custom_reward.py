"""A reward of your own: any function of three texts.

    cd examples && asyncflow-launch --set reward.function=custom_reward:score

Called for every response as it finishes, in a child process. Return a number (1 or more counts as correct in the
metrics), a `workers.rewards.base.Score(reward, correct)`, or a dict with `score` and the reward's parts. A response for
which it raises or exceeds `reward.timeout_s` is left out of training.
"""


def score(prompt: str, response: str, ground_truth: str) -> float:
    """Return 1 for the right sum, and a little for any number at all."""
    if response.strip() == ground_truth:
        return 1.0
    return 0.1 if response.strip().isdigit() else 0.0
