"""Settings of the weight path."""

from typing import Literal

from pydantic import Field

from asyncflow.settings import Settings


class WeightSyncConfig(Settings):
    """How new weights reach the roles that hold the policy."""

    bucket_bytes: int = Field(64 * 2**20, ge=1024)
    """Weights travel in buckets of about this size (bytes)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type on the wire; the trainer casts from its own."""
    timeout_s: float = Field(300.0, gt=0)
    """Deadline of one whole transfer, from the trainer's first bucket to the receiver's last check (s)."""
