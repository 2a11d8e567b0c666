"""Channels between processes of one job: two-rank Gloo groups that both ends had to earn with the job's secret.

`server.ChannelServer` listens under a service name, `connection.Connection` calls it; `frame` is what travels,
`handshake` how trust is proved, `channel` the pair itself.
"""
