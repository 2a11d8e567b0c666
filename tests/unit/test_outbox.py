"""Finished responses are scored and put while generation goes on."""

import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from asyncflow.errors import LeaseFenced, UserCodeFailed
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from tq.client.lease import Lease
from tq.columns import Column, PackedBatch
from tq.messages import LeaseGrant
from workers.data.tokenizer import load_tokenizer
from workers.engines.base import Generation
from workers.records.samples import KeptGroups, SampleLog
from workers.rewards.base import Response, Score
from workers.rewards.group_filter import GroupFilter
from workers.rewards.load_reward import exact_reward
from workers.rewards.scorer import GroupReward, ScoredResponse, Scorer
from workers.rollout.outbox import Outbox, RolloutLease
from workers.rollout.rollouts import single_turn
from workers.rows.finished import FinishedRollout, RolloutRequest
from workers.rows.packed_rows import TokenSets, TopTokens, samples_of, sequences_of
from workers.settings.dataflow import KEPT_COLUMNS, ROLLOUT_TOP_COLUMNS
from workers.settings.rewards import RewardConfig

DEADLINE_S = 30


class Queue:
    """Remembers puts; stands in for a client's data plane."""

    def __init__(self, error: Exception | None = None) -> None:
        self.puts: list[tuple[list[int], Mapping[str, Column]]] = []
        self.filtered: list[list[int]] = []
        self.arrived = threading.Semaphore(0)
        self.error = error

    def put(self, granted: LeaseGrant, rows: Sequence[int], columns: Mapping[str, Column]) -> None:
        assert granted.token == 7
        if self.error is not None:
            raise self.error
        self.puts.append((list(rows), columns))
        self.arrived.release()

    def filter_groups(self, granted: LeaseGrant, rows: Sequence[int], *, failures: int = 0) -> None:
        assert granted.token == 7
        self.filtered.append(list(rows))


class GatedScorer(Scorer):
    """Scores a prompt of token `blocked` only when `open` is set."""

    blocked = 3

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(RewardConfig(function="exact"), tokenizer)
        self.open = threading.Event()
        self._function = self._gated

    def _gated(self, one: Response) -> Score:
        if one.prompt == self._decoder.decode_response((self.blocked,)):
            assert self.open.wait(DEADLINE_S)
        return exact_reward(one.prompt, one.response, one.ground_truth)


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return Path(load_config(find_recipe("quickstart")).model.path)


@pytest.fixture
def scorer(model_dir: Path) -> Iterator[GatedScorer]:
    scorer = GatedScorer(load_tokenizer(model_dir))
    yield scorer
    scorer.open.set()
    scorer.close()


@pytest.fixture
def samples(tmp_path: Path) -> Iterator[SampleLog]:
    log = SampleLog(tmp_path, "rollout-0", kept=KeptGroups(8, 32), now=lambda: (0, 1.0))
    yield log
    log.close()


def test_samples_whose_directory_cannot_be_made_cost_the_run_nothing(tmp_path: Path) -> None:
    SampleLog(tmp_path / "gone", "rollout-0", kept=KeptGroups(8, 32), now=lambda: (0, 1.0)).close()
    assert not (tmp_path / "gone").exists()


def lease(client: Queue, *prompts: int) -> RolloutLease:
    rows = list(range(10, 10 + len(prompts)))
    granted = LeaseGrant("actor_rollout", 7, 1, rows, [0] * len(rows), ["storage-0"] * len(rows))
    columns = {
        "prompts": Column.of_rows([torch.tensor([token]) for token in prompts]),
        "ground_truth": Column.of_texts(["-"] * len(rows)),
    }
    return RolloutLease(Lease(client, granted), PackedBatch(tuple(rows), columns, (0,) * len(rows)))


def response(index: int) -> Generation:
    versions = torch.tensor([3, 4], dtype=torch.int32)
    return Generation(index, torch.tensor([4, 1]), torch.tensor([-1.0, -2.0]), versions, truncated=False)


def rolled(lease: RolloutLease, generation: Generation) -> FinishedRollout:
    return single_turn(lease.prompts[lease.position[generation.index]], generation)


def test_slow_reward_holds_up_neither_generation_nor_other_responses(scorer: GatedScorer, samples: SampleLog) -> None:
    client = Queue()
    one, outbox = lease(client, 3, 5, 6, 7), Outbox(scorer=scorer, samples=samples, rows_per_put=2)
    for index in (10, 11, 12, 13):
        outbox.add_rollout(one, rolled(one, response(index)))
    assert client.arrived.acquire(timeout=DEADLINE_S)
    assert 10 not in client.puts[0][0] and len(client.puts[0][0]) == 2
    scorer.open.set()
    outbox.close(stop=threading.Event())
    assert sorted(row for rows, _ in client.puts for row in rows) == [10, 11, 12, 13]
    for rows, columns in client.puts:
        assert columns["versions"].values.tolist() == [3, 4] * len(rows)
        assert columns["rewards"].values.tolist() == [1.0] * len(rows)
        assert all(len(column) == len(rows) for column in columns.values())


def test_last_responses_are_put_without_a_whole_group(samples: SampleLog) -> None:
    client = Queue()
    one, outbox = lease(client, 5, 6, 7), Outbox(scorer=None, samples=samples, rows_per_put=2)
    for index in (12, 10, 11):
        outbox.add_rollout(one, rolled(one, response(index)))
    outbox.close(stop=threading.Event())
    assert [rows for rows, _ in client.puts] == [[12, 10], [11]]
    assert "rewards" not in client.puts[0][1]


def test_stop_leaves_unscored_responses_behind(scorer: GatedScorer, samples: SampleLog) -> None:
    client, stop = Queue(), threading.Event()
    one, outbox = lease(client, 3, 5), Outbox(scorer=scorer, samples=samples, rows_per_put=2)
    outbox.add_rollout(one, rolled(one, response(10)))
    stop.set()
    outbox.close(stop=stop)
    assert client.puts == []


@pytest.mark.parametrize(("error", "expected"), [(LeaseFenced("void"), None), (ValueError("broken"), ValueError)])
def test_void_lease_is_dropped_and_other_errors_are_raised(
    samples: SampleLog, error: Exception, expected: type[Exception] | None
) -> None:
    client = Queue(error)
    one, outbox = lease(client, 5), Outbox(scorer=None, samples=samples, rows_per_put=1)
    outbox.add_rollout(one, rolled(one, response(10)))
    if expected is None:
        outbox.close(stop=threading.Event())
    else:
        with pytest.raises(expected):
            outbox.close(stop=threading.Event())


def test_failure_wakes_whoever_would_not_look(samples: SampleLog) -> None:
    failed = threading.Event()
    client = Queue(ValueError("broken"))
    one, outbox = (
        lease(client, 5),
        Outbox(scorer=None, samples=samples, rows_per_put=1, failed=failed.set),
    )
    outbox.check()
    outbox.add_rollout(one, rolled(one, response(10)))
    assert failed.wait(DEADLINE_S)
    with pytest.raises(ValueError, match="broken"):
        outbox.check()


def test_abandoned_responses_are_dropped_also_those_that_are_scored_later(
    scorer: GatedScorer, samples: SampleLog
) -> None:
    client = Queue()
    old, outbox = lease(client, 3, 5, 6), Outbox(scorer=scorer, samples=samples, rows_per_put=2)
    for index in (10, 11):  # the first waits for its score, so the second waits for company
        outbox.add_rollout(old, rolled(old, response(index)))
    outbox.abandon_unsent()
    scorer.open.set()
    new = lease(client, 5, 7)
    for index in (10, 11):
        outbox.add_rollout(new, rolled(new, response(index)))
    outbox.close(stop=threading.Event())
    assert sorted(row for rows, _ in client.puts for row in rows) == [10, 11]


def leased_groups(client: Queue, *groups: int, truths: str = "") -> RolloutLease:
    """A lease of these groups' rows, 10, 11, ...; `response()` gives "c"; `truths` are the rows' ground truths."""
    rows = list(range(10, 10 + len(groups)))
    granted = LeaseGrant("actor_rollout", 7, 1, rows, list(groups), ["storage-0"] * len(rows))
    columns = {
        "prompts": Column.of_rows([torch.tensor([5])] * len(rows)),
        "ground_truth": Column.of_texts(list(truths) or ["-"] * len(rows)),
        "tasks": Column.of_texts([json.dumps({"ground_truth": truth}) for truth in truths or "-" * len(rows)]),
    }
    return RolloutLease(Lease(client, granted), PackedBatch(tuple(rows), columns, groups))


class GradedScorer(Scorer):
    """Rewards 1 only for the responses that are named; cannot score others."""

    good: frozenset[str] = frozenset()
    bad: frozenset[str] = frozenset()

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(RewardConfig(), tokenizer)
        self._function = self._graded

    def _graded(self, one: Response) -> Score:
        if one.response in self.bad:
            raise UserCodeFailed("no idea")
        return Score(float(one.response in self.good), False)


def test_groups_of_equal_rewards_are_filtered_and_the_others_put_as_wholes(model_dir: Path, samples: SampleLog) -> None:
    client, scorer = Queue(), GradedScorer(load_tokenizer(model_dir))
    scorer.good = frozenset({scorer._decoder.decode_response((4, 1)), scorer._decoder.decode_response((6, 1))})
    one = leased_groups(client, 0, 0, 1, 1, 2, 2, 3)  # of group 3 one response is all that is left
    outbox = Outbox(
        scorer=scorer, samples=samples, rows_per_put=2, group_filter=GroupFilter("zero_variance", group_size=2)
    )
    tokens = {10: 4, 11: 5, 12: 4, 13: 6, 14: 7, 15: 8, 16: 9}
    versions = torch.tensor([3, 4], dtype=torch.int32)
    for index in (12, 10, 14, 16, 15, 13, 11):
        response = torch.tensor([tokens[index], 1])
        outbox.add_rollout(
            one, rolled(one, Generation(index, response, torch.tensor([-1.0, -2.0]), versions, truncated=False))
        )
    outbox.close(stop=threading.Event())
    scorer.close()
    assert sorted(sorted(rows) for rows, _ in client.puts) == [[10, 11], [16]]
    assert sorted(sorted(rows) for rows in client.filtered) == [[12, 13], [14, 15]]


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_ranks.py").write_text(RANKS)
    monkeypatch.chdir(tmp_path)


RANKS = """
def rank(task, members):
    if task["ground_truth"] == "6":
        return [0.0] * (len(members) - 1)
    if task["ground_truth"] == "8":
        raise RuntimeError("no idea")
    order = sorted(members, key=lambda one: (one["reward"], one["response"]))
    return [order.index(one) / 10 for one in members]

async def nan(task, members):
    return [float("nan") for _ in members]
"""


def put_rewards(client: Queue) -> dict[int, float]:
    return {
        row: round(reward, 3)
        for rows, columns in client.puts
        for row, reward in zip(rows, columns["rewards"].values.tolist(), strict=True)
    }


def test_a_function_rewards_the_members_of_each_whole_group(
    model_dir: Path, samples: SampleLog, ranks: None, caplog: pytest.LogCaptureFixture
) -> None:
    client, scorer = Queue(), GradedScorer(load_tokenizer(model_dir))
    texts = {token: scorer._decoder.decode_response((token, 1)) for token in range(4, 8)}
    scorer.good, scorer.bad = frozenset({texts[7]}), frozenset({texts[6]})
    one = leased_groups(client, *[0] * 4, *[1] * 4, *[2] * 4, 3, truths="4444666688884")
    told: list[str] = []
    config = RewardConfig(group_function="my_ranks:rank")
    group_reward = GroupReward(config, group_size=4, failed=told.append)
    outbox = Outbox(scorer=scorer, samples=samples, rows_per_put=4, group_reward=group_reward)
    versions = torch.tensor([3, 4], dtype=torch.int32)
    for index in (12, 10, 13, 11, *range(14, 23)):
        response = torch.tensor([4 + (index - 10) % 4, 1])  # of each group: two at 0, one without a reward, one at 1
        outbox.add_rollout(
            one, rolled(one, Generation(index, response, torch.tensor([-1.0, -2.0]), versions, truncated=False))
        )
    outbox.close(stop=threading.Event())
    group_reward.close()
    scorer.close()
    rewards = put_rewards(client)
    assert sorted(map(sorted, (rows for rows, _ in client.puts))) == [[*range(k, k + 4)] for k in (10, 14, 18)] + [[22]]
    assert [rewards[row] for row in (10, 11, 13)] == [0.0, 0.1, 0.2]
    assert {row for row, reward in rewards.items() if math.isnan(reward)} == {12, *range(14, 23)}
    raised, wrong = sorted(told)
    assert raised.startswith("reward.group_function: my_ranks:rank raised RuntimeError: no idea on 3 responses to ")
    assert wrong.startswith("reward.group_function: my_ranks:rank returned [0.0, 0.0] for 3 responses; return a list")


def test_a_groups_rewards_replace_those_of_turns(ranks: None) -> None:
    group_reward = GroupReward(RewardConfig(group_function="my_ranks:rank"), group_size=2, failed=print)
    one = leased_groups(Queue(), 0, 0)
    rollouts = [rolled(one, response(index)) for index in (10, 11)]
    scores = [ScoredResponse("p", text, "4", 3.0, True, turn_rewards=(1.0, 2.0)) for text in ("a", "b")]
    rewarded = group_reward.reward_group('{"ground_truth": "4"}', rollouts, scores).result(DEADLINE_S)
    group_reward.close()
    assert [(score.reward, score.turn_rewards) for score in rewarded] == [(0.0, ()), (0.1, ())]


def test_a_function_that_says_nan_rewards_nobody(model_dir: Path, samples: SampleLog, ranks: None) -> None:
    client, scorer, told = Queue(), GradedScorer(load_tokenizer(model_dir)), []  # type: Queue, GradedScorer, list[str]
    one = leased_groups(client, 0, 0)
    config = RewardConfig(group_function="my_ranks:nan")
    group_reward = GroupReward(config, group_size=2, failed=told.append)
    outbox = Outbox(scorer=scorer, samples=samples, rows_per_put=2, group_reward=group_reward)
    for index in (10, 11):
        outbox.add_rollout(one, rolled(one, response(index)))
    outbox.close(stop=threading.Event())
    group_reward.close()
    scorer.close()
    assert all(map(math.isnan, put_rewards(client).values()))
    assert "returned [nan, nan] for 2 responses" in told[0]


def test_groups_that_are_rewarded_after_the_run_went_back_are_dropped(model_dir: Path, samples: SampleLog) -> None:
    class Later:
        def __init__(self) -> None:
            self.asked = threading.Event()
            self.scores: Future[Any] = Future()

        def reward_group(self, task: str, rollouts: Any, scores: Any) -> "Future[Any]":
            self.given = scores
            self.asked.set()
            return self.scores

    client, scorer, later = Queue(), GradedScorer(load_tokenizer(model_dir)), Later()
    group_reward: Any = later
    outbox = Outbox(scorer=scorer, samples=samples, rows_per_put=2, group_reward=group_reward)
    one = leased_groups(client, 0, 0)
    for index in (10, 11):
        outbox.add_rollout(one, rolled(one, response(index)))
    assert later.asked.wait(DEADLINE_S)
    outbox.abandon_unsent()
    later.scores.set_result(later.given)
    outbox.close(stop=threading.Event())
    scorer.close()
    assert client.puts == []


def test_responses_without_a_reward_are_no_part_of_what_is_filtered_and_are_put(
    model_dir: Path, samples: SampleLog
) -> None:
    client, scorer = Queue(), GradedScorer(load_tokenizer(model_dir))
    text = {token: scorer._decoder.decode_response((token, 1)) for token in (4, 5, 6, 7)}
    scorer.good, scorer.bad = frozenset({text[4]}), frozenset({text[6], text[7]})
    one = leased_groups(client, *[0] * 3, *[1] * 3, *[2] * 3)
    outbox = Outbox(
        scorer=scorer, samples=samples, rows_per_put=3, group_filter=GroupFilter("zero_variance", group_size=3)
    )
    versions = torch.tensor([3, 4], dtype=torch.int32)
    for index, token in enumerate((4, 5, 6, 4, 4, 6, 6, 7, 6), start=10):
        response = torch.tensor([token, 1])
        outbox.add_rollout(
            one, rolled(one, Generation(index, response, torch.tensor([-1.0, -2.0]), versions, truncated=False))
        )
    outbox.close(stop=threading.Event())
    scorer.close()
    assert [sorted(rows) for rows in client.filtered] == [[13, 14, 15]], "both that have a reward have the same one"
    put = {
        row: reward
        for rows, columns in client.puts
        for row, reward in zip(rows, columns["rewards"].values.tolist(), strict=True)
    }
    assert {row for row, reward in put.items() if math.isnan(reward)} == {12, 16, 17, 18}
    assert (put[10], put[11]) == (1.0, 0.0)


def test_a_group_that_leaves_takes_no_other_groups_rollouts_with_it(scorer: GatedScorer, samples: SampleLog) -> None:
    """One of its rollouts failed; the others come later, together with those of the next group."""
    client = Queue()
    rows = [10, 11, 12, 13]
    granted = LeaseGrant("actor_rollout", 7, 1, rows, [0, 0, 1, 1], ["storage-0"] * 4)
    columns = {
        "prompts": Column.of_rows([torch.tensor([token]) for token in (5, 6, 7, 5)]),
        "ground_truth": Column.of_texts(["-"] * 4),
    }
    one = RolloutLease(Lease(client, granted), PackedBatch(tuple(rows), columns, (0, 0, 1, 1)))
    outbox = Outbox(scorer=scorer, samples=samples, rows_per_put=2)
    outbox.add_rollout(one, replace(rolled(one, response(10)), leaves=True, failures=3, failure="it broke"))
    for index in (12, 11, 13):
        outbox.add_rollout(one, rolled(one, response(index)))
    outbox.close(stop=threading.Event())
    assert sorted(row for put, _ in client.puts for row in put) == [12, 13]
    assert sorted(row for filtered in client.filtered for row in filtered) == [10, 11]


def test_rewards_and_numbers_of_turns_are_put_where_a_task_reads_them(
    model_dir: Path, samples: SampleLog, tmp_path: Path
) -> None:
    """One reward is the last turn's; a rollout that drew nothing has one turn; a failed reward is NaN in all turns."""
    client, scorer = Queue(), Scorer(RewardConfig(function="exact"), load_tokenizer(model_dir), has_parts=True)
    one = lease(client, 5, 6, 7, 8)
    request = RolloutRequest(12, 12, 0, torch.tensor([7]))
    of_two: dict[str, Any] = {"turn_ids_A": torch.tensor([0, 1], dtype=torch.int32), "num_trained_turns": 2}
    made = [
        replace(rolled(one, response(10)), **of_two, reward=1.25, turn_rewards=[0.25, 1.0], response="x"),
        replace(rolled(one, response(11)), **of_two, reward=0.5, response="x"),
        FinishedRollout.without_tokens(request, reward=0.0),
        replace(rolled(one, response(13)), **of_two, reward=math.nan, response="x"),
    ]
    outputs = ("rewards", "turn_ids", "turn_rewards")
    outbox = Outbox(scorer=scorer, samples=samples, rows_per_put=4, outputs=outputs)
    for rollout in made:
        outbox.add_rollout(one, rollout)
    outbox.close(stop=threading.Event())
    ((rows, columns),) = client.puts
    assert rows == [10, 11, 12, 13]
    assert [row.tolist() for row in columns["turn_ids"].rows()] == [[0, 1], [0, 1], [], [0, 1]]
    rewards = [row.tolist() for row in columns["turn_rewards"].rows()]
    assert rewards[:3] == [[0.25, 1.0], [0.0, 0.5], [0.0]] and all(map(math.isnan, rewards[3]))
    assert columns["turn_ids"].values.dtype == torch.int32 and columns["rewards"].values[0] == 1.25
    assert columns["turn_rewards"].values.dtype == torch.float64  # sums of float32 would not be equal
    assert columns["reward_parts"].objects()[0] == {"turn_1": 0.25, "turn_2": 1.0}
    written = (tmp_path / "samples" / "rollout-0.jsonl").read_text().splitlines()
    lines = list(map(json.loads, written))
    assert [line.get("turn_rewards") for line in lines] == [[0.25, 1.0], None, None, None]
    assert lines[0]["reward"] == 1.25
    scorer.close()


def test_groups_whose_turns_differ_are_trained_though_their_sums_are_equal(model_dir: Path, samples: SampleLog) -> None:
    client, scorer = Queue(), Scorer(RewardConfig(function="exact"), load_tokenizer(model_dir), has_parts=True)
    one = leased_groups(client, 0, 0, 1, 1)
    turns = {10: [1.0, 0.0], 11: [0.0, 1.0], 12: [1.0, 0.0], 13: [1.0, 0.0]}
    judge, outputs = GroupFilter("zero_variance", group_size=2), ("rewards", "turn_ids", "turn_rewards")
    outbox = Outbox(scorer=scorer, samples=samples, rows_per_put=2, group_filter=judge, outputs=outputs)
    of_two: dict[str, Any] = {"turn_ids_A": torch.tensor([0, 1], dtype=torch.int32), "num_trained_turns": 2}
    for index, own in turns.items():
        outbox.add_rollout(one, replace(rolled(one, response(index)), **of_two, reward=1.0, turn_rewards=own))
    outbox.close(stop=threading.Event())
    scorer.close()
    assert [rows for rows, _ in client.puts] == [[10, 11]] and client.filtered == [[12, 13]]


@pytest.mark.parametrize("names", [KEPT_COLUMNS, ROLLOUT_TOP_COLUMNS])
def test_columns_of_an_engines_tokens_are_put_also_where_no_rollout_has_any(
    samples: SampleLog, names: tuple[str, str]
) -> None:
    """A row is ready only with all columns of its task, so a put without them would never be trained."""
    client = Queue()
    one = lease(client, 5, 6)
    reports = {
        "kept": TokenSets(torch.tensor([5, 6, 5], dtype=torch.int32), torch.tensor([2, 1], dtype=torch.int32)),
        "top": TopTokens(torch.tensor([[5, 6], [5, 7]], dtype=torch.int32), torch.tensor([[-0.5, -1.0], [-0.1, -3.0]])),
    }
    drew = replace(rolled(one, response(10)), **reports)
    empty = FinishedRollout.without_tokens(RolloutRequest(11, 11, 0, torch.tensor([6])), reward=0.0)
    outbox = Outbox(scorer=None, samples=samples, rows_per_put=1, outputs=names)
    for rollout in (drew, empty):
        outbox.add_rollout(one, rollout)
    outbox.close(stop=threading.Event())
    parts = {rows[0]: columns for rows, columns in client.puts}
    assert parts[10].keys() == parts[11].keys() > set(names)
    assert [len(column.values) for name, column in parts[11].items() if name in names] == [0, 0]
    assert all(parts[10][name].values.dtype == parts[11][name].values.dtype for name in names)
    together = {name: Column.concatenate([parts[11][name], parts[10][name]]) for name in parts[10]}
    both = samples_of(PackedBatch((11, 10), together, (0, 0)))
    found = sequences_of(both, others=names[0] if names == ROLLOUT_TOP_COLUMNS else None)
    sets = found.others or found.kept
    assert sets is not None and sets.ids_P.tolist() == ([5, 6, 5] if names == KEPT_COLUMNS else [5, 6, 5, 7])
    assert sets.counts_A.tolist() == ([2, 1] if names == KEPT_COLUMNS else [2, 2])
