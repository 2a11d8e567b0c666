"""Servers that speak OpenAI's completions API as the generation engine: the user's own inference cluster."""

import asyncio
import logging
import re
import shutil
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncflow.errors import ConfigError, EngineFailed
from workers.calls.pool import CallPool
from workers.data.model_files import max_positions
from workers.engines.base import EngineSetup, GenerateRequest, Generation
from workers.engines.hf.model import DTYPES
from workers.engines.hf.weights import copy_without_weights, write_weights
from workers.engines.openai.openai_server import (
    Completion,
    OpenAIServer,
    RequestRefused,
    ServedWeights,
    open_updates,
    pauses,
)
from workers.engines.response_tasks import ResponseTasks, TaskEngine
from workers.engines.stop_strings import StopStrings
from workers.settings.openai import OpenAIConfig, read_api_key
from workers.settings.rollout import SamplingConfig
from workers.settings.run import ModelConfig

#     submit         one streamed request per response, spread over the servers; prompts and responses as token ids
#     load_weights   safetensors into `weights_dir`, then tell every server; only while nothing runs
#
# A response that breaks off is requested again from its beginning; a server that stays away fails the rollout, which
# the supervisor restarts. Weights are never swapped inside a response, since the API does not say which weights drew
# which token. `ServedWeights` notices a vLLM server that lost its weights.

logger = logging.getLogger(__name__)

_DIRECTORY = re.compile(r"load_(\d{6,})")
_KEPT = 2  # weight directories to keep: a server may still be reading the last but one


class OpenAIEngine(TaskEngine):
    """Has servers generate responses; implements `GenerateEngine`.

    The servers must be running. Weights are written in `model.dtype`.

    Raises:
        ConfigError: the settings would make log-probabilities wrong.
        EngineFailed: a server does not answer.
    """

    interruptible = False

    def __init__(self, model_dir: Path, model: ModelConfig, config: OpenAIConfig, *, sampling: SamplingConfig) -> None:
        check_sampling(config, sampling)
        super().__init__(model_dir, model, sampling, max_positions(model_dir))
        self._model_dir = model_dir
        self._config = config
        self._dtype = DTYPES[model.dtype]
        self._updates: CallPool | None = None
        self._warned = False
        self.version = 0
        self._tasks = ResponseTasks("openai")
        self._pauses_s = sum(pauses(config.retries, config.retry_pause_s))
        self._servers = self._tasks.call_in_loop(self._connect_servers, what="connections", timeout_s=config.timeout_s)
        self._weights = [ServedWeights(server, timeout_s=config.update_timeout_s) for server in self._servers]
        first = self._servers[0]
        self._served = config.model or self._run_with_retries(
            first.first_model(), "the servers' models", timeout_s=(config.retries + 1) * config.timeout_s
        )

    @staticmethod
    def of_run(setup: EngineSetup) -> "OpenAIEngine":
        return OpenAIEngine(setup.model_dir, setup.run.model, setup.run.openai, sampling=setup.sampling)

    def _replace_weights(self, weights: Mapping[str, Tensor], *, adopt: bool) -> None:
        """Write all weights and have every server take them. Not while responses run.

        Raises:
            EngineFailed: a server did not take them.
            UserCodeFailed: the user's function raised, or did not return in time.
        """
        assert not self.num_running, "load_weights() while responses run"
        directory = self._write_weights(weights)
        config = self._config
        if config.update == "vllm":
            # `ServedWeights.take_weights` makes four requests per attempt.
            timeout_s = (config.retries + 1) * 4 * config.update_timeout_s
            self._run_with_retries(self._take_all(directory), "the servers to take weights", timeout_s=timeout_s)
            return
        if self._updates is None:
            self._updates = open_updates(config)
        self._updates.call_and_wait(str(directory), on=f"the weights in {directory}")

    def prompt_log_probs(self, tokens_T: Tensor) -> Tensor | None:
        """See `ScoringEngine`: one copy per server. None at another temperature than 1, which servers do not apply to
        prompts, and if a server does not give a prompt's log-probabilities (vLLM's does), which is logged."""
        if self._sampling.temperature not in (0, 1):
            return None

        async def score_all() -> list[list[float]]:
            scored = (server.score_prompt(self._served, tokens_T.tolist()) for server in self._servers)
            return list(await asyncio.gather(*scored))

        timeout_s = (self._config.retries + 1) * self._config.timeout_s
        try:
            found = self._run_with_retries(score_all(), "the servers to score a prompt", timeout_s=timeout_s)
        except RequestRefused as error:
            if not self._warned:
                logger.warning("log-probabilities of the probe are not compared: %s", error)
            self._warned = True
            return None
        return torch.tensor(found, dtype=torch.float32)

    def close(self) -> None:
        """Close all connections; idempotent. The servers continue with the weights they have."""
        if self._servers:
            self._tasks.abort()
            for server in self._servers:
                self._run_with_retries(server.close(), "connections to close", timeout_s=self._config.timeout_s)
            self._servers = []
            self._tasks.close()
        if self._updates is not None:
            self._updates.close()

    def _connect_servers(self) -> list[OpenAIServer]:
        config, api_key = self._config, read_api_key(self._config.api_key_variable, "openai.api_key_variable")
        return [
            OpenAIServer(
                url,
                api_key=api_key,
                timeout_s=config.timeout_s,
                retries=config.retries,
                retry_pause_s=config.retry_pause_s,
                num_connections=self._sampling.batch_size + 1,
            )
            for url in config.urls
        ]

    def _response_to(self, request: GenerateRequest) -> Coroutine[Any, Any, Generation]:
        return self._generate(request, self.version)

    async def _generate(self, request: GenerateRequest, version: int) -> Generation:
        number = request.index % len(self._servers)  # one server per row: later turns hit its prefix cache
        server, weights = self._servers[number], self._weights[number]
        sampling, limit = self._sampling, request.limit(self._sampling.max_response_tokens)
        ends = self._end_tokens(request)
        body = {
            "model": self._served,
            "prompt": request.prompt_P.tolist(),
            "max_tokens": limit,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            # Otherwise the values of the model's generation_config.json would apply and change the distribution.
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": request.signed_seed,
            "ignore_eos": True,  # the server's own end tokens; `stop_token_ids` decides
            "stop_token_ids": ends,
            "skip_special_tokens": False,
        }
        stop = request.stop
        is_over = (lambda tokens, since: stop.are_in(tokens, since=since)) if stop else (lambda tokens, since: False)
        completion = await server.complete_prompt(
            body, self._tasks.note_progress, weights.ensure_unchanged, is_over=is_over
        )
        check_completion(server.url, completion, ends=ends, vocab_size=self._vocab_size, max_tokens=limit, stop=stop)
        return Generation.of(
            request,
            tokens=completion.tokens,
            log_probs=completion.log_probs,
            versions=[version] * len(completion.tokens),
            truncated=completion.truncated,
        )

    def _write_weights(self, weights: Mapping[str, Tensor]) -> Path:
        """Write the next numbered Hugging Face directory; remove all but the newest `_KEPT`."""
        root = Path(self._config.weights_dir)
        root.mkdir(parents=True, exist_ok=True)
        old = sorted((path for path in root.iterdir() if _DIRECTORY.fullmatch(path.name)), key=_number)
        target = root / f"load_{_number(old[-1]) + 1 if old else 1:06}"
        copy_without_weights(self._model_dir, target)
        shapes = {name: need.shape for name, need in self._needs.items()}
        write_weights(target, shapes, lambda name: weights[name].to(self._dtype).contiguous())
        for path in old[: -_KEPT + 1]:
            shutil.rmtree(path)
        return target

    async def _take_all(self, directory: Path) -> None:
        await asyncio.gather(*(weights.take_weights(directory) for weights in self._weights))

    def _run_with_retries(self, coroutine: Any, what: str, *, timeout_s: float) -> Any:
        """Run what may be attempted several times; `timeout_s` excludes the pauses between attempts."""
        return self._tasks.run_coroutine(coroutine, what=what, timeout_s=timeout_s + self._pauses_s)


def check_completion(
    server: str,
    completion: Completion,
    *,
    ends: Sequence[int],
    vocab_size: int,
    max_tokens: int,
    stop: StopStrings | None = None,
) -> None:
    """Refuse responses that cannot be trained on: of another model, or of a server with its own stop rules.
    Raises EngineFailed."""
    tokens, wrong = completion.tokens, ""
    unknown = [token for token in tokens if not 0 <= token < vocab_size]
    if not 0 < len(tokens) <= max_tokens:
        wrong = f"returned {len(tokens)} tokens, where 1 to {max_tokens} were requested"
    elif unknown:
        wrong = f"returned token {unknown[0]}, but the model has {vocab_size} tokens: it serves another model"
    elif not set(ends).isdisjoint(tokens[:-1]):
        wrong = "continued after an end token of the model; it must respect `stop_token_ids`"
    elif not completion.truncated and tokens[-1] not in ends and not (stop and stop.are_in(tokens)):
        wrong = (
            f"ended a response with token {tokens[-1]}, which is not an end token of the model (those are "
            f"{', '.join(map(str, ends))}); it must return the token that ends a response, and have no stop rules of "
            f"its own"
        )
    if wrong:
        raise EngineFailed(f"openai: {server} {wrong}")


def check_sampling(config: OpenAIConfig, sampling: SamplingConfig) -> None:
    """Refuse settings under which the servers' log-probabilities are not those of the tempered distribution.
    Raises ConfigError."""
    if sampling.temperature == 0:
        return
    filtered = sampling.top_p < 1 or sampling.top_k > 0
    if config.logprobs_mode == "raw" and sampling.temperature != 1:
        raise ConfigError(
            f"rollout.temperature: {sampling.temperature:g} cannot be used with openai.logprobs_mode raw, whose "
            f"log-probabilities are those of temperature 1; start the servers with --logprobs-mode processed_logprobs "
            f"and set openai.logprobs_mode to processed, or set rollout.temperature to 1"
        )
    if config.logprobs_mode == "processed" and filtered:
        raise ConfigError(
            "openai.logprobs_mode: processed cannot be used with rollout.top_p or rollout.top_k, which would change "
            "the log-probabilities; leave these out, or use raw with rollout.temperature 1"
        )


def _number(directory: Path) -> int:
    return int(directory.name.removeprefix("load_"))
