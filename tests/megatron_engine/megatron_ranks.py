"""All ranks of test_megatron_engine: trains, saves and resumes with the `megatron` engine on the CPU, case after case.

python megatron_ranks.py DIR     reads DIR/cases.json: {case: options}; each rank writes DIR/CASE-RANK.pt
"""

import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import cpu_shim

cpu_shim.install()

import megatron.core.models.gpt  # noqa: E402 - once, before the ranks are forked
import megatron.core.optimizer  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from samples import NUM_SAMPLES, TEMPERATURE, make_sample  # noqa: E402
from torch import Tensor  # noqa: E402

from workers.checkpoint.saved_shards import ExportShare, HostCopy  # noqa: E402
from workers.engines.megatron.engine import MegatronEngine  # noqa: E402
from workers.rows.packed_rows import Sequences  # noqa: E402
from workers.settings.engines import ActorConfig  # noqa: E402
from workers.settings.lora import LoraConfig  # noqa: E402

DEADLINE_S = 400


def make_sequences(rows: list[int]) -> Sequences | None:
    """The named samples."""
    if not rows:
        return None
    samples = [make_sample(row) for row in rows]
    return Sequences.from_turns([prompt for prompt, _ in samples], [response for _, response in samples])


def square_loss(log_probs_A: Tensor, entropy_A: Tensor) -> Tensor:
    return (log_probs_A + 1).square().sum() - (0.5 * log_probs_A.detach() * entropy_A).sum()


class SquareLoss:
    """Counts the tokens of its calls as a whole."""

    def __init__(self, *, per_sample: bool) -> None:
        self.per_sample = per_sample
        self.calls: list[int] = []

    def __call__(self, log_probs_A: Tensor, entropy_A: Tensor) -> Tensor:
        self.calls.append(len(log_probs_A))
        return square_loss(log_probs_A, entropy_A)

    def cut_loss(self, sizes: list[tuple[int, int]]) -> list[Any] | None:
        return [square_loss] * len(sizes) if self.per_sample else None


def run(root: Path, case: str, options: dict[str, Any]) -> None:
    actor = ActorConfig(engine="megatron", lr=1e-2, eps=0.05, weight_decay=0.1, grad_clip=4.0, **options["actor"])
    lora = options.get("lora")
    engine = MegatronEngine(
        root / "models" / options["model"],
        actor=actor,
        temperature=TEMPERATURE,
        device=torch.device("cpu"),
        seed=0,
        timeout_s=60,
        lora=None if lora is None else LoraConfig.model_validate(lora),
    )
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    layout = actor.megatron.layout(num_ranks)
    replica = layout.place(rank).replica
    out: dict[str, Any] = {"norms": []}
    losses = {"per_sample": options.get("per_sample", False)}
    if options.get("resume"):
        state = engine.state_dict()
        dcp.load(state, checkpoint_id=root / f"half-{options['resume']}")
        engine.load_state_dict(state)
    else:
        everything = make_sequences(list(range(NUM_SAMPLES)))
        out["log_probs"] = engine.log_probs(everything)
        kept = engine.open_copy(initial=True)
        out["initial"] = kept.log_probs(everything)
        out["copies"] = [out["initial"].equal(out["log_probs"])]
        for number in (1, 2):
            out["norms"].append(update(engine, number, replica, layout.replicas, **losses))
        out["copies"].append(kept.log_probs(everything).equal(out["initial"]))
        if lora is None:
            kept.take()
            out["copies"].append(kept.log_probs(everything).equal(engine.log_probs(everything)))
        copy = HostCopy(torch.device("cpu"))
        state = copy.begin(engine.state_dict())
        copy.wait()
        dcp.save(state, checkpoint_id=root / f"half-{case}")
        copy.close()
    for number in (3, 4):
        out["norms"].append(update(engine, number, replica, layout.replicas, **losses))
    out["updates"] = engine.optimizer_updates
    out["final"] = engine.log_probs(make_sequences(list(range(NUM_SAMPLES))))
    for merged in (False, True)[: 1 if lora is None else 2]:
        engine._merged = merged
        out["merged" if merged else "shards"] = [
            (s.name, s.shape, s.box.offset, s.box.size, s.values.clone()) for s in engine.shards()
        ]
    out["trained"] = sum(each.grad_data.numel() for chunk in engine._parts.chunks for each in chunk.wrapped.buffers)
    parameters = [each for chunk in engine._parts.chunks for each in chunk.network.parameters()]
    out["held"] = sum(each.numel() for each in parameters if each.requires_grad)
    out["types"] = sorted({(each.requires_grad, str(each.dtype)) for each in parameters})
    torch.save(out, root / f"{case}-{rank}.pt")
    dcp.save(engine.state_dict(), checkpoint_id=root / f"end-{case}")
    if rank == 0:
        engine.export_hf(root / f"export-{case}", root / f"end-{case}")
    assert engine.export_share(root / f"shared-{case}", root / f"end-{case}", ExportShare(rank, num_ranks))


def update(engine: MegatronEngine, number: int, replica: int, replicas: int, *, per_sample: bool) -> float:
    """Update with all samples, return the gradient norm. In the second one the first replica has them all. Between the
    micro-batches log-probabilities are asked for, as tasks do while a pipeline is filled."""
    rows = list(range(replica, NUM_SAMPLES, replicas))
    if number == 2:
        rows = list(range(NUM_SAMPLES)) if replica == 0 else []
    half = len(rows) // 2
    losses = []
    for part in (rows[:half], [], rows[half:]):
        batch = make_sequences(part)
        losses.append((SquareLoss(per_sample=per_sample), batch))
        engine.forward_backward(batch, losses[-1][0])
        engine.log_probs(batch)
    engine.finish_micro_batches()
    for loss, batch in losses:
        assert loss.calls == ([] if batch is None else [batch.num_drawn]), "each rank calls each loss once"
    return engine.step(1 / 16).grad_norm


def rank_of(root: Path, case: str, options: dict[str, Any], rank: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(root / f"store-{case}"), options["ranks"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options["ranks"])
    run(root, case, options)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    root = Path(sys.argv[1])
    context = multiprocessing.get_context("fork")  # one import of torch and Megatron for all; no thread has run yet
    for case, options in json.loads((root / "cases.json").read_text()).items():
        ranks = [
            context.Process(target=rank_of, args=(root, case, options, rank), daemon=True)
            for rank in range(options["ranks"])
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + DEADLINE_S
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        if any(process.exitcode != 0 for process in ranks):
            sys.exit(f"{case}: {[process.exitcode for process in ranks]}")  # ends, as daemons, those that still run


if __name__ == "__main__":
    main()
