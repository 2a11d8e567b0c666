"""vllm_vs_trl_fp32 vllm_vs_trl_bf16: response tokens trained per second with `rollout.engine: vllm`, times TRL's.

Needs `--engine-python vllm=PATH` of an environment with vLLM, where this one has none.
"""

from benchmarks.end_to_end.runs import Lab, ratio_of_medians


def run(lab: Lab) -> dict[str, float]:
    """Train both in turn."""
    return {
        f"vllm_vs_trl_{short}": ratio_of_medians(*lab.rates("vllm", dtype))
        for short, dtype in (("fp32", "float32"), ("bf16", "bfloat16"))
    }
