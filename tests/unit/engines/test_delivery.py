"""Proof of delivery: what did not arrive is refused by name before a token is drawn, and what arrived never is."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncflow.errors import WeightsNeverDelivered, WeightsNotDelivered
from asyncflow.timeline import NoTimeline
from benchmarks.delivery import FAULTS, Lab, NumbersOnly, complaint, false_alarms, faulty_load
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from weightsync.checksums import tensor_checksum
from weightsync.plan import Box, Need, plan_transfer
from weightsync.sender import ShardWriter, describe
from weightsync.version import Version
from workers.engines.base import HeldChecksum, LocalShard
from workers.engines.delivery import DeliveryCheck, ProbeJudge, compare_checksums
from workers.engines.vllm.engine import whole_checksums
from workers.engines.weight_path import HeldWeights

pytestmark = pytest.mark.usefixtures("single_rank")
FLOAT32, BFLOAT16 = 2e-3, 0.05


@pytest.fixture
def lab(model_dir: Path) -> Lab:
    return Lab(model_dir, "float32")


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_did_not_arrive_are_refused_by_name(lab: Lab, fault: str) -> None:
    said = faulty_load(lab, fault, numbers_only=False)
    step = 1 if fault == "not loaded" else 2
    assert said.startswith(f"weights of step {step} were not delivered to rollout-0/0: ")
    if fault == "another layer's tensor":
        assert "1 of 27 tensors are not what the trainer published (model.layers.0.mlp.up_proj.weight)" in said
    elif fault in ("an older version", "an update of lr 1e-6 not loaded"):
        assert "27 of 27 tensors" in said and "it has those of step 1" in said
    elif fault == "half a bucket":
        assert "these are those of step 1" in said


@pytest.mark.parametrize("fault", FAULTS)
def test_tensors_of_an_adapter_are_compared_by_their_own_names(model_dir: Path, fault: str) -> None:
    said = faulty_load(Lab(model_dir, "bfloat16", adapter=True), fault, numbers_only=False)
    assert "tensors are not what the trainer published (base_model.model.model.layers." in said


@pytest.mark.parametrize("fault", FAULTS)
def test_an_engine_that_cannot_be_read_is_refused_by_its_numbers(lab: Lab, fault: str) -> None:
    said = faulty_load(lab, fault, numbers_only=True)
    assert "the probe" in said and "log-probabilities" in said and "tensors" not in said


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_arrived_is_never_refused(model_dir: Path, dtype: str, adapter: bool) -> None:
    assert false_alarms(Lab(model_dir, dtype, adapter=adapter), 12) == []


def test_the_second_failure_ends_the_run_unless_many_versions_came_between(lab: Lab) -> None:
    engine = lab.open_engine()
    weights = lab.publish(1)

    def load(scale: float) -> None:
        engine.load_weights({name: values * scale for name, values in weights.items()})

    check = lab.open_check(engine)
    load(1.5)
    with pytest.raises(
        WeightsNotDelivered, match="no response drawn with them is trained; the instance starts"
    ) as once:
        check.check_loaded(Version(0, 1))
    assert not once.value.final
    again = lab.reopen_check(engine)  # of the instance that was started again
    load(1.0)
    again.check_loaded(Version(0, 1))
    load(1.5)
    with pytest.raises(WeightsNeverDelivered, match="as before it was started again; see what its engine does") as ends:
        again.check_loaded(Version(0, 1))
    assert ends.value.final
    forgiven = lab.reopen_check(engine)
    load(1.0)
    for _ in range(8):
        forgiven.check_loaded(Version(0, 1))
    load(1.5)
    with pytest.raises(WeightsNotDelivered) as later:
        forgiven.check_loaded(Version(0, 1))
    assert not later.value.final


def test_every_nth_version_is_proven_and_the_first_after_a_start(model_dir: Path) -> None:
    lab = Lab(model_dir, "float32", settings=("weightsync.proof_interval=3",))
    engine = lab.open_engine()
    engine.load_weights({name: torch.zeros_like(values) for name, values in lab.publish(4).items()})
    refused = [4]
    for step in (5, 6, 7, 8, 9):
        lab.publish(step)
    assert [step for step in range(4, 10) if complaint(lab.open_check(engine), step)] == [*refused, 6, 9]


def test_the_probe_takes_a_share_of_the_time_and_bytes_are_compared_at_every_version(model_dir: Path) -> None:
    lab = Lab(model_dir, "float32", scoring_share=0.0)
    engine = lab.open_engine()
    for step in range(3):
        weights = lab.publish(step)
    assert [bool(lab.record(step).tokens) for step in range(3)] == [True, False, False]
    engine.load_weights({name: values + 1 for name, values in weights.items()})
    assert "27 of 27 tensors" in complaint(lab.open_check(engine), 2)


def test_zero_turns_it_off(model_dir: Path) -> None:
    lab = Lab(model_dir, "float32", settings=("weightsync.proof_interval=0",))
    engine = lab.open_engine()
    lab.publish(0)
    assert lab.store.list_keys() == [] and not complaint(lab.open_check(engine), 0)


def test_records_do_not_pile_up(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engines.delivery._KEPT_RECORDS", 3)
    for step in range(7):
        lab.publish(step)
    kept = {key for key in lab.store.list_keys() if not key.startswith("delivery/names/")}
    assert kept == {"delivery/0.4", "delivery/0.5", "delivery/0.6"}


def test_an_engine_that_says_nothing_is_told_of_once(lab: Lab) -> None:
    told: list[str] = []
    lab.context.warn_user = told.append
    check = lab.open_check(SimpleNamespace(weight_needs=dict))
    for step in (0, 1):
        lab.publish(step)
        check.check_loaded(Version(0, step))
    assert len(told) == 1 and "rollout-0/0 has neither" in told[0]


def test_ranks_add_up_their_shares_in_the_element_type_of_the_generator() -> None:
    whole = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    cuts = [Box((0, 0), (4, 6)), Box((4, 0), (3, 2)), Box((4, 2), (3, 4))]
    held = [[LocalShard("w", (7, 6), box, whole[box.slices])] for box in cuts]
    plan = plan_transfer([describe(shards) for shards in held], bucket_bytes=32, dtype="float32")
    total = 0
    for rank, shards in enumerate(held):
        writer = ShardWriter(plan, rank)
        writer.match_shards(shards)
        total += writer.sum_pieces(shards, torch.bfloat16)["w"]
    assert (total - int(tensor_checksum(whole.bfloat16()))) % 2**64 == 0


def test_tensors_are_found_by_their_other_names_and_unknown_types_are_not_compared() -> None:
    needs = {"head": Need((2,), ("embed",)), "a": Need((2,)), "b": Need((2,))}
    held = {"head": HeldChecksum("bfloat16", -3), "a": HeldChecksum("float16", 5), "b": HeldChecksum("bfloat16", 7)}
    published = {"bfloat16": {"embed": 2**64 - 3, "a": 4, "b": 8}}
    assert compare_checksums(held, published, needs) == (["b"], 2)


def test_ranks_of_an_engine_fill_a_tensor_and_replicas_must_be_equal() -> None:
    shapes = {"w": (4, 2), "norm": (3,)}
    upper, lower = ("w", [0, 0], [2, 2], "bfloat16", 5), ("w", [2, 0], [2, 2], "bfloat16", -7)
    norm = ("norm", [0], [3], "bfloat16", 9)
    found = whole_checksums([upper, norm, lower, norm], shapes)
    assert found == {"w": HeldChecksum("bfloat16", 2**64 - 2), "norm": HeldChecksum("bfloat16", 9)}
    assert whole_checksums([upper], shapes) == {}, "a part says nothing of the whole"
    differing = whole_checksums([norm, ("norm", [0], [3], "bfloat16", 8)], shapes)
    assert compare_checksums(differing, {"bfloat16": {"norm": 9}}, {}) == (["norm"], 1)


def walk(judge: ProbeJudge, *, noise: float, move: float, stays: bool, seed: int, spiky: bool = False) -> str:
    """Judge versions that arrived, and then one that did or did not; the rounding is new at every version, and with
    `spiky` often none."""
    chance = torch.Generator().manual_seed(seed)
    expected, said = -5 + torch.randn(63, generator=chance), ""
    for step in range(21):
        stale = expected
        expected = expected + move * torch.randn(63, generator=chance)
        weights = stale if stays and step == 20 else expected
        rounding = noise * torch.randn(63, generator=chance)
        found = weights + (0.0 if spiky and seed * step % 7 > 1 else 1.0) * rounding
        said = judge.find_complaint(Version(0, step), expected, found, changed=True)
        assert not said or step == 20, said
    return said


@pytest.mark.parametrize(("noise", "error"), [(1e-5, FLOAT32), (0.03, BFLOAT16)])
def test_a_move_that_was_not_made_is_seen_in_the_noise_and_one_that_was_made_never_is(
    noise: float, error: float
) -> None:
    for seed in range(60):
        move = noise * (0.0, 0.3, 1.0, 3.0, 10.0)[seed % 5]
        assert not walk(ProbeJudge(error), noise=noise, move=move, stays=False, seed=seed, spiky=seed > 30)
    for seed in range(20):
        least = max(5 * noise, error / 10)
        assert "moved" in walk(ProbeJudge(error), noise=noise, move=least, stays=True, seed=seed)


def test_an_engine_that_computes_exactly_as_before_has_not_moved_at_all() -> None:
    before = -5 + torch.randn(63, generator=torch.Generator().manual_seed(0))
    after, noise = before + 2e-6, 0.01 * torch.randn(63, generator=torch.Generator().manual_seed(1))
    for changed, said in ((True, "exactly the log-probabilities that it gave with the weights of step 3"), (False, "")):
        judge = ProbeJudge(BFLOAT16)
        assert not judge.find_complaint(Version(0, 3), before, before + noise, changed=True)
        found = judge.find_complaint(Version(0, 4), after, before + noise, changed=changed)
        assert said in found and bool(found) == bool(said)


def test_an_adapter_too_small_for_the_generators_rounding_is_no_failure_and_what_is_lost_adds_up() -> None:
    start, unmoved = torch.full((63,), -5.0), torch.full((63,), -5.01)
    judge = ProbeJudge(BFLOAT16, adapter=True)
    said = [judge.find_complaint(Version(0, step), start + 9e-5 * step, unmoved, changed=True) for step in range(9)]
    assert said[:6] == [""] * 6 and "exactly the log-probabilities that it gave with the weights of step 0" in said[6]
    # Rounding that turns out differently at one place of the trainer's pass moves the tokens behind it.
    judge, few = ProbeJudge(BFLOAT16, adapter=True), start.clone()
    few[40:] += 0.02
    assert not judge.find_complaint(Version(0, 0), start, unmoved, changed=True)
    assert not judge.find_complaint(Version(0, 1), few, unmoved, changed=True)


def test_engines_that_differ_by_more_than_expected_are_not_expected_to_move_alike_before_it_is_known() -> None:
    for seed in range(60):
        assert not walk(ProbeJudge(BFLOAT16), noise=0.25, move=0.15, stays=False, seed=seed)


def test_rounding_is_that_of_the_engine_and_the_temperature_which_are_judged() -> None:
    def error(*overrides: str, evaluates: bool = False) -> float:
        config = load_config(find_recipe("quickstart"), overrides=("launcher.device=cpu", *overrides))
        sampling = config.evaluate.sampling(config.rollout) if evaluates else config.rollout
        context: Any = SimpleNamespace(config=config, sealed_store=lambda: None)
        return DeliveryCheck(context, SimpleNamespace(), sampling)._error  # type: ignore[arg-type]

    rough = ("evaluate.engine=vllm", "vllm.dtype=bfloat16")
    assert (error(*rough), error(*rough, evaluates=True)) == (FLOAT32, BFLOAT16)
    assert error("rollout.temperature=0.5") == 2 * FLOAT32 and error("rollout.temperature=2") == FLOAT32


def test_probabilities_that_are_no_numbers_are_the_trainers_to_report_and_else_a_failure() -> None:
    numbers, broken = torch.full((5,), -1.0), torch.full((5,), float("nan"))
    assert not ProbeJudge(FLOAT32).find_complaint(Version(0, 0), broken, numbers, changed=False)
    assert "nan nats" in ProbeJudge(FLOAT32).find_complaint(Version(0, 0), numbers, broken, changed=False)


def test_nothing_is_done_with_a_version_that_was_not_delivered() -> None:
    done: list[object] = []

    def check(version: Version) -> None:
        done.append(("check", version))
        raise WeightsNotDelivered("no")

    receiver: Any = SimpleNamespace(load=lambda load, **_: load({}) or Version(0, 4))
    config = SimpleNamespace(weightsync=SimpleNamespace(timeout_s=1.0))
    context: Any = SimpleNamespace(config=config, timeline=NoTimeline())
    load: Callable[..., None] = lambda _: done.append("load")  # noqa: E731
    held = HeldWeights(context, receiver, load, check=check, loaded=done.append)
    with pytest.raises(WeightsNotDelivered):
        held.load_newest()
    assert done == ["load", ("check", Version(0, 4))] and held.version is None


def test_every_copy_is_judged_by_itself(lab: Lab) -> None:
    """Servers that generate with copies of their own; the second one loses an update."""
    first, second = lab.open_engine(), lab.open_engine()

    def score(tokens: torch.Tensor) -> torch.Tensor:
        return torch.cat([NumbersOnly(engine).prompt_log_probs(tokens) for engine in (first, second)])

    check = lab.open_check(SimpleNamespace(weight_needs=first.weight_needs, prompt_log_probs=score))
    weights = {name: values.clone() for name, values in lab.publish(1).items()}
    first.load_weights(weights)
    second.load_weights(weights)
    assert not complaint(check, 1)
    lab.move(1e-4, seed=0)
    first.load_weights(lab.publish(2))
    assert "copy 2 of 2: " in complaint(check, 2)
