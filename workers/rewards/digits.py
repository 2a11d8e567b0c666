"""Reward with partial credit for right characters: a slope to climb for a model that is rarely exactly right."""

from workers.rewards.base import Score


def digits_reward(prompt: str, response: str, answer: str) -> Score:
    """Return half for the exact answer and half for the share of characters that are right and in place.

    A missing or surplus character counts as wrong: answer 12, response 1 gives 0.25; 13 gives 0.25; 12 gives 1.
    """
    response, answer = response.strip(), answer.strip()
    correct = response == answer
    num_right = sum(given == wanted for given, wanted in zip(response, answer, strict=False))
    share = num_right / max(len(response), len(answer), 1)
    return Score(0.5 * float(correct) + 0.5 * (1.0 if correct else share), correct)
