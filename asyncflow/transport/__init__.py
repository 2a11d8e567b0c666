"""Channels between processes of one job: two-rank Gloo groups that both ends had to earn with the job's secret.

`server.ChannelServer` listens under a service name, `connection.Connection` calls it; `handshake` proves trust,
`channel` the pair itself, `frame` what travels first. Payloads (`payload`) are written into memory that both ends share
(`hello`, `sharing`, `arena`), or are `cuts` on the wire, received into `warm` memory; `extents` tells what of either is
free, and a `loan` when it is again.
"""
