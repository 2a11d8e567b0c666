"""A generator outside of a run, e.g. an inference cluster that you have: leases prompts, writes samples back.

    asyncflow-launch --roles rollout:0,actor:1,reward:1 --run-dir runs/mine    a run that generates nothing itself
    python examples/external_generator.py runs/mine                           as many of them as you like, any time

Its samples obey the schedule's staleness bound: it says which weights it holds, gets only prompts of steps that those
may generate for, and what it puts is refused if a token is older. Here transformers draws, with the sampling settings
of the run but `top_p` and `top_k`. Ends with the run; one that leaves or is killed costs only what it had in hand.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # at the end of a run the store is gone: no traces of that

import torch
import yaml
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import asyncflow
from asyncflow.errors import AsyncFlowError


class Generator:
    """A model that draws responses."""

    def __init__(self, run_dir: Path) -> None:
        settings = yaml.safe_load((run_dir / "config.yaml").read_text())
        path = settings["model"]["path"]
        self._rollout = settings["rollout"]
        build: Any = AutoModelForCausalLM.from_config
        self.model = build(AutoConfig.from_pretrained(path)).eval()
        self._end = AutoTokenizer.from_pretrained(path).eos_token_id

    @torch.no_grad()
    def draw(self, prompt: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Return tokens, int64 [R], their log-probabilities, float32 [R], and whether the response was cut off."""
        tokens, log_probs = prompt.tolist(), []
        for _ in range(self._rollout["max_response_tokens"]):
            logits = self.model(torch.tensor([tokens])).logits[0, -1].float() / self._rollout["temperature"]
            log_p = logits.log_softmax(-1)
            tokens.append(int(torch.multinomial(log_p.exp(), 1)))
            log_probs.append(float(log_p[tokens[-1]]))
            if tokens[-1] == self._end:
                break
        return torch.tensor(tokens[len(prompt) :]), torch.tensor(log_probs), tokens[-1] != self._end

    def samples(self, prompts: Sequence[Tensor], version: int) -> dict[str, Any]:
        """Return the columns that task `actor_rollout` writes: a response to each prompt, by weights of one version."""
        drawn = [self.draw(prompt) for prompt in prompts]
        tokens = [torch.cat([prompt, response]) for prompt, (response, _, _) in zip(prompts, drawn, strict=True)]
        return {
            "tokens": tokens,
            "sample_lengths": [[len(row)] for row in tokens],
            "response_mask": [
                torch.arange(len(row)) >= len(prompt) for row, prompt in zip(tokens, prompts, strict=True)
            ],
            "rollout_log_probs": [log_probs for _, log_probs, _ in drawn],
            "versions": [[version] * len(response) for response, _, _ in drawn],
            "truncated": [truncated for _, _, truncated in drawn],
        }


def serve(run_dir: Path) -> None:
    """Generate until the run ends."""
    generator, held = Generator(run_dir), None
    with asyncflow.connect(run_dir, name=f"generator-{os.getpid()}") as run:
        feed = run.weights()
        while feed.wait_newer(held, timeout_s=3600):
            held = feed.load(lambda new: generator.model.load_state_dict(new, strict=False), newer_than=held) or held
            assert held is not None, "there was something newer than nothing"
            for lease in run.stream("actor_rollout", num_rows=32, version=held, prefetch=0):
                print(f"in hand: {len(lease)} prompts of step {lease.partition}, {held}", flush=True)  # noqa: T201
                lease.put(generator.samples(list(lease["prompts"].rows()), held.step))
                if feed.newest != held:
                    break


try:
    serve(Path(sys.argv[1]))
except AsyncFlowError as error:
    sys.exit(f"Error: {error}")
