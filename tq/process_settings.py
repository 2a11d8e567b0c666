"""How a process that does nothing but serve a part of the queue sets up torch and Python. Called once, at its start."""

import gc

import torch

_ALLOCATIONS = 50_000
_ROUNDS = 20


def serve_only() -> None:
    """Favour short answers over the rest.

    Copies of a message are short, and OpenMP's threads would spin on the clients' cores: one thread. Rows are many
    small objects that live long and are in no cycles: a garbage collector that looks at them every few puts takes a
    sixth of a unit's time, so it looks rarely, and never at what was imported.
    """
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS, _ROUNDS, _ROUNDS)
