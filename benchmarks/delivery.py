"""Proof of delivery: which undelivered weights are caught, and the smallest change that the proof sees.

    python benchmarks/delivery.py [--model DIR] [--versions N] [--json [FILE]]

    undelivered_caught                faults of a generating engine that are refused, full weights; of 5
    undelivered_caught_by_numbers     ... where the engine cannot read its weights back; of 5
    undelivered_caught_adapter        the same five faults with an adapter in peft's names; of 5
    false_alarms                      versions that were loaded, and refused; of 2 x --versions in each element type, of
                                      full weights and of adapters
    smallest_move_DTYPE               least learning rate of an update (AdamW's first: every weight moves by it) whose
                                      loss is seen by numbers, in an engine that computes the same twice
    smallest_move_noisy_DTYPE         ... in one whose rounding depends on what else runs
    smallest_tensor_DTYPE             least relative change of one layer's tensor that is seen by numbers
    record_cpu_s_DTYPE check_cpu_s_DTYPE  of one version: the trainer's record, the generator's check (of which
                                      sums_cpu_s_DTYPE); forward_backward_4096_cpu_s_DTYPE: of as many tokens

The faults: nothing is loaded at the start; an older version stays; half a bucket stays; a tensor holds that of another
layer; an update of lr 1e-6 is not loaded. Trainer (`fsdp`), generator (`hf`), record and check are those of a run, in
one process. Without --model: the quickstart's model.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the clone, for `benchmarks` and its packages

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from asyncflow.errors import WeightsNotDelivered
from asyncflow.sealed_store import SealedStore
from asyncflow.timeline import NoTimeline
from benchmarks import say_when
from benchmarks.json_option import add_json_option, report
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from weightsync.plan import Need, plan_transfer
from weightsync.sender import ShardWriter, describe
from weightsync.version import Version
from workers.engines.base import LocalShard
from workers.engines.delivery import (
    DeliveryCheck,
    DeliveryProver,
    DeliveryRecord,
    ProbeJudge,
    have_changed,
    probe_tokens,
    rounding_error,
)
from workers.engines.hf.engine import HfEngine
from workers.engines.load_engine import load_generate_engine, load_train_engine
from workers.rank.peers import ReplicaPlace
from workers.rows.packed_rows import Sequences

CPU = torch.device("cpu")
BUCKET_BYTES = 2**20
FAULTS = (
    "not loaded",
    "an older version",
    "half a bucket",
    "another layer's tensor",
    "an update of lr 1e-6 not loaded",
)
LARGE_LR, SMALL_LR = 1e-4, 1e-6
RANK, ALPHA = 4, 8


class Lab:
    """A trainer and its records, and what a generator would be given of them."""

    def __init__(
        self,
        model_dir: Path,
        dtype: str,
        *,
        adapter: bool = False,
        settings: tuple[str, ...] = (),
        scoring_share: float = 1.0,
    ) -> None:
        if adapter:
            settings += (f"lora={{rank: {RANK}, alpha: {ALPHA}}}",)
        settings += (f"model.path={model_dir}", f"model.dtype={dtype}", f"actor.autocast={dtype}")
        if int(model_config(model_dir)["max_position_embeddings"]) >= 128:
            settings += ("data.max_prompt_tokens=64", "rollout.max_response_tokens=64")
        self.config = load_config(find_recipe("quickstart"), overrides=(*settings, "launcher.device=cpu"))
        self.dtype = getattr(torch, dtype)
        self.trainer: Any = load_train_engine(self.config, device=CPU)
        self.parameters = {shard.name: shard.values for shard in self.trainer.shards()}
        if adapter:
            self.move(0.02, seed=0)  # B begins at 0, and the adapter would be the base
        shards = list(self.shards())
        plan = plan_transfer([describe(shards)], bucket_bytes=BUCKET_BYTES, dtype=dtype)
        self.writer = ShardWriter(plan, 0)
        self.store = SealedStore(dist.HashStore(), b"delivery")
        self.context = self._surroundings()
        place = ReplicaPlace(0, 1, ((0,),), 0)
        self.prover = DeliveryProver(self.context, self.trainer, self._sender(), place, scoring_share=scoring_share)

    def _surroundings(self) -> Any:
        return SimpleNamespace(
            config=self.config, rank=0, name="rollout-0/0", timeline=NoTimeline(), sealed_store=lambda: self.store,
            warn_user=lambda text: None,
        )  # fmt: skip

    def shards(self) -> Iterable[LocalShard]:
        shards: Iterable[LocalShard] = self.trainer.shards()
        return shards

    def publish(self, step: int) -> dict[str, Tensor]:
        """Record the trainer's weights as those of a step; return what travels."""
        self.prover.record_version(Version(0, step), self.shards())
        return {shard.name: shard.values.detach().to(self.dtype, copy=True) for shard in self.shards()}

    @torch.no_grad()
    def move(self, lr: float, seed: int) -> None:
        """Move every trained weight by `lr`, up or down."""
        chance = torch.Generator().manual_seed(seed)
        for values in self.parameters.values():
            values += lr * torch.randint(0, 2, values.shape, generator=chance).mul_(2).sub_(1)
        self._note_change()

    def open_engine(self) -> HfEngine:
        engine: Any = load_generate_engine(self.config, self.config.rollout, device=CPU)
        opened: HfEngine = engine
        return opened

    def open_check(self, engine: Any) -> DeliveryCheck:
        self.store.delete_key("delivery/failed/rollout-0/0")
        return self.reopen_check(engine)

    def reopen_check(self, engine: Any) -> DeliveryCheck:
        """Return the check of an instance that was started again."""
        return DeliveryCheck(self.context, engine, self.config.rollout)

    def half_of_a_bucket(self) -> list[str]:
        """Return the tensors of the first half of the largest bucket."""
        bucket = max(self.writer.buckets, key=lambda each: len(each.pieces))
        names = list(dict.fromkeys(self.writer.layout.plan.names[piece.tensor] for piece in bucket.pieces))
        return names[: max(1, len(names) // 2)]

    def two_layers(self) -> tuple[str, str]:
        """Return the names of the same tensor in two layers."""
        first = next(name for name in self.writer.layout.plan.names if ".layers.0.mlp.up_proj" in name)
        return first, first.replace(".layers.0.", ".layers.1.")

    def probe(self) -> Tensor:
        return probe_tokens(self.config)

    def record(self, step: int) -> DeliveryRecord:
        return msgspec.msgpack.decode(self.store.get(f"delivery/0.{step}"), type=DeliveryRecord)

    def expected(self, step: int) -> Tensor:
        """Return the trainer's log-probabilities in a record, float32 [A]."""
        return self.record(step).scores

    def published(self, step: int) -> dict[str, dict[str, int]]:
        """Return the checksums in a record by element type and tensor."""
        record = self.record(step)
        names = msgspec.msgpack.decode(self.store.get(record.names), type=list[str])
        return {dtype: dict(zip(names, sums, strict=True)) for dtype, sums in record.checksums.items()}

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """Give the trainer its weights back at the end."""
        before = {name: values.clone() for name, values in self.parameters.items()}
        yield
        for name, values in self.parameters.items():
            values.copy_(before[name])
        self._note_change()

    def _note_change(self) -> None:
        """Have the trainer compute with what was written to its weights from outside."""
        self.trainer._mark_changed()

    def _sender(self) -> Any:
        def sum_pieces(shards: list[LocalShard], dtype: torch.dtype) -> dict[str, int]:
            self.writer.match_shards(shards)
            return self.writer.sum_pieces(shards, dtype)

        return SimpleNamespace(sum_pieces=sum_pieces)


class NumbersOnly:
    """An engine that cannot read its weights back; `noise` (nats) depends on what else runs."""

    def __init__(self, engine: Any, *, noise: float = 0.0) -> None:
        self._engine, self._noise = engine, noise
        self._chance = torch.Generator().manual_seed(0)

    def weight_needs(self) -> Mapping[str, Need]:
        needs: Mapping[str, Need] = self._engine.weight_needs()
        return needs

    def prompt_log_probs(self, tokens_T: Tensor) -> Tensor:
        found: Tensor = self._engine.prompt_log_probs(tokens_T)
        return found + self._noise * torch.randn(found.shape, generator=self._chance)


def complaint(check: DeliveryCheck, step: int) -> str:
    """Return why a version is refused; "": it is not."""
    try:
        check.check_loaded(Version(0, step))
    except WeightsNotDelivered as error:
        return str(error)
    return ""


def faulty_load(lab: Lab, fault: str, *, numbers_only: bool) -> str:
    """Load two versions (by numbers eight more before them), the last one (or, `not loaded`, the first one) with a
    fault; return what is said of it."""
    engine = lab.open_engine()
    check = lab.open_check(NumbersOnly(engine) if numbers_only else engine)
    for step in range(-8, 0) if numbers_only and fault != "not loaded" else ():
        lab.move(LARGE_LR, seed=step)
        engine.load_weights(lab.publish(step))
        assert not complaint(check, step), "a version that was loaded is refused"
    before = lab.publish(1)
    if fault == "not loaded":
        if not lab.config.sends_adapter:  # the files' weights are those of the first version, too
            engine.load_weights({name: torch.zeros_like(values) for name, values in before.items()})
        return complaint(check, 1)
    engine.load_weights(before)
    assert not complaint(check, 1), "a version that was loaded is refused"
    lab.move(SMALL_LR if "1e-6" in fault else LARGE_LR, seed=7)
    weights = lab.publish(2)
    if fault == "half a bucket":
        weights |= {name: before[name] for name in lab.half_of_a_bucket()}
    elif fault == "another layer's tensor":
        one, other = lab.two_layers()
        weights[one] = weights[other]
    else:
        return complaint(check, 2)
    engine.load_weights(weights)
    return complaint(check, 2)


def false_alarms(lab: Lab, versions: int) -> list[str]:
    """Load versions that move by amounts small and large; return what is said of those that are refused."""
    engine = lab.open_engine()
    said = []
    for checked in (engine, NumbersOnly(engine)):
        check = lab.open_check(checked)
        for step in range(10, 10 + versions):
            lab.move(10 ** -(3 + step % 6), seed=step)
            engine.load_weights(lab.publish(step))
            said.append(complaint(check, step))
    return [each for each in said if each]


def smallest_move(lab: Lab, *, noisy: bool) -> float | None:
    """Return the least learning rate, a power of ten, whose lost update is seen by numbers; None: 1e-3 is not."""
    engine, judge = lab.open_engine(), ProbeJudge(rounding_error(lab.config) or 0.0)
    chance, noise = torch.Generator().manual_seed(0), 0.0

    def score() -> Tensor:
        found = engine.prompt_log_probs(lab.probe())
        assert found is not None, "the engine scores"
        return found[0] + noise * torch.randn(found[0].shape, generator=chance)

    for step in range(12):  # until it is known what the engines differ by
        lab.move(LARGE_LR, seed=step)
        engine.load_weights(lab.publish(step))
        if noisy:  # as much as the engines differ
            noise = max(noise, float((score() - lab.expected(step)).square().mean().sqrt()))
        said = judge.find_complaint(Version(0, step), lab.expected(step), score(), changed=True)
        assert not said, said
    seen: float | None = None
    for lr in (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9):
        with lab.unmoved():
            lab.move(lr, seed=100)
            lab.publish(100)
        changed = have_changed(lab.published(100), lab.published(11))
        if not deepcopy(judge).find_complaint(Version(0, 100), lab.expected(100), score(), changed=changed):
            break
        seen = lr
    return seen


def smallest_tensor(lab: Lab) -> float | None:
    """Return the least relative change (2**-k) of one layer's tensor in the generator that is seen by numbers."""
    engine = lab.open_engine()
    weights = lab.publish(1)
    name, _ = lab.two_layers()
    seen: float | None = None
    for k in range(16):
        check = lab.open_check(NumbersOnly(engine))
        engine.load_weights(weights)
        lab.publish(1)
        assert not complaint(check, 1), "a version that was loaded is refused"
        lab.publish(2)
        chance = torch.Generator().manual_seed(1)
        factor = 1 + 2.0**-k * torch.randn(weights[name].shape, generator=chance)
        engine.load_weights({**weights, name: weights[name] * factor})
        if not complaint(check, 2):
            break
        seen = 2.0**-k
    return seen


def seconds(lab: Lab) -> dict[str, float]:
    """Return the least seconds of three of each part of a proof."""
    engine = lab.open_engine()
    engine.load_weights(lab.publish(1))
    check = lab.open_check(engine)
    count = 4096 // len(lab.probe())
    tokens = lab.probe().repeat(count)
    drawn = torch.ones(len(tokens), dtype=torch.uint8)
    drawn[:: len(lab.probe())] = 0
    batch = Sequences(tokens, torch.full((count,), len(lab.probe()), dtype=torch.int32), drawn)

    def train() -> None:
        lab.trainer.forward_backward(batch, lambda log_probs_A, entropy_A: log_probs_A.sum())
        lab.trainer.zero_grad()

    def timed(work: Any) -> float:
        found = []
        for _ in range(3):
            began = time.process_time()
            work()
            found.append(time.process_time() - began)
        return min(found)

    return {
        "record_cpu_s": timed(lambda: lab.prover.record_version(Version(0, 1), lab.shards())),
        "check_cpu_s": timed(lambda: check.check_loaded(Version(0, 1))),
        "sums_cpu_s": timed(engine.weight_checksums),
        "forward_backward_4096_cpu_s": timed(train),
    }


def model_config(model_dir: Path) -> dict[str, Any]:
    from workers.data.model_files import read_model_config

    return read_model_config(model_dir)


def measure(model_dir: Path, versions: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    each: dict[str, str] = {}
    full, adapter = Lab(model_dir, "float32"), Lab(model_dir, "float32", adapter=True)
    for key, lab, numbers_only in (
        ("undelivered_caught", full, False),
        ("undelivered_caught_by_numbers", full, True),
        ("undelivered_caught_adapter", adapter, False),
    ):
        for fault in FAULTS:
            each[f"{key}: {fault}"] = faulty_load(lab, fault, numbers_only=numbers_only)
        figures[key] = sum(bool(each[f"{key}: {fault}"]) for fault in FAULTS)
        say_when(f"{key} {figures[key]} of {len(FAULTS)}")
    figures["false_alarms"] = 0
    for dtype in ("float32", "bfloat16"):
        for what, lora in (("weights", False), ("adapter", True)):
            said = false_alarms(Lab(model_dir, dtype, adapter=lora), versions)
            figures["false_alarms"] += len(said)
            each |= {f"false alarm {number}, {what} in {dtype}": text for number, text in enumerate(said)}
        lab = Lab(model_dir, dtype)
        figures[f"smallest_move_{dtype}"] = smallest_move(lab, noisy=False)
        figures[f"smallest_move_noisy_{dtype}"] = smallest_move(lab, noisy=True)
        figures[f"smallest_tensor_{dtype}"] = smallest_tensor(lab)
        figures |= {f"{name}_{dtype}": value for name, value in seconds(lab).items()}
        say_when(f"{dtype} done")
    return {**figures, "each": each}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=find_recipe("quickstart").parent / "quickstart" / "model")
    parser.add_argument("--versions", type=int, default=24)
    add_json_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        store = dist.FileStore(f"{root}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        found = measure(options.model, options.versions)
        dist.destroy_process_group()
    table = "\n".join(f"{name:34} {value}" for name, value in found.items() if name != "each")
    said = "\n".join(f"  {name}: {text or 'NOT CAUGHT'}" for name, text in found["each"].items())
    report(options.json, found, f"{table}\n{said}")
    caught = all(found[key] == len(FAULTS) for key in ("undelivered_caught", "undelivered_caught_adapter"))
    return 0 if caught and not found["false_alarms"] else 1


if __name__ == "__main__":
    sys.exit(main())
