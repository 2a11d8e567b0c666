"""The weight agent: one process per node that keeps the newest weight versions in shared memory.

`state` decides (pure), with `trainer_ranks` and `swap_turns`; `service` is the process around it, with the links to the
agents of other nodes.
"""
