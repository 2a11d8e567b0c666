"""The rows that both sides move: as in the peer's own scripts, but with tokens of a real vocabulary's size.

Used by our side and by the peer's driver (in the peer's environment), so it imports torch and nothing else.

Legend of shapes: N rows, V values (all rows one after the other).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

MEAN_TOKENS = 512
SIGMA = 0.8
VOCABULARY = 151_936
"""Qwen's. Ones, as in the peer's scripts, would travel as single bytes with us and flatter us."""
DENSE_ROWS, DENSE_COLUMNS, DENSE_WIDTH = 1024, 9, 8192


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a prompt, a response and its log-probs; values of a column are packed."""

    prompt_lengths_N: Tensor
    response_lengths_N: Tensor
    prompt_V: Tensor
    response_V: Tensor
    log_probs_V: Tensor

    @property
    def columns(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Name -> (packed values, lengths)."""
        return {
            "prompt": (self.prompt_V, self.prompt_lengths_N),
            "response": (self.response_V, self.response_lengths_N),
            "logprobs": (self.log_probs_V, self.response_lengths_N),
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return sum(values.nbytes for values, _ in self.columns.values())

    @property
    def padded_bytes(self) -> int:
        """Bytes of the values if every column were padded to its longest row in this micro-batch."""
        return sum(
            int(lengths.max()) * lengths.numel() * values.element_size() for values, lengths in self.columns.values()
        )


def micro_batches(num_rows: int, micro_batch: int, *, seed: int = 0) -> Iterator[MicroBatch]:
    """Yield micro-batches: prompts of 32-255 tokens, responses log-normal around `MEAN_TOKENS`."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_rows // micro_batch):
        response = torch.empty(micro_batch)
        response.log_normal_(torch.tensor(float(MEAN_TOKENS)).log().item(), SIGMA, generator=generator)
        response_N = response.clamp(1, 8 * MEAN_TOKENS).to(torch.int32)
        prompt_N = torch.randint(32, 256, (micro_batch,), generator=generator, dtype=torch.int32)
        num_prompt, num_response = int(prompt_N.sum()), int(response_N.sum())
        yield MicroBatch(
            prompt_N,
            response_N,
            torch.randint(0, VOCABULARY, (num_prompt,), generator=generator),
            torch.randint(0, VOCABULARY, (num_response,), generator=generator),
            -torch.rand(num_response, generator=generator),
        )


def dense_columns(*, rows: int = DENSE_ROWS, columns: int = DENSE_COLUMNS, seed: int = 0) -> dict[str, Tensor]:
    """Return float32 columns [rows, 8192]; 9 of 1024 rows are the peer's own 288 MB case."""
    generator = torch.Generator().manual_seed(seed)
    return {f"f{k}": torch.randn(rows, DENSE_WIDTH, generator=generator) for k in range(columns)}


def checksum(values: Tensor) -> float:
    """Return the sum of some values in float64: what both sides must have received."""
    return float(values.to(torch.float64).sum())
