"""The weight agent: one process per node that keeps the newest weight versions in shared memory.

`agent_state` decides (pure), with `trainer_ranks` and `swap_turns`; `agent_service` is the process around it, with the
links to the agents of other nodes.
"""
