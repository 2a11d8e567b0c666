"""A tiny model with the quickstart's tokenizer, with heads of a size that vLLM's CPU kernels know, and a run of it."""

import shutil
from pathlib import Path

import configs

QUICKSTART = Path(configs.__file__).parent / "quickstart"


def save_model(path: Path) -> Path:
    """Write a random model of two layers with tokenizer; returns its directory.

    It has far more tokens than the tokenizer, so an answer's end is rarely drawn and answers are long.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    settings = Qwen2Config(
        vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    Qwen2ForCausalLM(settings).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(QUICKSTART / "model" / name, path / name)
    return path


def arguments(root: Path, **settings: object) -> list[str]:
    """Return a command line that trains that model for a few steps, with vLLM."""
    model = save_model(root / "model")
    chosen = {
        "model.path": model,
        "rollout.engine": "vllm",
        "rollout.max_response_tokens": 96,
        "rollout.batch_size": 16,
        "data.max_prompt_tokens": 16,
        "schedule.mode": "substep",
        "schedule.max_staleness": 1,
        "schedule.rollout_batch_size": 4,
        "schedule.n_samples_per_prompt": 4,
        "vllm.kv_cache_gb": 0.1,
        "actor.micro_batch_size": 16,
        "algorithm.kl_coef": 0,
        "checkpoint.interval": 0,
        "launcher.start_timeout_s": 900,
        **settings,
    }
    return ["quickstart", *(word for name, value in chosen.items() for word in ("--set", f"{name}={value}"))]
