"""Weight synchronisation: a trainer with any sharding feeds any number of receivers.

`plan` decides what lies in which bucket and who writes it (pure). `sender` copies it to the node's agent, whose shared
memory `receiver` reads; `broadcast` is the collective path beside that. `external`, `export` and `notify` are for
engines outside the run.
"""

import logging

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless a program sets up logging
