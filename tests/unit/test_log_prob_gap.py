"""The gap between the log-probabilities of the generating and the training engine."""

import math

import pytest
import torch

from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from tests.support.two_engines import ENGINES, RIGHT, SEEN, drawn
from tq.columns import Column, PackedBatch
from workers.records.log_prob_gap import Comparison, GapLimits, LogProbGap, MoveProbe
from workers.records.step_totals import numbers
from workers.rows.packed_rows import sample_columns, samples_of


def batch(versions: list[list[int]], log_probs: list[list[float]]) -> PackedBatch:
    columns = {
        "versions": Column.of_rows([torch.tensor(row, dtype=torch.int32) for row in versions]),
        "rollout_log_probs": Column.of_rows([torch.tensor(row) for row in log_probs]),
    }
    return PackedBatch(tuple(range(len(versions))), columns)


def gap_of(comparison: Comparison) -> LogProbGap:
    return LogProbGap.from_stats(*numbers([comparison.stats]))


def ignore_entropy(log_probs_A: torch.Tensor, entropy_A: torch.Tensor) -> torch.Tensor:
    return log_probs_A.sum()


def test_only_tokens_of_the_weights_that_the_step_found_are_compared() -> None:
    rows = batch([[3, 4], [4, 4]], [[-1.0, -2.0], [-3.0, -4.0]])
    comparison = Comparison.from_batch(rows, step=5)
    trained = torch.tensor([-9.0, -2.5, -3.0, -4.25], requires_grad=True)
    total = comparison.wrap_loss(ignore_entropy)(trained, torch.zeros(4))
    assert total.item() == trained.sum().item() and total.requires_grad
    metrics = gap_of(comparison).to_metrics()
    assert metrics["rollout_log_prob_diff_mean"] == pytest.approx(0.25)
    assert metrics["rollout_log_prob_diff_max"] == pytest.approx(0.5)


def test_tokens_of_older_weights_alone_give_no_figure() -> None:
    comparison = Comparison.from_batch(batch([[3, 3]], [[-1.0, -2.0]]), step=5)
    comparison.wrap_loss(ignore_entropy)(torch.tensor([-1.5, -2.0]), torch.zeros(2))
    metrics = gap_of(comparison).to_metrics()
    assert metrics["rollout_log_prob_diff_mean"] is None and metrics["rollout_log_prob_diff_max"] is None
    names = ("rollout_log_prob_diff_mean", "rollout_log_prob_diff_max", "policy_move")
    assert LogProbGap().to_metrics() == dict.fromkeys(names)


def test_every_age_has_its_mismatch() -> None:
    rows = batch([[4, 2], [2, 2]], [[-1.0, -2.0], [-3.0, -0.5]])
    trained = torch.tensor([-1.25, -1.0, -3.5, -0.5])
    comparisons = [Comparison.from_batch(rows.select(part), step=5) for part in ([0], [1])]
    for comparison, part in zip(comparisons, trained.split(2), strict=True):
        comparison.wrap_loss(ignore_entropy)(part, torch.zeros(2))
    metrics = LogProbGap.merge_parts(gap_of(comparison) for comparison in comparisons).to_metrics()
    ratios = [math.exp(1.0), math.exp(-0.5), 1.0]
    assert {name: value for name, value in metrics.items() if name.startswith("mismatch/")} == {
        "mismatch/age_0_mean": pytest.approx(0.25),
        "mismatch/age_2_mean": pytest.approx(0.5),
        "mismatch/age_0_k3": pytest.approx(math.exp(-0.25) - 1 + 0.25),
        "mismatch/age_0_max": pytest.approx(0.25),
        "mismatch/age_0_ess": pytest.approx(1.0),
        "mismatch/age_2_k3": pytest.approx(sum(ratio - 1 - math.log(ratio) for ratio in ratios) / 3),
        "mismatch/age_2_max": pytest.approx(1.0),
        "mismatch/age_2_ess": pytest.approx(sum(ratios) ** 2 / (3 * sum(ratio**2 for ratio in ratios))),
    }


def test_ranks_are_added_up() -> None:
    one, other = ({"0": {"tokens": 2, "total": total, "largest": total / 2}} for total in (0.2, 0.6))
    whole = LogProbGap.merge_parts([LogProbGap(one), LogProbGap(), LogProbGap(other)])
    assert whole.mean == pytest.approx(0.2) and whole.ages["0"]["largest"] == 0.3


COLD = "temperature 0.7 for 1"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def limits(*settings: str, dtype: str = "float32") -> GapLimits:
    types = (f"model.dtype={dtype}", f"actor.autocast={dtype}")
    found = GapLimits.from_config(load_config(find_recipe("quickstart"), overrides=(*types, *settings)))
    assert found is not None
    return found


def complaint_of(wrong: str, dtype: str, sharp: float = 4.0, age: int = 0, moves: tuple[float | None, ...] = ()) -> str:
    tokens = drawn(wrong, DTYPES[dtype], sharp)
    rows = batch([[4 - age] * SEEN], [tokens.rollout.tolist()])
    comparison = Comparison.from_batch(rows, step=5)
    comparison.wrap_loss(ignore_entropy)(tokens.trained, tokens.entropy)
    return gap_of(comparison).find_complaint(limits(dtype=dtype), moves)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [name for name in ENGINES if name != RIGHT])
def test_an_engine_with_something_wrong_is_told_of(wrong: str, dtype: str) -> None:
    found = complaint_of(wrong, dtype)
    assert found.startswith("the generating engine") and "\n" not in found
    assert ("draws from another distribution" in found) == wrong.endswith("whole log-probabilities")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sharp", [0.3, 1.0, 2.0, 4.0, 8.0, 16.0])
def test_engines_that_only_round_differently_are_right_whatever_the_entropy(sharp: float, dtype: str) -> None:
    assert complaint_of(RIGHT, dtype, sharp) == ""
    assert complaint_of(RIGHT, dtype, sharp, age=1, moves=(0.0,)) == ""


def gap_of_first(wrong: str, tokens: int, *, dtype: str = "bfloat16", sharp: float = 4.0, age: int = 0) -> LogProbGap:
    """The gap of the first drawn tokens."""
    whole = drawn(wrong, DTYPES[dtype], sharp)
    comparison = Comparison.from_batch(batch([[4 - age] * tokens], [whole.rollout[:tokens].tolist()]), step=5)
    comparison.wrap_loss(ignore_entropy)(whole.trained[:tokens], whole.entropy[:tokens])
    return gap_of(comparison)


@pytest.mark.parametrize("right", [1, 100, SEEN])
def test_right_tokens_of_one_age_do_not_hide_wrong_ones_of_another(right: int) -> None:
    newest = gap_of_first(RIGHT, right)
    newest.add_gap(gap_of_first(COLD, SEEN, age=1))
    assert "for tokens of weights 1 versions older" in newest.find_complaint(limits(dtype="bfloat16"), (0.002,))
    assert newest.find_complaint(limits(dtype="bfloat16"), ()) == "", "how far the trainer moved is not known"


@pytest.mark.parametrize("wrong", ENGINES)
def test_so_few_tokens_that_they_show_nothing_are_not_judged(wrong: str) -> None:
    assert gap_of_first(wrong, 255).find_complaint(limits(dtype="bfloat16"), ()) == ""
    assert gap_of_first(COLD, 256).find_complaint(limits(dtype="bfloat16"), ()) != ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sharp", [0.3, 1.0, 4.0, 8.0, 16.0, 32.0])
def test_no_part_of_right_tokens_is_told_of(sharp: float, dtype: str) -> None:
    """Any 256 tokens, and any 1,000: a step may have that many of an age."""
    whole = drawn(RIGHT, DTYPES[dtype], sharp)
    most, order = limits(dtype=dtype), torch.Generator().manual_seed(1)
    for tokens in [256] * 100 + [1000] * 30:
        some = torch.randperm(SEEN, generator=order)[:tokens]
        comparison = Comparison.from_batch(batch([[4] * tokens], [whole.rollout[some].tolist()]), step=5)
        comparison.wrap_loss(ignore_entropy)(whole.trained[some], whole.entropy[some])
        assert gap_of(comparison).find_complaint(most, ()) == ""


def sums_of(gaps: torch.Tensor) -> LogProbGap:
    """The gap of tokens with these differences, whose entropy is a nat."""
    comparison = Comparison.from_batch(batch([[4] * len(gaps)], [(gaps - 1).tolist()]), step=5)
    comparison.wrap_loss(ignore_entropy)(torch.full((len(gaps),), -1.0), torch.ones(len(gaps)))
    return gap_of(comparison)


def test_a_mean_beyond_the_limit_may_be_the_chance_of_a_few_large_differences() -> None:
    few = torch.zeros(300)
    few[:12] = torch.tensor([4.0, -4.0] * 6)  # a mean of 0.16, where 0.102 is the limit
    assert sums_of(few).find_complaint(limits(dtype="bfloat16"), ()) == ""
    assert "are 0.16 nats from" in sums_of(few.repeat(100)).find_complaint(limits(dtype="bfloat16"), ())


def test_surprise_of_a_certain_policy_is_of_rare_tokens_and_takes_many() -> None:
    """None of the unlikely tokens is drawn: every token is likelier than the entropy of 0.05 nats says."""
    for tokens, told in ((3000, False), (30_000, True)):
        comparison = Comparison.from_batch(batch([[4] * tokens], [[-0.01] * tokens]), step=5)
        comparison.wrap_loss(ignore_entropy)(torch.full((tokens,), -0.01), torch.full((tokens,), 0.05))
        found = gap_of(comparison).find_complaint(limits(), ())
        assert ("draws from another distribution" in found) == told == bool(found)


@pytest.mark.parametrize("wrong", [COLD, "a zeroed layer", "top-p on one side"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_at_a_steady_staleness_they_are_told_of_by_the_trainer_s_own_moves(wrong: str, dtype: str) -> None:
    assert complaint_of(wrong, dtype, age=1) == "", "how far the trainer moved is not known yet"
    assert complaint_of(wrong, dtype, age=2, moves=(None, 0.002)) == ""
    assert "tokens of weights 1 versions older" in complaint_of(wrong, dtype, age=1, moves=(0.5, 0.002))
    assert "tokens of weights 2 versions older" in complaint_of(wrong, dtype, age=2, moves=(0.002, 0.002))
    assert complaint_of(wrong, dtype, age=1, moves=(1.0,)) == "", "weights that far apart explain it"


def test_older_tokens_are_judged_by_the_version_that_drew_them_where_the_trainer_holds_it() -> None:
    right, cold = (drawn(wrong, torch.bfloat16) for wrong in (RIGHT, COLD))
    for tokens, told in ((right, False), (cold, True)):
        rows = batch([[3] * SEEN], [tokens.rollout.tolist()])
        comparison = Comparison.from_batch(rows, step=5, held={3: tokens.trained})
        far = tokens.trained - 1.0  # the weights that are trained have moved that far, and nobody measured it
        comparison.wrap_loss(ignore_entropy)(far, tokens.entropy)
        found = gap_of(comparison).find_complaint(limits(dtype="bfloat16"), ())
        assert ("for tokens of weights 1 versions older" in found) == told == bool(found)


def test_the_least_precise_type_that_a_run_uses_decides() -> None:
    exact = limits()
    assert exact.mean(1.0) == pytest.approx(0.00408) and limits(dtype="bfloat16").mean(1.0) == pytest.approx(0.102)
    for rough in ("model.dtype=bfloat16", "actor.autocast=bfloat16", "weightsync.dtype=bfloat16"):
        assert limits(rough) == limits(dtype="bfloat16")
    assert exact.surprise and not limits("rollout.top_p=0.9").surprise and not limits("rollout.top_k=5").surprise
    assert not limits("algorithm.name=dapo").surprise
    assert not limits("rollout.function=my_rollouts:best_of_n").surprise, "it may choose among responses"


class Scores:
    """An engine whose log-probabilities are those of the tokens' numbers, and what its updates made of them."""

    moved = 0.0

    def log_probs(self, sequences: object) -> torch.Tensor:
        if sequences is None:
            return torch.empty(0)
        return -sequences.tokens_T[sequences.response_mask_T.bool()] / 10 - self.moved  # type: ignore[attr-defined]


def test_a_move_is_measured_on_samples_that_were_trained_before_the_update() -> None:
    lengths = (300, 300, 5)
    prompts = [torch.tensor([1, 2])] * 3
    samples = samples_of(PackedBatch((0, 1, 2), sample_columns(prompts, [torch.full((n,), 7) for n in lengths])))
    engine = Scores()
    probe = MoveProbe(engine)  # type: ignore[arg-type]
    assert probe.measure_move() == {}, "nothing was trained"
    probe.keep(samples, torch.full((605,), -0.7))
    probe.keep(samples, torch.full((605,), -9.0))  # of a later micro-batch
    probe.note_update()
    engine.moved = 0.25
    assert probe.measure_move() == {"tokens": 600.0, "total": pytest.approx(150.0)}, (
        "as many samples as have 512 tokens"
    )
    assert probe.measure_move() == {}
    probe.note_update()
    assert probe.measure_move() == {}, "this rank had no rows, but took part"


def test_moves_of_ranks_are_added_up() -> None:
    whole = LogProbGap.merge_parts([LogProbGap(move={"tokens": 2.0, "total": 1.0}), LogProbGap(), LogProbGap(move={})])
    whole.add_gap(LogProbGap(move={"tokens": 6.0, "total": 1.0}))
    assert whole.mean_move == pytest.approx(0.25)
