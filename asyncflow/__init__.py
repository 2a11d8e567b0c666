"""AsyncFlow: asynchronous streaming RL post-training for LLMs, on torch.distributed alone."""

import logging

logging.getLogger(__name__).addHandler(logging.NullHandler())  # libraries are silent unless a program sets up logging

__version__ = "0.1.0"
