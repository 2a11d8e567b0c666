"""Channels between processes of one job; both ends must prove that they know the job's secret.

`server.ChannelServer` listens under a service name, and `server.Connection` calls it. `meeting` proves trust through
the job store and makes the channel: on one host a `channel.PipeChannel`, which writes payloads into a `frame.Arena`,
else a `channel.GlooChannel`. `frame` defines what travels.
"""
