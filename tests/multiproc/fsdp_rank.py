"""One rank of test_fsdp_engine: trains three updates, saves, trains one more, exports; or resumes and trains the last.

python fsdp_rank.py DIR MODE RANK NUM_RANKS      MODE: train, resume, forward; hybrid, resume-hybrid: with two replicas;
    resume-plain: from a checkpoint of these; lora, resume-lora: an adapter, delivered merged; lora-adapter: alone;
    dropout: what an adapter's dropout leaves of the same samples on every rank
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from workers.checkpoint.saved_shards import ExportShare
from workers.engines.fsdp.sharding import FsdpEngine
from workers.rows.packed_rows import Sequences
from workers.settings.engines import ActorConfig
from workers.settings.lora import LoraConfig


def make_sequences(rows: list[int]) -> Sequences | None:
    """The named ones of six samples."""
    if not rows:
        return None
    samples = [torch.randint(2, 13, (4 + row,), generator=torch.Generator().manual_seed(row)) for row in rows]
    cuts = [2 + row % 2 for row in rows]
    return Sequences.from_turns(
        [sample[:cut] for sample, cut in zip(samples, cuts, strict=True)],
        [sample[cut:] for sample, cut in zip(samples, cuts, strict=True)],
    )


def square_loss(log_probs: Tensor, _entropy: Tensor) -> Tensor:
    return (log_probs + 1).square().sum()


def update(engine: FsdpEngine, number: int, rank: int, num_ranks: int) -> float:
    """Update with six samples, return the gradient norm. In the second one rank 0 has them all, as two batches."""
    if number == 2:
        for rows in ([0, 1, 2], [3, 4, 5]):
            engine.forward_backward(make_sequences(rows if rank == 0 else []), square_loss)
    else:
        engine.forward_backward(make_sequences(list(range(rank, 6, num_ranks))), square_loss)
    return engine.step(1 / 16).grad_norm


def run(root: Path, mode: str, rank: int, num_ranks: int) -> None:
    # With the usual tiny eps AdamW would hide a wrong factor on the gradients, and blow rounding up.
    # Two ranks recompute activations, one does not: the result is the same.
    actor = ActorConfig(
        lr=1e-2,
        eps=0.05,
        weight_decay=0.1,
        grad_clip=4.0,
        gradient_checkpointing=num_ranks > 1,
        fsdp_size=num_ranks // 2 if mode.endswith("hybrid") else 0,
    )
    engine = make_engine(root, actor, mode)
    saved_as = "checkpoint-lora" if "lora" in mode else "checkpoint"
    norms: list[float] = []
    if mode.startswith("resume"):
        state = engine.state_dict()
        dcp.load(state, checkpoint_id=root / f"{saved_as}-{4 if mode == 'resume-plain' else 2}")
        engine.load_state_dict(state)
    else:
        norms = [update(engine, number, rank, num_ranks) for number in (1, 2, 3)]
        if mode != "lora-adapter":
            dcp.save(engine.state_dict(), checkpoint_id=root / f"{saved_as}-{num_ranks}")
    norms.append(update(engine, 4, rank, num_ranks))
    (root / f"norms-{mode}-{num_ranks}-{rank}.json").write_text(json.dumps(norms))
    with CommDebugMode() as collectives:
        shards = [
            (shard.name, shard.shape, shard.box.offset, shard.box.size, shard.values.clone())
            for shard in engine.shards()
        ]
    assert collectives.get_total_counts() == 0, "shards() is called for every version and must gather nothing"
    torch.save(shards, root / f"shards-{mode}-{num_ranks}-{rank}.pt")
    if mode == "lora":
        (root / f"all-a-{num_ranks}-{rank}.json").write_text(json.dumps(all_a_bytes(engine)))
        woken = {(shard.name, shard.box.offset): shard.values for shard in engine.shards()}
        assert all(values.equal(woken[name, offset]) for name, _, offset, _, values in shards)
    saved = root / f"saved-{mode}-{num_ranks}"
    dcp.save(engine.state_dict(), checkpoint_id=saved)
    if rank == 0:
        engine.export_hf(root / f"export-{mode}-{num_ranks}", saved)
    assert engine.export_share(root / f"shared-{mode}-{num_ranks}", saved, ExportShare(rank, num_ranks))


def all_a_bytes(engine: FsdpEngine) -> list[int]:
    """Return the bytes of every whole A that merging needs beside the model, and those left asleep; it wakes again."""
    assert engine._adapter is not None
    of_model = {parameter.untyped_storage()._cdata for parameter in engine._model.parameters()}
    kept = [value for value in engine._adapter.gathered if value.untyped_storage()._cdata not in of_model]
    engine.sleep()
    asleep = sum(value.untyped_storage().nbytes() for value in kept)
    engine.wake()
    return [sum(value.nbytes for value in kept), asleep]


def forward(root: Path, rank: int, num_ranks: int) -> None:
    """Log-probabilities before and after an update; rank 0 has all rows, the others take part without any."""
    engine = make_engine(root, ActorConfig(lr=1e-2))
    rows = make_sequences([0, 1, 2, 3, 4, 5] if rank == 0 else [])
    before = engine.log_probs(rows)
    engine.forward_backward(rows, square_loss)
    between = engine.log_probs(rows)
    engine.step(1 / 16)
    after = engine.log_probs(rows)
    engine.zero_grad()
    torch.save((before, between, after), root / f"log-probs-{num_ranks}-{rank}.pt")


def drop_inputs(root: Path, rank: int) -> None:
    """All ranks have the same rows, and save the log-probabilities that the loss gets."""
    lora = LoraConfig(rank=3, dropout=0.5)
    engine = FsdpEngine(
        root / "model", actor=ActorConfig(lr=1e-2), temperature=1.0, device=torch.device("cpu"), seed=0, lora=lora
    )
    seen: list[Tensor] = []

    def keep(log_probs: Tensor, entropy: Tensor) -> Tensor:
        seen.append(log_probs.detach())
        return square_loss(log_probs, entropy)

    for _ in range(2):  # the first update leaves a B that is not 0
        engine.forward_backward(make_sequences([0, 1, 2, 3, 4, 5]), keep)
        engine.step(1 / 16)
    torch.save(seen, root / f"dropout-{rank}.pt")


def make_engine(root: Path, actor: ActorConfig, mode: str = "") -> FsdpEngine:
    # A rank that does not divide by two.
    lora = LoraConfig(rank=3, alpha=6) if "lora" in mode else None
    merged = mode != "lora-adapter"
    return FsdpEngine(
        root / "model", actor=actor, temperature=1.0, device=torch.device("cpu"), seed=0, lora=lora, merged=merged
    )


def main() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    root, mode, rank, num_ranks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    store = dist.FileStore(str(root / f"store-{mode}-{num_ranks}"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    if mode == "forward":
        forward(root, rank, num_ranks)
    elif mode == "dropout":
        drop_inputs(root, rank)
    else:
        run(root, mode, rank, num_ranks)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
