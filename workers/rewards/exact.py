"""Reward of 1 for exactly the reference answer."""

from workers.rewards.base import Score


def exact_reward(prompt: str, response: str, answer: str) -> Score:
    """Return 1 when response and answer are equal apart from space around them, else 0."""
    correct = response.strip() == answer.strip()
    return Score(float(correct), correct)
