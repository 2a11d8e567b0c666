"""What the agents of other nodes have, and from which of them a bucket is fetched. Pure.

Kept by bucket, so that hearing of one does not mean looking through all agents: there may be a thousand, and each of
them tells of each bucket.
"""

from collections.abc import Iterable, Mapping, Sequence

from weightsync.messages import Held
from weightsync.version import Version

_PULLS_PER_PEER = 2
"""Buckets on their way from one agent: one is written while the next one travels."""


class PeerCatalog:
    """The other agents, as they last said."""

    def __init__(self) -> None:
        self._held: dict[str, Mapping[tuple[Version, str], Mapping[int, int]]] = {}
        """Agent -> version and plan -> bucket -> checksum."""
        self._holders: dict[tuple[Version, str], dict[int, dict[str, int]]] = {}
        """The same as version and plan -> bucket -> agent -> checksum, without what failed since."""
        self._pulls: dict[str, set[tuple[Version, int]]] = {}

    def has(self, peer: str, held: Sequence[Held]) -> None:
        """An agent said what it has now."""
        now = {(each.version, each.plan): each.checksums for each in held}
        before = self._held.get(peer, {})
        for key in before.keys() - now.keys():
            self._forget(peer, key, before[key])
        for key, checksums in now.items():
            if not checksums:
                continue
            self._forget(peer, key, before.get(key, {}).keys() - checksums.keys())
            buckets = self._holders.setdefault(key, {})
            for bucket, checksum in checksums.items():
                buckets.setdefault(bucket, {})[peer] = checksum
        self._held[peer] = now
        self._pulls.setdefault(peer, set())

    def lost(self, peer: str) -> None:
        """The channel to it broke."""
        for key, checksums in self._held.pop(peer, {}).items():
            self._forget(peer, key, checksums)
        self._pulls.pop(peer, None)

    def offered(self, newer_than: Version | None) -> dict[Version, str]:
        """Return versions that are news, newest first, each with the digest of its plan."""
        news = {version: plan for version, plan in self._holders if newer_than is None or version > newer_than}
        return dict(sorted(news.items(), reverse=True))

    def have(self, version: Version, plan: str, bucket: int) -> bool:
        """Return whether any agent has a bucket."""
        return bucket in self._holders.get((version, plan), ())

    def beyond(self, version: Version, plan: str, bucket: int) -> bool:
        """Return whether any agent has a newer version of a bucket, so that its rank has gone on."""
        return any(
            other > version and digest == plan and bucket in buckets
            for (other, digest), buckets in self._holders.items()
        )

    def source(self, version: Version, plan: str, bucket: int, *, busy_too: bool = False) -> str | None:
        """Return the least busy agent that has a bucket and may be asked now; None: none.

        An agent that is still busy with this very bucket, for memory that was given up since, is not asked for it a
        second time: its two answers could not be told apart.

        Args:
            version, plan, bucket: which; the plan's digest.
            busy_too: one that sends to others will do.
        """
        able = [
            peer
            for peer in self._holders.get((version, plan), {}).get(bucket, ())
            if (version, bucket) not in self._pulls[peer] and (busy_too or len(self._pulls[peer]) < _PULLS_PER_PEER)
        ]
        return min(able, key=lambda peer: (len(self._pulls[peer]), peer), default=None)

    def start(self, peer: str, version: Version, plan: str, bucket: int) -> int:
        """A bucket is being fetched; returns its checksum."""
        self._pulls[peer].add((version, bucket))
        return self._holders[version, plan][bucket][peer]

    def end(self, peer: str, version: Version, bucket: int, *, came: bool) -> None:
        """It came, or did not; then that agent is not asked for it again, until it says anew that it has it."""
        if peer not in self._held:
            return
        self._pulls[peer].discard((version, bucket))
        for key in self._held[peer] if not came else ():
            if key[0] == version:
                self._forget(peer, key, [bucket])

    def _forget(self, peer: str, key: tuple[Version, str], buckets: Iterable[int]) -> None:
        table = self._holders.get(key)
        if table is None:
            return
        for bucket in buckets:
            peers = table.get(bucket, {})
            peers.pop(peer, None)
            if not peers:
                table.pop(bucket, None)
        if not table:
            del self._holders[key]
