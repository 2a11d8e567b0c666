"""Opens a vLLM engine on the model in a directory, says `ready`, and holds it until its input ends.

python engine_holder.py DIR RANKS     RANKS that share the model
"""

import sys
from pathlib import Path

import torch

from workers.engines.vllm.engine import VllmEngine
from workers.settings.rollout import SamplingConfig
from workers.settings.run import ModelConfig
from workers.settings.vllm import VllmConfig

if __name__ == "__main__":
    model_dir = Path(sys.argv[1])
    engine = VllmEngine(
        model_dir,
        ModelConfig(path=str(model_dir)),
        VllmConfig(kv_cache_gb=0.1, tensor_parallel_size=int(sys.argv[2])),
        sampling=SamplingConfig(max_response_tokens=8),
        max_prompt_tokens=16,
        device=torch.device("cpu"),
    )
    sys.stderr.write("ready\n")
    sys.stdin.read()
    engine.close()
