"""Names and shapes of the models whose weights are moved, and how FSDP2 cuts them. Pure."""

import math

Shapes = dict[str, tuple[int, ...]]

_LAYERS = 33
_PARAMETERS_PER_SQUARE = 468
"""Parameters of `synthetic_shapes` / hidden^2."""


def synthetic_shapes(num_bytes: int) -> Shapes:
    """Return a decoder of 300 tensors that takes about `num_bytes` in bfloat16."""
    hidden = max(16, 16 * round(math.sqrt(num_bytes / 2 / _PARAMETERS_PER_SQUARE) / 16))
    return decoder_shapes(hidden=hidden, ffn=hidden * 11 // 4, kv=hidden, layers=_LAYERS, vocab=32 * hidden, tied=False)


def smollm2_shapes() -> Shapes:
    """Return those of SmolLM2-135M."""
    return decoder_shapes(hidden=576, ffn=1536, kv=192, layers=30, vocab=49152, tied=True)


def decoder_shapes(*, hidden: int, ffn: int, kv: int, layers: int, vocab: int, tied: bool) -> Shapes:
    """Return the parameters of a Llama-like decoder, by Hugging Face name."""
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for number in range(layers):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    return shapes if tied else shapes | {"lm_head.weight": (vocab, hidden)}


def num_parameters(shapes: Shapes) -> int:
    """Return the elements of all tensors."""
    return sum(math.prod(shape) for shape in shapes.values())


def rows_of(shape: tuple[int, ...], rank: int, num_ranks: int) -> tuple[int, int]:
    """Return first row and end of a rank's part, as `torch.chunk` and so FSDP2 cuts."""
    step = -(-shape[0] // num_ranks)
    return min(rank * step, shape[0]), min((rank + 1) * step, shape[0])
