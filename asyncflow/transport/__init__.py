"""Channels between processes of one job, which both ends had to earn with the job's secret.

`server.ChannelServer` listens under a service name, `connection.Connection` calls it. `handshake` proves trust through
the job store, `meeting` makes the channel: a `pipe_channel` on one host, which writes payloads into an `arena`, else
one over `gloo`. `frame` is what travels first, `payload` the values.
"""
