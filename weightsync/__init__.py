"""Weight synchronisation: a trainer with any sharding feeds any number of receivers.

`plan` maps tensors to buckets, and buckets to their writers (pure). `sender` copies to the node's agent, whose shared
memory `receiver` reads; `broadcast` is the collective path beside that. `external`, `export` and `notify` are for
engines outside the run.
"""

import logging

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless a program sets up logging
