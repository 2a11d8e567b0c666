"""An engine of your own that follows a run: attaches from outside, on the same node, as the same user.

    python examples/external_engine.py RUN_DIR                     prints every version and a checksum of its weights
    python examples/external_engine.py RUN_DIR --model MODEL_DIR   also loads it into a transformers model

Ends when the run does. Generators of the run neither wait for it nor notice it.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Mapping

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # at the end of a run the store is gone: no traces of that

import torch
from torch import Tensor

from asyncflow.errors import AsyncFlowError
from weightsync.export import connect_weights


def checksum(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of all weights, by name."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


parser = argparse.ArgumentParser(description="Follow the weights of a run.")
parser.add_argument("run_dir")
parser.add_argument("--model", help="Hugging Face directory with the model's config.json")
arguments = parser.parse_args()
model = None
if arguments.model:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments.model))


def load(weights: Mapping[str, Tensor]) -> None:
    """Take a version over; the tensors are views that are valid during this call only."""
    print(checksum(weights), end=" ", flush=True)  # noqa: T201
    if model is not None:
        model.load_state_dict(weights, strict=False)  # tied weights come once


try:
    with connect_weights(arguments.run_dir, "external-engine") as feed:
        held = None
        while feed.wait_newer(held, timeout_s=3600):
            held = feed.load(load, newer_than=held) or held
            print(f"weights of {held}", flush=True)  # noqa: T201
except AsyncFlowError as error:
    sys.exit(f"Error: {error}")
