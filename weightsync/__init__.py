"""Weight synchronization: a trainer with any sharding feeds any number of receivers.

`plan` maps tensors to buckets, and buckets to their senders (pure). `sender` copies to the node's agent, whose shared
memory `receiver` reads; `broadcast_group` is the collective path beside that. `slot_memory` is what agent and receivers
share; `version_cache` holds what a receiver may load. `export` and `notify` are for engines outside the run.
"""

import logging

import asyncflow.former_names  # noqa: F401

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless a program sets up logging
