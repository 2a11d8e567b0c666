"""What the agents of other nodes have, and from which of them a bucket is fetched. Pure."""

from collections.abc import Sequence

from weightsync.messages import Held
from weightsync.version import Version

_PULLS_PER_PEER = 2
"""Buckets on their way from one agent: one is written while the next one travels."""


class PeerCatalog:
    """The other agents, as they last said."""

    def __init__(self) -> None:
        self._held: dict[str, dict[Version, Held]] = {}
        self._pulls: dict[str, set[tuple[Version, int]]] = {}

    def has(self, peer: str, held: Sequence[Held]) -> None:
        """An agent said what it has now."""
        self._held[peer] = {each.version: Held(each.version, each.plan, dict(each.checksums)) for each in held}
        self._pulls.setdefault(peer, set())

    def lost(self, peer: str) -> None:
        """The channel to it broke."""
        self._held.pop(peer, None)
        self._pulls.pop(peer, None)

    def offered(self, newer_than: Version | None) -> dict[Version, str]:
        """Return versions that are news, newest first, each with the digest of its plan."""
        news = {
            version: each.plan
            for held in self._held.values()
            for version, each in held.items()
            if each.checksums and (newer_than is None or version > newer_than)
        }
        return dict(sorted(news.items(), reverse=True))

    def have(self, version: Version, plan: str, bucket: int) -> bool:
        """Return whether any agent has a bucket."""
        return any(self._has_bucket(peer, version, plan, bucket) for peer in self._held)

    def beyond(self, version: Version, plan: str, bucket: int) -> bool:
        """Return whether any agent has a newer version of a bucket, so that its rank has gone on."""
        return any(
            other > version and self._has_bucket(peer, other, plan, bucket)
            for peer, held in self._held.items()
            for other in held
        )

    def source(self, version: Version, plan: str, bucket: int, *, patient: bool = False) -> str | None:
        """Return the least busy agent that has a bucket and may be asked now; None: none.

        An agent that is still busy with this very bucket, for memory that was given up since, is not asked for it a
        second time: its two answers could not be told apart.

        Args:
            version, plan, bucket: which; the plan's digest.
            patient: a busy one will do.
        """
        able = [
            peer
            for peer, pulls in self._pulls.items()
            if self._has_bucket(peer, version, plan, bucket)
            and (version, bucket) not in pulls
            and (patient or len(pulls) < _PULLS_PER_PEER)
        ]
        return min(able, key=lambda peer: (len(self._pulls[peer]), peer), default=None)

    def start(self, peer: str, version: Version, bucket: int) -> int:
        """A bucket is being fetched; returns its checksum."""
        self._pulls[peer].add((version, bucket))
        return self._held[peer][version].checksums[bucket]

    def end(self, peer: str, version: Version, bucket: int, *, came: bool) -> None:
        """It came, or did not; then that agent is not asked for it again, until it says anew that it has it."""
        if peer not in self._held:
            return
        self._pulls[peer].discard((version, bucket))
        if not came and version in self._held[peer]:
            self._held[peer][version].checksums.pop(bucket, None)

    def _has_bucket(self, peer: str, version: Version, plan: str, bucket: int) -> bool:
        held = self._held[peer].get(version)
        return held is not None and held.plan == plan and bucket in held.checksums
