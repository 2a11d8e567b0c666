"""The weight agent: one process per node that keeps the newest weight versions in shared memory.

`state` decides (pure), with `slots`, `trainer_ranks`, `turns` and `peer_catalog`; `service` is the process around it,
`peers` its way to the agents of other nodes.
"""
