"""Attention of one generation step, registered in transformers' attention interface.

A step is one packed sequence [1, T] without padding: documents that enter (each causal in itself, sorted by length so
that those of one length are a view), then one token of every running response, which sees its lane.

    T   prompt A  prompt B  prompt C   responses of lane 0   responses of lane 1

So the matrix products of prompts and responses read the weights once, and a step without new documents has responses
only. Each key head's query heads are the rows of one small product: keys are not repeated for grouped-query attention.

Legend of shapes: T tokens of the step, H query heads, J key heads, D head dimension, N rows, P tokens of a document.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from asyncflow.errors import ConfigError
from workers.engines.hf.lanes import Lane
from workers.engines.packed_attention import alike_attention

STEP_ATTENTION = "asyncflow_step"
"""Name in transformers' attention interface. No mask function is registered under it: transformers then builds none."""


@dataclass(frozen=True)
class Entry:
    """Where the keys and values of a document go: rows of a lane."""

    lane: Lane
    rows: slice


@dataclass(frozen=True)
class Bucket:
    """Documents of one length, and where the keys and values of each go."""

    length: int
    entries: tuple[Entry, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents."""
        return self.length * len(self.entries)


@dataclass(frozen=True)
class StepPlan:
    """The documents and responses of a step; passed to the model as the keyword argument `step_plan`.

    Attributes:
        buckets: documents, in the order of the sequence.
        running: lanes, how many of their first rows get a token, and the mask that is added to their scores.
    """

    buckets: tuple[Bucket, ...]
    running: tuple[tuple[Lane, int, Tensor | None], ...]


def step_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step_plan: StepPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_unused: object,
) -> tuple[Tensor, None]:
    """Attend, and keep the keys and values; transformers' signature of an attention function.

    Args:
        module: attention layer; `layer_idx` is its number.
        query: [1, H, T, D]; `key` and `value` [1, J, T, D].
        attention_mask: None.
        step_plan: of the T tokens.
        scaling: factor on the scores; None: D ** -0.5.
        sliding_window: a token sees itself and the tokens before it, this many in all; None: all before it.
        softcap, s_aux: refused when set, since SDPA has neither.
    Returns:
        [1, T, H, D], and no attention weights.
    Raises:
        ConfigError: the model caps its scores or has attention sinks.
    """
    assert attention_mask is None, "a step got a mask"
    if softcap is not None or s_aux is not None:
        raise ConfigError(
            "model.path: the hf engine does not generate with capped scores or attention sinks; set rollout.engine"
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    q_HTD, k_JTD, v_JTD = query[0], key[0], value[0]
    outputs, begin = [], 0
    for bucket in step_plan.buckets:
        end = begin + bucket.num_tokens
        q_NHPD, k_NJPD, v_NJPD = (
            torch.unflatten(each[:, begin:end], 1, (-1, bucket.length)).transpose(0, 1)
            for each in (q_HTD, k_JTD, v_JTD)
        )
        outputs.append(alike_attention(q_NHPD, k_NJPD, v_NJPD, scaling, sliding_window))
        for entry in bucket.entries:
            behind = begin + bucket.length
            entry.lane.enter(layer, entry.rows, k_JTD[:, begin:behind], v_JTD[:, begin:behind])
            begin = behind
    for lane, num_rows, mask in step_plan.running:
        end = begin + num_rows
        keys, values = lane.append(
            layer, k_JTD[:, begin:end].transpose(0, 1), v_JTD[:, begin:end].transpose(0, 1), sliding_window
        )
        q_NJGD = q_HTD[:, begin:end].reshape(keys.shape[1], -1, num_rows, q_HTD.shape[2]).permute(2, 0, 1, 3)
        seen = None if mask is None else mask[..., -keys.shape[2] :]
        out_NJGD = scaled_dot_product_attention(q_NJGD, keys, values, attn_mask=seen, scale=scaling)
        outputs.append(out_NJGD.flatten(1, 2))
        begin = end
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0), None


AttentionInterface.register(STEP_ATTENTION, step_attention)
