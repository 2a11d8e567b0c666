"""Rewards per turn, and rollouts whose turns are spread over samples, against loops in plain Python (float64)."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from asyncflow.errors import ConfigError
from tq.columns import Column, PackedBatch
from workers.algorithms.algorithm import GRPO, Algorithm
from workers.algorithms.load_algorithm import load_algorithm, outside_algorithm
from workers.records.step_totals import StepTotals
from workers.rows.packed_rows import samples_of
from workers.settings.algorithms import AlgorithmConfig, GRPOConfig
from workers.settings.rollout import RolloutConfig

Turns = Sequence[tuple[int, int]]
"""(number of the turn, tokens that it drew), as they lie in a sample."""


class Rollout(NamedTuple):
    samples: Sequence[Turns]
    rewards: Sequence[float]  # of each turn; NaN: it has no reward

    @property
    def order(self) -> list[tuple[int, int]]:
        """(turn, token within it) of each drawn token as it is stored."""
        return [(turn, k) for sample in self.samples for turn, tokens in sample for k in range(tokens)]


NAN = math.nan
ROLLOUTS = (
    Rollout([[(0, 2), (1, 1)]], [0.5, 1.0]),
    # A sub-agent's turns, 1 and 2, between the two turns of its caller, which is the second sample
    Rollout([[(1, 1), (2, 2)], [(0, 1), (3, 2)]], [0.0, -1.0, 0.25, 2.0]),
    Rollout([[(0, 3)]], [1.5]),
    # Three samples: none continues the tokens of the one before
    Rollout([[(0, 1)], [(1, 2)], [(2, 1)]], [0.0, 0.0, 1.0]),
    Rollout([[]], [0.0]),  # it failed, and counts with reward 0
    Rollout([[(0, 1), (1, 2)]], [NAN, NAN]),
)
GROUP = 3


def number(seed: int, rollout: int, turn: int, token: int) -> float:
    """A number that belongs to a token, wherever it is stored."""
    return round(math.sin(7.3 * seed + 3.1 * rollout + 1.7 * turn + 0.9 * token), 3)


def rows_of(rollouts: Sequence[Rollout]) -> PackedBatch:
    tokens = [torch.tensor([turn for turn, _ in one.order], dtype=torch.int32) for one in rollouts]
    drawn = torch.tensor([len(row) for row in tokens], dtype=torch.int32)

    def column(seed: int) -> Column:
        each = [number(seed, k, *place) for k, one in enumerate(rollouts) for place in one.order]
        return Column(torch.tensor(each, dtype=torch.float64), drawn)

    lengths = [torch.tensor([1 + sum(n for _, n in sample) for sample in one.samples]) for one in rollouts]
    masks = [
        torch.tensor([b for sample in one.samples for b in (0, *[1] * sum(n for _, n in sample))]) for one in rollouts
    ]
    rewards = torch.tensor([sum(one.rewards) for one in rollouts])
    columns = {
        "tokens": Column.of_rows([mask.long() for mask in masks]),
        "sample_lengths": Column.of_rows([row.int() for row in lengths]),
        "response_mask": Column.of_rows([mask.to(torch.uint8) for mask in masks]),
        "turn_ids": Column.of_rows(tokens),
        "turn_rewards": Column.of_rows([torch.tensor(one.rewards, dtype=torch.float64) for one in rollouts]),
        "rewards": Column.of_scalars(rewards),
        "correct": Column.of_scalars(rewards >= 1),
        "truncated": Column.of_scalars(torch.zeros(len(rollouts), dtype=torch.bool)),
        "versions": Column(torch.zeros(int(drawn.sum()), dtype=torch.int32), drawn),
        "values": column(1),
        "old_log_probs": column(2),
        "ref_log_probs": column(3),
    }
    return PackedBatch(tuple(range(len(rollouts))), columns)


def make(**settings: Any) -> Algorithm[Any]:
    config: Any = TypeAdapter(AlgorithmConfig).validate_python(settings)
    return load_algorithm(config, RolloutConfig(max_response_tokens=8, function="tools", max_drawn_tokens=8))


def found(algorithm: Algorithm[Any], rollouts: Sequence[Rollout], name: str = "advantages") -> dict[Any, float]:
    """Return (rollout, turn, token) -> what the algorithm computed for it."""
    column = algorithm.advantages(rows_of(rollouts), group_size=GROUP)[name]
    rows = [row.tolist() for row in column.rows()] if column.rank else [[x] for x in column.values.tolist()]
    places = [[(k, *place) for place in one.order] for k, one in enumerate(rollouts)]
    spread = [row if len(row) == len(own) else row * len(own) for row, own in zip(rows, places, strict=True)]
    return {
        place: value for own, row in zip(places, spread, strict=True) for place, value in zip(own, row, strict=True)
    }


def to_go(one: Rollout, turn: int, gamma: float = 1.0, rewards: Sequence[float] | None = None) -> float:
    return sum(gamma**k * reward for k, reward in enumerate((rewards or one.rewards)[turn:]))


def by_turn(
    rollouts: Sequence[Rollout],
    compare: Callable[[float, list[float]], float],
    gamma: float = 1.0,
    rewards: Sequence[Sequence[float]] = (),
) -> dict[Any, float]:
    """Compare each turn's return-to-go with those of the group's other rollouts that have such a turn and a reward."""
    rewards = rewards or [one.rewards for one in rollouts]
    expected = {}
    for k, one in enumerate(rollouts):
        group = range(k - k % GROUP, k - k % GROUP + GROUP)
        for turn, token in one.order:
            others = [
                to_go(rollouts[j], turn, gamma, rewards[j])
                for j in group
                if len(rewards[j]) > turn and not math.isnan(rewards[j][0])
            ]
            own = to_go(one, turn, gamma, rewards[k])
            expected[k, turn, token] = 0.0 if math.isnan(own) or len(others) < 2 else compare(own, others)
    return expected


def standardized(own: float, group: list[float]) -> float:
    return (own - statistics.mean(group)) / (statistics.stdev(group) + 1e-6)


def left_out(own: float, group: list[float]) -> float:
    return own - (sum(group) - own) / (len(group) - 1)


def agree(got: dict[Any, float], expected: dict[Any, float]) -> None:
    assert got.keys() == expected.keys()
    assert list(got.values()) == pytest.approx([expected[place] for place in got], rel=1e-5, abs=1e-6)


# One reward for the rollout (`credit: rollout`).


@pytest.mark.parametrize("name", ["grpo", "dapo", "rloo", "cispo"])
def test_a_rollout_of_three_samples_is_one_member_of_its_group(name: str) -> None:
    """Its reward is in the group's mean and deviation once, and each of its tokens has its one advantage."""
    cut = [Rollout([[(0, 1)], [(1, 1)], [(2, 1)]], [0, 0, 1.0]), Rollout([[(0, 1)]], [0.0]), Rollout([[(0, 1)]], [0.5])]
    expected = (left_out if name == "rloo" else standardized)(1.0, [1.0, 0.0, 0.5])
    got = found(make(name=name), cut)
    assert [got[0, turn, 0] for turn in range(3)] == pytest.approx([expected] * 3, rel=1e-5)


def test_a_rollout_of_three_samples_is_one_in_the_metrics() -> None:
    totals = StepTotals()
    totals.add_batch(rows_of(ROLLOUTS[3:4]), step=1, admitted_step=1)
    metrics = totals.to_metrics()
    assert (metrics["samples"], metrics["reward_mean"], metrics["accuracy"]) == (1, 1.0, 1.0)
    assert totals.to_histograms()["reward"] == {"1": 1}


def test_ppo_pays_a_rollout_of_three_samples_once() -> None:
    """One-step errors under a critic that expects nothing are the rewards."""
    three = ROLLOUTS[3]
    rows = rows_of([three])
    rows = rows.with_columns({"values": Column(torch.zeros(4), rows["values"].lengths)})
    ppo = make(name="ppo", gamma=1.0, lam=0.0)
    errors = ppo.advantages(rows, group_size=1)["advantages"].values
    assert errors.tolist() == [0.0, 0.0, 0.0, 1.0]


def token_gae(rewards: dict[Any, float], gamma: float, lam: float, rollouts: Sequence[Rollout]) -> dict[Any, float]:
    """From token to token as they were drawn, wherever they are stored."""
    expected = {}
    for k, one in enumerate(rollouts):
        advantage = later = 0.0
        for turn, token in sorted(one.order, reverse=True):
            value = number(1, k, turn, token)
            advantage = rewards.get((k, turn, token), 0.0) + gamma * later - value + gamma * lam * advantage
            later, expected[k, turn, token] = value, advantage
    return expected


def test_gae_goes_from_token_to_token_across_samples_in_the_order_of_turns() -> None:
    last = {(k, *max(one.order)): sum(one.rewards) for k, one in enumerate(ROLLOUTS) if one.order}
    rewards = {place: 0.0 if math.isnan(reward) else reward for place, reward in last.items()}
    ppo = make(name="ppo", gamma=0.9, lam=0.8)
    agree(found(ppo, ROLLOUTS), token_gae(rewards, 0.9, 0.8, ROLLOUTS))
    penalized = dict(rewards)
    for k, one in enumerate(ROLLOUTS):
        for place in one.order:
            charge = 0.1 * (number(2, k, *place) - number(3, k, *place))
            penalized[k, *place] = rewards.get((k, *place), 0.0) - charge
    charged = make(name="ppo", gamma=0.9, lam=0.8, kl_coef=0.1, kl_placement="reward")
    agree(found(charged, ROLLOUTS), token_gae(penalized, 0.9, 0.8, ROLLOUTS))


def test_rows_of_one_turn_keep_their_bits_without_turn_ids() -> None:
    rows = rows_of([ROLLOUTS[0], ROLLOUTS[2]])
    plain = PackedBatch(rows.indices, {name: rows[name] for name in rows.columns if not name.startswith("turn_")})
    for settings in (
        {"name": "ppo", "gamma": 0.9, "kl_coef": 0.1, "kl_placement": "reward"},
        {"name": "reinforce_plus_plus", "kl_coef": 0.1},
    ):
        algorithm = make(**settings)
        ours, theirs = algorithm.advantages(rows, group_size=1), algorithm.advantages(plain, group_size=1)
        assert all(ours[name].values.equal(theirs[name].values) for name in theirs)


# A reward per turn (`credit: turn`).


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("name", ["grpo", "cispo", "dppo", "dapo"])
def test_a_turns_return_to_go_is_compared_with_the_groups_from_the_same_turn_on(name: str, gamma: float) -> None:
    agree(found(make(name=name, credit="turn", gamma=gamma), ROLLOUTS), by_turn(ROLLOUTS, standardized, gamma))


def test_dr_grpo_and_rloo_and_reinforce_compare_turns_in_their_way() -> None:
    def centered(own: float, group: list[float]) -> float:
        return own - statistics.mean(group)

    plain = make(name="grpo", credit="turn", scale_advantages_by_std=False)
    agree(found(plain, ROLLOUTS), by_turn(ROLLOUTS, centered))
    baseline = make(name="reinforce_plus_plus", credit="turn", baseline="group")
    agree(found(baseline, ROLLOUTS), by_turn(ROLLOUTS, centered))
    agree(found(make(name="rloo", credit="turn"), ROLLOUTS), by_turn(ROLLOUTS, left_out))
    returns = {
        (k, *place): 0.0 if math.isnan(one.rewards[0]) else to_go(one, place[0], 0.9)
        for k, one in enumerate(ROLLOUTS)
        for place in one.order
    }
    agree(found(make(name="reinforce_plus_plus", credit="turn", gamma=0.9), ROLLOUTS), returns)


def penalty(rollout: int, turn: int, token: int) -> float:
    return 0.1 * (number(2, rollout, turn, token) - number(3, rollout, turn, token))


def test_a_kl_penalty_is_charged_to_the_turn_whose_tokens_cost_it() -> None:
    charged = []
    for k, one in enumerate(ROLLOUTS):
        rewards = list(one.rewards)
        for turn, token in one.order:
            rewards[turn] -= penalty(k, turn, token)
        charged.append(rewards)
    rloo = make(name="rloo", credit="turn", kl_coef=0.1)
    agree(found(rloo, ROLLOUTS), by_turn(ROLLOUTS, left_out, rewards=charged))


@pytest.mark.parametrize("credit", ["rollout", "turn"])
def test_reinforce_charges_each_token_the_penalties_of_all_tokens_drawn_after_it(credit: str) -> None:
    expected = {}
    for k, one in enumerate(ROLLOUTS):
        for place in one.order:
            own = to_go(one, place[0]) if credit == "turn" else sum(one.rewards)
            later = sum(penalty(k, *each) for each in one.order if each >= place)
            expected[k, *place] = (0.0 if math.isnan(own) else own) - later
    agree(found(make(name="reinforce_plus_plus", credit=credit, kl_coef=0.1), ROLLOUTS), expected)


def test_the_price_of_length_is_the_last_turns() -> None:
    charged = []
    for one in ROLLOUTS:
        price = min(0.0, max(-1.0, (8 - 6 - len(one.order)) / 6))
        charged.append([*one.rewards[:-1], one.rewards[-1] + price])
    dapo = make(name="dapo", credit="turn", overlong_buffer_tokens=6)
    agree(found(dapo, ROLLOUTS), by_turn(ROLLOUTS, standardized, rewards=charged))


def turn_rewards() -> dict[Any, float]:
    """At the last token of each turn."""
    ends = {}
    for k, one in enumerate(ROLLOUTS):
        for turn, token in sorted(one.order):
            for earlier in [place for place in ends if place[:2] == (k, turn)]:
                del ends[earlier]
            ends[k, turn, token] = 0.0 if math.isnan(one.rewards[turn]) else one.rewards[turn]
    return ends


def test_ppo_pays_each_turn_at_its_last_token() -> None:
    ppo = make(name="ppo", credit="turn", gamma=0.9, lam=0.8)
    agree(found(ppo, ROLLOUTS), token_gae(turn_rewards(), 0.9, 0.8, ROLLOUTS))


@pytest.mark.parametrize("credit", ["rollout", "turn"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_a_turn_is_one_step_of_gae(credit: str, kl_coef: float) -> None:
    """Its state is that of its first token; all of its tokens have its advantage, and its return as the critic's
    target."""
    settings = {"kl_coef": kl_coef, "kl_placement": "reward"} if kl_coef else {}
    ppo = make(name="ppo", credit=credit, gae_timestep_unit="turn", gamma=0.9, lam=0.8, **settings)
    advantages, targets = {}, {}
    for k, one in enumerate(ROLLOUTS):
        advantage = later = 0.0
        for turn in sorted({turn for turn, _ in one.order}, reverse=True):
            own = [token for number_, token in one.order if number_ == turn]
            if credit == "turn":
                reward = one.rewards[turn]
            else:
                reward = sum(one.rewards) if turn == len(one.rewards) - 1 else 0.0
            reward = 0.0 if math.isnan(reward) else reward
            reward -= sum(penalty(k, turn, token) for token in own) if kl_coef else 0.0
            value = number(1, k, turn, 0)
            advantage = reward + 0.9 * later - value + 0.9 * 0.8 * advantage
            later = value
            for token in own:
                advantages[k, turn, token], targets[k, turn, token] = advantage, advantage + value
    agree(found(ppo, ROLLOUTS), advantages)
    agree(found(ppo, ROLLOUTS, "returns"), targets)


ALL = [
    {"name": "grpo"}, {"name": "grpo", "credit": "turn", "gamma": 0.7}, {"name": "rloo", "kl_coef": 0.1},
    {"name": "rloo", "kl_coef": 0.1, "credit": "turn"}, {"name": "dapo", "overlong_buffer_tokens": 6, "credit": "turn"},
    {"name": "reinforce_plus_plus", "kl_coef": 0.1}, {"name": "reinforce_plus_plus", "kl_coef": 0.1, "credit": "turn"},
    {"name": "ppo", "gamma": 0.9, "lam": 0.8}, {"name": "ppo", "gamma": 0.9, "lam": 0.8, "credit": "turn"},
    {"name": "ppo", "kl_coef": 0.1, "kl_placement": "reward", "credit": "turn", "gae_timestep_unit": "turn"},
]  # fmt: skip


@pytest.mark.parametrize("settings", ALL)
@examples(max_examples=20, deadline=None)
@given(data=st.data())
def test_how_a_rollout_is_cut_into_samples_changes_no_advantage(settings: dict[str, Any], data: st.DataObject) -> None:
    """Turns in any sample, samples in any order: only what was drawn, when, and what it earned counts."""
    sizes = data.draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=3, max_size=3))
    whole = [
        Rollout([list(enumerate(one))], [number(5, k, t, 0) for t in range(len(one))]) for k, one in enumerate(sizes)
    ]
    cut = []
    for one in whole:
        turns, samples = list(one.samples[0]), [[] for _ in range(3)]  # type: list[tuple[int, int]], list[Any]
        for turn in turns:
            samples[data.draw(st.integers(0, 2))].append(turn)
        cut.append(Rollout([sample for sample in samples if sample], one.rewards))
    algorithm = make(**settings)
    agree(found(algorithm, cut), found(algorithm, whole))


def test_outcomes_alone_of_equally_many_turns_are_grpos_to_the_bit() -> None:
    rollouts = [Rollout([[(0, 2), (1, 1)]], [0.0, reward]) for reward in (0.1, 0.7, 0.2)]
    ours, theirs = found(make(name="grpo", credit="turn"), rollouts), found(make(name="grpo"), rollouts)
    assert ours == theirs


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0, 1000.0])
def test_equal_sums_of_different_rewards_teach_nothing(scale: float) -> None:
    """In standard deviations, nothing but their rounding would be left."""
    turns = [[(0, 1), (1, 1)]]
    rollouts = [Rollout(turns, [scale * a, scale * (0.999 - a)]) for a in (0.333, 0.999, 0.111)]
    got = found(make(name="grpo", credit="turn"), rollouts)
    assert [got[k, 0, 0] for k in range(3)] == [0.0] * 3 and got[1, 1, 0] < 0 < got[2, 1, 0]


def test_samples_of_a_row_get_the_advantages_of_their_own_turns() -> None:
    rows = rows_of(ROLLOUTS)
    samples = samples_of(rows.with_columns(make(name="grpo", credit="turn").advantages(rows, group_size=GROUP)))
    expected = by_turn(ROLLOUTS, standardized)
    for place, sample in enumerate([(1, each) for each in ROLLOUTS[1].samples], 1):
        own = samples.select([place])["advantages"].values.tolist()
        assert own == pytest.approx([expected[1, t, k] for t, n in sample[1] for k in range(n)], rel=1e-5)


def test_turns_without_a_token_are_paid_at_the_token_before_them() -> None:
    """Engines draw at least one; a reward must not get lost or into another row, should one not."""
    rollouts = [Rollout([[(0, 1), (2, 1)]], [0.0, 0.5, 1.0]), Rollout([[(1, 2)]], [4.0, 0.0, 0.25])]
    ppo = make(name="ppo", credit="turn", gamma=1.0, lam=0.0)
    rows = rows_of(rollouts)
    rows = rows.with_columns({"values": Column(torch.zeros(4), rows["values"].lengths)})
    errors = ppo.advantages(rows, group_size=1)["advantages"].values
    assert errors.tolist() == [0.5, 1.0, 0.0, 0.25]


# What would train something else than asked for is refused.


@pytest.mark.parametrize("name", ["gspo", "sft", "distill"])
def test_algorithms_without_an_advantage_per_turn_do_not_know_the_setting(name: str) -> None:
    with pytest.raises(ValidationError, match="credit"):
        make(name=name, credit="turn")


def test_a_discount_of_turns_needs_their_credit() -> None:
    with pytest.raises(ValidationError, match="it discounts later turns, with credit turn"):
        make(name="grpo", gamma=0.9)
    assert make(name="ppo", gamma=0.9)


class Inherits(GRPO):
    Config = GRPOConfig


class Ignores(GRPO):
    Config = GRPOConfig

    def advantages(self, batch: PackedBatch, *, group_size: int) -> dict[str, Column]:
        return {"advantages": Column.of_scalars(batch["rewards"].values)}


def test_a_class_of_the_users_that_computes_advantages_must_say_that_it_credits_turns() -> None:
    name = f"{__name__}:"
    assert outside_algorithm(f"{name}Inherits", {"credit": "turn"})[1].credits_turns
    assert not outside_algorithm(f"{name}Ignores", {})[1].credits_turns
    with pytest.raises(ConfigError, match=r"algorithm.credit: turn cannot be used with .*Ignores computes advantages"):
        outside_algorithm(f"{name}Ignores", {"credit": "turn"})
