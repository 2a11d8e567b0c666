"""What accelerators see: measured on one where there is one, else on fakes and the CPU.

    python benchmarks/devices [--json [FILE]] [--only logits,logits_time] [--rounds 3] [--layers 24]
                              [--interpreters A/bin/python,B/bin/python,C/bin/python]

`logits`, some five minutes, 7 GB: log-probabilities and entropies from hidden states (float32) through a head of
Qwen2.5-0.5B (V 151,936, hidden 896), forward and backward. *Before* materialises the logits, as the engines did; *now*
is `workers/engines/packed_forward.py`:

    logits_peak_x           peak of memory at 2,048 drawn tokens, before / now; each the process's high-water mark less
                            what it has in the end: weights, gradients and results
    logits_peak_mb          of now
    logits_bytes_per_token  (peak at 16,384 drawn tokens - peak at 8,192) / 8,192, of now; here the gradients count
    logits_max_rel          now in float32 against before in float64: the largest relative difference of a
                            log-probability or an entropy, and of the norm of a gradient (512 tokens, temperature 0.7)
    logits_before_rel       the same of before in float32

`logits_time`, some eight minutes, 10 GB; in turn, medians of `--rounds`:

    logits_time_x           forward and backward of a micro-batch of 1,024 drawn tokens (4 prompts of 64 tokens) by a
                            model of Qwen2.5-0.5B's shape with `--layers` of its 24 layers, now / before
    logits_head_time_x      of the head alone

`gpu`, two minutes, nothing without a CUDA device: a micro-batch of two prompts of 512 tokens, each with eight responses
of up to 768, by models of the shapes of Qwen2.5-0.5B and -1.5B with random weights, one rank, bfloat16:

    gpu_SIZE_unrounded_x    logits and gradients of hidden states that were rounded to bfloat16 first / now
    gpu_SIZE_compiled_x     without / with `actor.compile`
    gpu_SIZE_mfu            with it: the model's operations / what an H100's or H200's data sheet promises (989 TFLOP/s)
    gpu_SIZE_waits          how often the host waits for the device in a micro-batch

`broadcast`, some ten minutes; the first figure on `late` (`tests/device`, needs g++), the others on the CPU:

    broadcast_host_copies   copies of weights between a device and the host in a broadcast, outside of the group's own
                            transport, at the end that made most
    torn_draws              outputs of generators that were made with other weights than those of the version that they
                            claim, while receivers and trainer ranks are killed and buckets are damaged on their way
    torn_transfers          broadcasts meanwhile; every other one is struck; `_survived`: after which all went on
    torn_outputs            that were compared

`vllm`, some ten minutes a version, nothing without `--interpreters`, each with another version of vLLM's CPU build:

    vllm_versions_passed        interpreters that pass the conformance suite of the generating engines whole
    vllm_ascend_workers_passed  of these, with which the worker that has vllm-ascend's order and refusals passes

`environments`, some three minutes, nothing without `--interpreters` for rollout, actor and reference:

    environments_run        1: the quickstart with an interpreter for each of these made 20 steps, over SIGKILLs of a
                            rollout and of the actor; `_skipped`: groups that were not trained; `_twice`: groups that
                            were, or updates that were made, twice

`late`, some forty minutes, on the fake device `late` (`tests/device`, needs g++), in both of its schedules:

    syncs_per_micro_batch   how often the host waits for the device in a micro-batch of GRPO, but for an engine's first
    syncs_per_update        and in an update, with the transfer of all figures of its micro-batches
    planted_mistakes        mistakes that pass on the CPU (`tests/device/plants.py`)
    planted_mistakes_missed that neither schedule shows, or that the CPU shows, too
    memory_settings         engines' settings whose peak of memory is compared with the estimate
    memory_model_error_max  the largest |estimate / peak of the device's allocator - 1|
    late_runs_failed        runs of the quickstart (staged, broadcast, resumed, PPO) whose metrics are not the CPU's

    megatron_waits_per_micro_batch   the same of the `megatron` engine, with recomputed layers

`pipeline`, at once: slots in which a stage computes a piece, or nothing; two stages, an update of four micro-batches of
four equal pieces:

    pipeline_bubble         idle slots / all, with a loss that is a sum over samples; `_virtual`: with two chunks each;
                            `_whole`: with a loss of the whole micro-batch
    pipeline_live_pieces    most pieces whose activations a stage keeps at a time; `_whole`: likewise

`kernels`, a minute on the CPU, Qwen2.5-0.5B's layer, forward and backward of 512 tokens in bfloat16: bytes that kernels
read and write beside matrix products and attention:

    npu_patched_bytes_x     transformers' / with Ascend's fused kernels, each counted as its inputs and outputs
    npu_patched_gradients_rel   the difference of the gradients, relative to their norm
    compiled_bytes_x        transformers' / compiled, by inductor's own count

`replica`, a minute, on `late`:

    replica_device_equal    1: rows that three ranks share have the same bits by `tq.replica_broadcast: device` as by
                            `host`, lengths included, with a layer's collectives between them

`tp_broadcast`, two minutes, on `late`: a trainer broadcasts versions to a generator of two ranks, whose model makes a
collective per token, until three have come to both, in either schedule:

    tp_broadcast_collectives_in_flight  collectives of the model that a rank issued while it took part in a broadcast
                                        (its group's connecting included), or whose end it had not seen when it began
    tp_broadcast_transfers, _tokens     broadcasts that came, tokens that were drawn between them, of both ranks
    tp_broadcast_in_flight_unpaused     the first figure if the engine is not paused, which shows that the count tells

`sharded_ref`, a minute, Gloo on the CPU, tiny models; `megatron` where megatron-core is installed:

    sharded_ref_max_abs     the reference over 2 and 4 ranks, `fsdp` and `megatron` (tensor, pipeline, context
                            parallel): the largest difference of a log-probability from the whole model in one process,
                            with the initial weights, with others that it received as boxes, and with those of files

`stop`, some ten minutes, quickstart runs with two actor ranks whose exports take 40 s, stopped by SIGUSR1 five times:

    stop_lost_steps         steps that were trained but are in no checkpoint when the command has ended
    stop_longest_s          from the signal to the end of the command
    stop_exports            checkpoints with `hf/` that were found at the ends
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the clone, for `benchmarks` and its packages

from benchmarks.json_option import report

HERE = Path(__file__).resolve().parent
PARTS = sorted(file.stem.removeprefix("part_") for file in HERE.glob("part_*.py"))


@click.command(help=__doc__.split("\n", 1)[0])
@click.option(
    "--json", "target", is_flag=False, flag_value="-", help="Print one JSON object; with FILE write it there."
)
@click.option("--only", default=",".join(PARTS), show_default=True, help="Parts, with commas between them.")
@click.option("--rounds", default=3, show_default=True, help="Of what is timed.")
@click.option("--layers", default=24, show_default=True, help="Of the timed model.")
@click.option("--interpreters", default="", help="For parts `environments` and `vllm`, with commas between them.")
def main(target: str | None, only: str, rounds: int, layers: int, interpreters: str) -> None:
    """Measure and print."""
    chosen = only.split(",")
    if unknown := set(chosen) - set(PARTS):
        raise click.UsageError(f"--only: there is no part {' '.join(sorted(unknown))}; there are {' '.join(PARTS)}")
    options: dict[str, Any] = {"rounds": rounds, "layers": layers}
    figures: dict[str, float] = {}
    for name in chosen:
        print(f"part {name}", file=sys.stderr, flush=True)
        own = {"interpreters": list(filter(None, interpreters.split(",")))} if name in ("environments", "vllm") else {}
        figures |= import_module(f"benchmarks.devices.part_{name}").run(**options, **own)
    report(target, figures, "\n".join(f"{name:24} {value:10.4g}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
