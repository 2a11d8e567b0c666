"""Gymnasium's environments of text as rollouts."""

from collections.abc import Iterator
from typing import Any

import pytest

from asyncflow.errors import ConfigError, UserCodeFailed
from tests.support.policies import played

gymnasium: Any = pytest.importorskip("gymnasium", reason="pip install -e '.[gymnasium]'")
from workers.agents.gymnasium import Episodes, TextEnvironment  # noqa: E402

closed: list[int] = []


class Digits(gymnasium.Env):  # type: ignore[misc]
    """Says a number; wants it back."""

    observation_space = action_space = gymnasium.spaces.Text(100)

    def __init__(self, most: int = 1000, shape: Any = str) -> None:
        self._most, self._shape = most, shape

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._number = str(self.np_random.integers(self._most))
        return self._shape(self._number), {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        right = action == self._number
        return f"Not {action}!", 1.0 if right else -0.5, right, False, {}

    def close(self) -> None:
        closed.append(self._most)


@pytest.fixture(autouse=True)
def digits() -> Iterator[None]:
    gymnasium.register("Digits-v0", entry_point=Digits, max_episode_steps=3)
    closed.clear()
    yield
    del gymnasium.registry["Digits-v0"]


def test_an_episode_is_a_rollout_whose_rewards_add_up() -> None:
    row = Episodes("Digits-v0", instruction="Repeat.", most=10).task(0, 0)
    number = played(TextEnvironment, "a", task=row).last.messages[1]["content"]
    game = played(TextEnvironment, "a", f" {number}\n", "never", task=row)
    assert game.sample.reward == [-0.5, 1.0]
    assert [message["content"] for message in game.last.messages] == ["Repeat.", number, "a", "Not a!"]
    assert closed == [10, 10, 10]


def test_an_episode_that_gymnasium_cuts_ends_the_rollout() -> None:
    game = played(TextEnvironment, "a", "b", "c", "never", task={"env": "Digits-v0"})
    assert (game.sample.reward, game.sample.node) == ([-0.5] * 3, 3)


def test_tasks_are_a_function_of_seed_and_index() -> None:
    rows = [Episodes("Digits-v0").task(seed, index) for seed, index in ((1, 2), (1, 2), (1, 3), (2, 2))]
    assert rows[0] == rows[1]
    assert len({row["seed"] for row in rows}) == 3


def test_an_observation_that_is_no_text_is_named() -> None:
    with pytest.raises(UserCodeFailed, match=r"^Digits-v0: an observation is int, not text"):
        played(TextEnvironment, "a", task={"env": "Digits-v0", "options": {"shape": int}})
    assert closed == [1000]


def test_an_environment_that_cannot_be_made_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^env: 'Digit-v0' cannot be made with {'most': 3}: NameNotFound"):
        Episodes("Digit-v0", most=3)
