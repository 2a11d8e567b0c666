"""Settings of the place where storage units keep values. No torch here."""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from asyncflow.registry import Registry
from asyncflow.settings import Settings

BACKENDS = Registry(
    "asyncflow.backends",
    {
        "memory": "tq.backends.backend:MemoryBackend",
        "redis": "tq.backends.redis:RedisBackend",
        "mooncake": "tq.backends.mooncake:MooncakeBackend",
    },
)
"""Where storage units may keep values; each class is made with a `BackendConfig` and the prefix of its keys."""


class BackendConfig(Settings):
    """Where storage units keep values."""

    kind: Annotated[str, AfterValidator(BACKENDS.resolve)] = "memory"
    """`memory`: in the unit's own memory. `redis`: a Redis server. `mooncake`: a Mooncake Store. A class of yours,
    `module:Class` (docs/transferqueue.md)."""
    address: str = ""
    """`redis`: a URL such as `redis://127.0.0.1:6379/0`. `mooncake`: HOST:PORT of its master. A class of
    yours defines its own form."""
    options: dict[str, Any] = Field({})
    """Settings of a class of yours, checked by its `Config` if it has one."""
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
        if self.kind in ("redis", "mooncake") and not self.address:
            raise ValueError(f"storage backend {self.kind} needs an address; set it beside `kind`")
        if self.kind == "redis" and not _is_redis_url(self.address):
            raise ValueError(f"address {self.address!r} is no Redis URL; write redis://HOST:PORT/DB")
        if self.options and self.kind in BACKENDS.built_in:
            raise ValueError(f"options are for a backend of yours, kind is {self.kind}; remove them")
        return self


def _is_redis_url(address: str) -> bool:
    try:
        return urlsplit(address).scheme in ("redis", "rediss", "unix") and urlsplit(address).port != 0
    except ValueError:  # of the port
        return False
