"""AsyncFlow: asynchronous streaming RL post-training for LLMs, on torch.distributed alone."""

__version__ = "0.1.0"
