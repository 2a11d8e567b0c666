"""TRL's GRPOTrainer on the workload; run by the peer's own Python, which knows nothing of AsyncFlow.

    PEER/bin/python trl_peer.py WORKLOAD.json THREADS

Prints one JSON object: seconds and response tokens of every step, and the versions.
"""

import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": sys.argv[2]}

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepClock(TrainerCallback):  # type: ignore[misc]
    """When every step ended (s)."""

    def __init__(self) -> None:
        self.ended: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ended.append(time.monotonic())


def main() -> None:
    workload = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(workload["threads"])
    lines = [json.loads(line) for line in Path(workload["prompts"]).read_text().splitlines()]
    rows = [{"prompt": [{"role": "user", "content": line["prompt"]}], "answer": line["answer"]} for line in lines]
    num_tokens: list[int] = []

    def reward(completions: Any, answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        num_tokens.append(sum(map(len, completion_ids)))
        texts = [completion[-1]["content"] for completion in completions]
        last = [(re.findall(r"-?\d+", text) or [""])[-1] for text in texts]
        return [float(one == right) for one, right in zip(last, answer, strict=True)]

    clock = StepClock()
    model = AutoModelForCausalLM.from_pretrained(workload["model"], dtype=getattr(torch, workload["dtype"]))
    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory,
            per_device_train_batch_size=workload["responses"], num_generations=workload["responses"],
            max_completion_length=workload["tokens"], max_steps=workload["steps"], use_cpu=True, bf16=False, fp16=False,
            logging_steps=1, report_to=[], save_strategy="no", learning_rate=1e-6, beta=0.0, temperature=1.0,
            gradient_checkpointing=False, dataloader_num_workers=0, seed=0, use_vllm=False,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model, processing_class=AutoTokenizer.from_pretrained(workload["model"], padding_side="left"),
            reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows), callbacks=[clock],
        )  # fmt: skip
        trainer.train()
    versions = {each.__name__: each.__version__ for each in (trl, transformers, torch)}
    print(json.dumps({"ended_s": clock.ended, "tokens": num_tokens, "versions": versions}))


if __name__ == "__main__":
    main()
