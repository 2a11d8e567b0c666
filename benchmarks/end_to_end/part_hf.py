"""hf_vs_trl_fp32 hf_vs_trl_bf16: response tokens trained per second with `rollout.engine: hf`, times those of TRL."""

from benchmarks.end_to_end.runs import Lab, ratio_of_medians


def run(lab: Lab) -> dict[str, float]:
    """Train both in turn."""
    return {
        f"hf_vs_trl_{short}": ratio_of_medians(*lab.rates("hf", dtype))
        for short, dtype in (("fp32", "float32"), ("bf16", "bfloat16"))
    }
