"""A generating and a training engine of one small policy, which round differently, and what may be wrong with one.

Both compute the same residual network; the trainer adds its products up in two parts, so in bfloat16 their
log-probabilities differ as those of two real engines do: by some hundredths of a nat, more where logits are large.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

WIDTH, TOKENS, SEEN = 64, 1000, 3000
"""Of the network; of the vocabulary; positions at which a token is drawn."""

Layers = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Drawn:
    """Drawn tokens, one at each position: float32 [SEEN] each.

    Attributes:
        rollout: log-probabilities as the generating engine reports them.
        trained: as the trainer computes them.
        entropy: of the trainer's distribution.
    """

    rollout: Tensor
    trained: Tensor
    entropy: Tensor


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


HIDDEN = _normal(SEEN, WIDTH, seed=0)
LAYERS: Layers = [
    (_normal(WIDTH, 2 * WIDTH, seed=k) / 8, _normal(2 * WIDTH, WIDTH, seed=10 + k) / 11) for k in (1, 2, 3)
]
HEAD = _normal(WIDTH, TOKENS, seed=20) / 8


def logits(dtype: torch.dtype, *, sharp: float, parts: int = 1, layers: Layers = LAYERS, head: Tensor = HEAD) -> Tensor:
    """Return float32 [SEEN, TOKENS].

    Args:
        dtype: of the computation.
        sharp: multiplies the logits: the larger, the smaller the entropy.
        parts: in which products are added up.
        layers, head: the weights.
    """
    hidden = HIDDEN.to(dtype)
    for up, down in layers:
        pairs = zip(up.to(dtype).chunk(parts, 1), down.to(dtype).chunk(parts, 0), strict=True)
        normed = _normed(hidden)
        hidden = hidden + torch.stack([torch.relu(normed @ a) @ b for a, b in pairs]).sum(0)
    pairs = zip(_normed(hidden).chunk(parts, 1), (sharp * head).to(dtype).chunk(parts, 0), strict=True)
    return torch.stack([a @ b for a, b in pairs]).sum(0).float()


def _normed(hidden: Tensor) -> Tensor:
    return hidden / hidden.float().square().mean(-1, keepdim=True).sqrt().to(hidden.dtype)


def _draw(probs: Tensor) -> Tensor:
    return torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(30))


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    ordered, order = probs.sort(-1, descending=True)
    kept = torch.zeros_like(probs).scatter(1, order, ((ordered.cumsum(-1) - ordered) < top_p).float()) * probs
    return kept / kept.sum(-1, keepdim=True)


def _right(dtype: torch.dtype, sharp: float) -> tuple[Tensor, Tensor]:
    found = logits(dtype, sharp=sharp).log_softmax(-1)
    return found, found.exp()


def _temperature(dtype: torch.dtype, sharp: float) -> tuple[Tensor, Tensor]:
    found = (logits(dtype, sharp=sharp) / 0.7).log_softmax(-1)
    return found, found.exp()


def _raw(dtype: torch.dtype, sharp: float) -> tuple[Tensor, Tensor]:
    """It draws at the temperature of the run, 1, here from logits that are divided by 0.7 already, and reports those of
    the others: raw for processed."""
    return logits(dtype, sharp=sharp * 0.7).log_softmax(-1), logits(dtype, sharp=sharp).softmax(-1)


def _zeroed(dtype: torch.dtype, sharp: float) -> tuple[Tensor, Tensor]:
    *first, (up, down) = LAYERS
    found = logits(dtype, sharp=sharp, layers=[*first, (up, torch.zeros_like(down))]).log_softmax(-1)
    return found, found.exp()


def _older(dtype: torch.dtype, sharp: float) -> tuple[Tensor, Tensor]:
    found = logits(dtype, sharp=sharp, head=HEAD + 0.02 * _normal(WIDTH, TOKENS, seed=40)).log_softmax(-1)
    return found, found.exp()


def _top_p(dtype: torch.dtype, sharp: float) -> tuple[Tensor, Tensor]:
    kept = _nucleus(logits(dtype, sharp=sharp).softmax(-1), 0.9)
    return kept.log(), kept


def _top_p_untold(dtype: torch.dtype, sharp: float) -> tuple[Tensor, Tensor]:
    found = logits(dtype, sharp=sharp).log_softmax(-1)
    return found, _nucleus(found.exp(), 0.9)


RIGHT = "nothing is wrong"
ENGINES: dict[str, Callable[[torch.dtype, float], tuple[Tensor, Tensor]]] = {
    RIGHT: _right,
    "temperature 0.7 for 1": _temperature,
    "raw for processed log-probabilities": _raw,
    "a zeroed layer": _zeroed,
    "an older version": _older,
    "top-p on one side": _top_p,
    "top-p on one side, and whole log-probabilities": _top_p_untold,
}
"""What is wrong -> the log-probabilities that the generating engine reports, and the probabilities that it draws by."""


@cache
def drawn(wrong: str, dtype: torch.dtype, sharp: float = 4.0) -> Drawn:
    """Return tokens that an engine drew, and what both say of them. At `sharp` 4 the entropy is 2.6 nats, at 8 1."""
    reported, probs = ENGINES[wrong](dtype, sharp)
    trained = logits(dtype, sharp=sharp, parts=2).log_softmax(-1)
    token = _draw(probs)
    entropy = -(trained.exp() * trained).sum(-1)
    return Drawn(reported.gather(1, token)[:, 0], trained.gather(1, token)[:, 0], entropy)
