"""Settings of the place where storage units keep values. No torch here."""

from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from asyncflow.settings import Settings


class BackendKind(StrEnum):
    """Where storage units keep values."""

    MEMORY = "memory"
    REDIS = "redis"
    MOONCAKE = "mooncake"


class BackendConfig(Settings):
    """Where storage units keep values."""

    kind: BackendKind = BackendKind.MEMORY
    """`memory`: in the unit's own memory. `redis`: a Redis server. `mooncake`: a Mooncake Store."""
    address: str = ""
    """`redis`: a URL such as `redis://127.0.0.1:6379/0`. `mooncake`: HOST:PORT of its master."""
    timeout_s: float = Field(30.0, gt=0)
    """Deadline of one operation (s)."""
    local_host: str = "127.0.0.1"
    """`mooncake`: this machine's name or address as other machines reach it."""
    metadata: str = "P2PHANDSHAKE"
    """`mooncake`: metadata service; the default needs none."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """`mooncake`: how values travel."""
    devices: str = ""
    """`mooncake`: RDMA devices, separated by commas."""
    segment_bytes: int = Field(2**30, ge=2**24)
    """`mooncake`: memory that each storage unit gives to the store."""
    buffer_bytes: int = Field(2**28, ge=2**24)
    """`mooncake`: staging memory of each storage unit; bounds the largest part of a block."""

    @model_validator(mode="after")
    def _check(self) -> "BackendConfig":
        if self.kind is not BackendKind.MEMORY and not self.address:
            raise ValueError(f"storage backend {self.kind} needs an address; set it beside `kind`")
        if self.kind is BackendKind.REDIS and not self.address.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError(f"address {self.address!r} is no Redis URL; write redis://HOST:PORT/DB")
        return self
