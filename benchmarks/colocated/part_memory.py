"""What sleeping engines leave on a device, how long a swap takes, and what vLLM is asked while it sleeps.

On `late`, the fake device of `tests/device` (needs g++), with a model of 28 million parameters, one rank and two:

    colocated_resident_x    bytes that an engine holds asleep / awake, of the allocator, the largest of all engines:
                            `fsdp` in float32 and bfloat16 with gradients of half a step, moments and a copy of the
                            policy; `hf` with running responses; a reference
    colocated_same_bits     1: each of them goes on as one that never slept, to the last bit
    swap_vs_memcpy          a trainer's sleep and wake with warm buffers / copying as many bytes out and in, as one
                            tensor whose memory is freed and allocated between; one rank, medians

Against a stand-in for vLLM (`tests/support/strict_vllm.py`):

    vllm_order_refusals     wrong calls, orders, levels, tags and modes that it refuses
    vllm_order_wrong        of so many; the engine's own calls, of which it refuses none, are a unit test
"""

import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

# By name: the modules of tests are scripts for ranks, which mypy is not told of.
processes: Any = import_module("tests.device.processes")
strict_vllm: Any = import_module("tests.support.strict_vllm")

DEADLINE_S = 1800


def run(**_: object) -> dict[str, float]:
    """Return the figures; every engine's own are printed to stderr."""
    return _on_late() | _refusals()


def _on_late() -> dict[str, float]:
    resident, ratios, same = [], [], []
    with tempfile.TemporaryDirectory(prefix="late-") as work:
        env = processes.environment(processes.build_late(Path(work)))
        for num_ranks in (1, 2):
            directory = Path(work) / f"asleep-{num_ranks}"
            found = processes.run_ranks(env, directory, "asleep", num_ranks=num_ranks, deadline_s=DEADLINE_S)
            assert found is not None, "a rank failed; its output is above"
            for rank, said in enumerate(found):
                for name, one in said.items():
                    resident.append(one["asleep"] / one["awake"])
                    ratios += [one["swap_s"] / one["memcpy_s"]] if "swap_s" in one and num_ranks == 1 else []
                    same.append(one["same"])
                    print(f"{name}, rank {rank} of {num_ranks}: {one}", file=sys.stderr)
    return {
        "colocated_resident_x": max(resident),
        "colocated_same_bits": float(all(same)),
        "swap_vs_memcpy": max(ratios),
    }


def _refusals() -> dict[str, float]:
    refused = [wrong.__name__ for wrong in strict_vllm.WRONG if strict_vllm.refuses(wrong)]
    return {"vllm_order_refusals": len(refused), "vllm_order_wrong": len(strict_vllm.WRONG)}
