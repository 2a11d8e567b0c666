"""Adapters beside whole weights: what training and delivery cost, and whether all of them compute the same.

    python benchmarks/lora [--json [FILE]] [--only PART ...] [--rounds N] [--layers N] [--model DIR] [--seeds N]

    lora_state_vs_full      bytes of weights, gradients and optimizer, counted / those of training all weights in
                            float32; lora_state_vs_full_bfloat16: the base in bfloat16 (`actor.autocast`)
    lora_step_vs_full       a micro-batch with its update / the same with all weights, in turn, float32, processor time
                            of one thread; lora_step_floor: by counting matrix products
    peft_round_trip_max_abs our adapter, loaded and saved by peft, against itself; peft_log_probs_max_abs: peft's
                            log-probabilities against ours

and what the docstrings of the other `lora/part_*.py` say. Figures are ratios of medians.
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the clone, for `benchmarks` and its packages

from benchmarks.json_option import add_json_option, report

HERE = Path(__file__).resolve().parent


def main() -> None:
    parts = sorted(file.stem.removeprefix("part_") for file in HERE.glob("part_*.py"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=30, help="of SmolLM2's 30, where something is timed")
    parser.add_argument("--model", type=Path, metavar="DIR", help="of `learning`: SmolLM2-135M")
    parser.add_argument("--seeds", type=int, default=3, help="of `learning`")
    given = parser.parse_args()
    sizes = {"rounds": given.rounds, "layers": given.layers, "model": given.model, "seeds": given.seeds}
    figures: dict[str, float] = {}
    for part in given.only:
        print(part, file=sys.stderr, flush=True)
        figures |= import_module(f"benchmarks.lora.part_{part}").run(**sizes)
    report(given.json, figures, "\n".join(f"{name:32} {value:.4g}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
