"""The weight agent: one process per node that keeps the newest weight versions in shared memory.

`state` decides (pure), `slots` and `swap_turns` are its parts; `service` is the process around it, `peers` its way to
the agents of other nodes.
"""
