"""A generating engine of your own in one file: transformers, with a forward pass over whole sequences per token.

    cd examples && asyncflow-launch quickstart --set rollout.engine=custom_engine:PlainEngine \\
        --set rollout.engine_options.tokens_per_step=2

It keeps no keys and values, so it is slow, and every token is one of the newest weights without more ado. It passes the
suite that the package's engines pass: `from asyncflow.testing.generating import *`, see docs/engines.md.

Legend of shapes: B running responses, V tokens of the vocabulary.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from asyncflow.errors import ConfigError
from asyncflow.settings import Settings
from weightsync.plan import Need
from workers.data.model_files import eos_token_ids
from workers.engines.base import EngineSetup, GenerateRequest, Generation, check_request
from workers.settings.run import RunConfig


class PlainConfig(Settings):
    """`rollout.engine_options`, checked before anything starts."""

    tokens_per_step: int = Field(4, ge=1)
    """Tokens that each running response gets, at most, before the loop looks for new requests and weights."""

    def check(self, run: RunConfig) -> None:
        """Refuse settings of the run that the engine does not have."""
        if run.rollout.on_swap == "keep":
            raise ConfigError("rollout.on_swap: keep needs an engine that keeps keys; set it to recompute or finish")


@dataclass
class Running:
    """A response: what was drawn, under which version of the weights."""

    request: GenerateRequest
    chance: torch.Generator
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class PlainEngine:
    """What `rollout.engine` names; fulfils `workers.engines.base.GenerateEngine`."""

    Config = PlainConfig
    adopts_weights = False

    def __init__(self, setup: EngineSetup) -> None:
        self.version = 0
        self._options: PlainConfig = setup.options
        self._sampling = setup.sampling
        self._eos = eos_token_ids(setup.model_dir)
        self._config = AutoConfig.from_pretrained(setup.model_dir)
        self._model: Any = AutoModelForCausalLM.from_config(self._config, dtype=torch.float32).to(setup.device).eval()
        self._running: dict[int, Running] = {}

    @property
    def interruptible(self) -> bool:
        return self._sampling.on_swap != "finish"

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def free_slots(self) -> int:
        return self._sampling.batch_size - len(self._running)

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        limits = {
            "vocab_size": self._config.vocab_size,
            "max_length": self._config.max_position_embeddings,
            "max_response_tokens": self._sampling.max_response_tokens,
        }
        for request in requests:
            check_request(request, **limits)
        for request in requests:
            self._running[request.ticket] = Running(request, torch.Generator().manual_seed(request.signed_seed))

    def step(self, wake: threading.Event) -> list[Generation]:
        finished: list[Generation] = []
        for _ in range(self._options.tokens_per_step):
            running = list(self._running.values())
            if finished or not running:
                break
            drawn = zip(running, self._next_logits(running), strict=True)
            finished = [done for one, logits_V in drawn if (done := self._draw(one, logits_V)) is not None]
            if wake.is_set():
                break
        return finished

    def cancel(self, ticket: int) -> None:
        self._running.pop(ticket, None)

    def abort(self) -> None:
        self._running.clear()

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor], *, adopt: bool = False) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.copy_(weights[name])

    def weight_needs(self) -> Mapping[str, Need]:
        return {name: Need(tuple(parameter.shape)) for name, parameter in self._model.named_parameters()}

    def close(self) -> None:
        self.abort()

    @torch.inference_mode()
    def _next_logits(self, running: Sequence[Running]) -> Tensor:
        """Return float32 [B, V]; what is behind a sequence's end is seen by no token of it, so any padding will do."""
        sequences = [torch.cat([one.request.prompt_P, torch.tensor(one.tokens, dtype=torch.int64)]) for one in running]
        logits = self._model(pad_sequence(sequences, batch_first=True).to(self._model.device)).logits
        return torch.stack([each[len(sequence) - 1] for each, sequence in zip(logits, sequences, strict=True)]).cpu()

    def _draw(self, one: Running, logits_V: Tensor) -> Generation | None:
        """Draw a token; return the response if it was the last one."""
        request, sampling = one.request, self._sampling
        log_prob_V = (logits_V / (sampling.temperature or 1.0)).log_softmax(-1)
        token = int(logits_V.argmax())
        if sampling.temperature:
            kept, order = log_prob_V.sort(descending=True)
            before = kept.exp().cumsum(-1) - kept.exp()
            outside = (before >= sampling.top_p) & (sampling.top_p < 1)
            outside[sampling.top_k or len(outside) :] = True
            chances = kept.exp().masked_fill(outside, 0.0)
            token = int(order[torch.multinomial(chances, 1, generator=one.chance)])
        one.tokens.append(token)
        one.log_probs.append(float(log_prob_V[token]))
        one.versions.append(self.version)
        ended = token in (*self._eos, *request.stop_ids)
        if not ended and len(one.tokens) < request.limit(sampling.max_response_tokens):
            return None
        del self._running[request.ticket]
        return Generation.of(
            request, tokens=one.tokens, log_probs=one.log_probs, versions=one.versions, truncated=not ended
        )
