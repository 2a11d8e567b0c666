"""Models of transformers, built without memory for their parameters."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from launcher.config.load import load_config
from launcher.config.paths import find_recipe
from workers.engines.hf.model import empty_causal_lm


def test_modules_of_other_threads_keep_their_memory_while_a_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[nn.Module] = []

    class Built:
        @staticmethod
        def from_config(*_: Any, **__: Any) -> nn.Module:
            other = threading.Thread(target=lambda: others.append(nn.Linear(2, 2)))
            other.start()
            other.join(timeout=30)
            return nn.Linear(2, 2)

    monkeypatch.setattr("workers.engines.hf.model.AutoModelForCausalLM", Built)
    model_dir = load_config(find_recipe("quickstart")).model.path
    built = empty_causal_lm(Path(model_dir), dtype=torch.float32, attention="sdpa")
    assert all(parameter.is_meta for parameter in built.parameters())
    assert len(others) == 1 and not any(parameter.is_meta for parameter in others[0].parameters())
    assert not any(parameter.is_meta for parameter in nn.Linear(2, 2).parameters())
