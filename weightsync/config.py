"""Settings of the weight path."""

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, JsonValue, field_validator, model_validator

from asyncflow.run_files import OWN_NAMES
from asyncflow.settings import Settings

_PLACEHOLDER = re.compile(r"\{(\w*)\}")
_PLACES = ("directory", "version", "lineage", "step")


class NotifyTarget(Settings):
    """An engine outside the run that is told of every export by an HTTP POST of JSON."""

    url: str
    """`http://...` or `https://...`, e.g. `http://10.0.0.7:30000/update_weights_from_disk` of an SGLang server."""
    body: dict[str, JsonValue] = Field({"model_path": "{directory}", "weight_version": "{version}"})
    """The JSON that is sent. `{directory}` becomes the absolute path and `{version}` becomes LINEAGE.STEP; `{lineage}`
    and `{step}` are filled in likewise, as numbers where they stand alone. The default suits SGLang. A vLLM server
    (`VLLM_SERVER_DEV_MODE=1`) takes `{method: reload_weights, kwargs: {weights_path: "{directory}"}}` at
    `/collective_rpc`, and then `{}` at `/reset_prefix_cache`."""
    timeout_s: float = Field(60.0, gt=0)
    """Deadline of one notification, retries included (s). An engine may answer only after it has loaded the weights."""

    @field_validator("url")
    @classmethod
    def _url_can_be_called(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// address")
        if parts.username is not None:
            raise ValueError(f"{url!r} has a user name in it, which is not sent; leave it out")
        if not url.isascii() or not url.isprintable() or " " in url or parts.port == 0:
            raise ValueError(f"{url!r} is not a usable address")
        return url

    @field_validator("body")
    @classmethod
    def _places_are_known(cls, body: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for text in _texts(body):
            for place in _PLACEHOLDER.findall(text):
                if place not in _PLACES:
                    raise ValueError(f"{{{place}}} is not a placeholder; known: {', '.join(_PLACES)}")
        return body


class ExportConfig(Settings):
    """Versions of the weights as Hugging Face directories, for engines outside the run."""

    directory: str = "weights"
    """Where `step_000012/` and the link `latest` appear; relative to the run directory, but not among the run's own
    files."""
    every: int = Field(1, ge=1)
    """Export only versions whose step is a multiple of this. A version is skipped if the next one exists by then."""
    keep_last: int = Field(2, ge=1)
    """How many exports to keep; older ones are removed. With 1, an engine may lose the one that it is reading."""
    notify: tuple[NotifyTarget, ...] = ()
    """Engines to tell. Targets of one host and port are told in this order, others at the same time."""

    @field_validator("directory")
    @classmethod
    def _holds_nothing_else(cls, directory: str) -> str:
        path = PurePath(directory)
        if not path.is_absolute() and (not path.parts or path.parts[0] in (*OWN_NAMES, "..")):
            raise ValueError(
                "it is among the run's own files, or outside; use a name such as weights, or an absolute path"
            )
        return directory


class WeightSyncConfig(Settings):
    """How new weights reach the roles that hold the policy."""

    path: Literal["staged", "broadcast"] = "staged"
    """`staged`: the trainer copies its shards to host memory and continues; each node's weight agent hands them to its
    receivers. `broadcast`: trainer and receivers meet in a collective over the devices' own backend, and both wait; a
    generating device holds a second copy of the model. The agents get the version in either case."""
    bucket_bytes: int = Field(64 * 2**20, ge=1024, le=2**30)
    """Approximate size of the buckets in which weights are checked, sent and repaired (bytes)."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Element type on the wire and in the slots, to which the trainer casts; null: that of the generating copies
    (`model.dtype`)."""
    num_slots: int = Field(3, ge=2, le=16)
    """Versions that a node keeps in shared memory at most, including the one being written. Beyond two, memory is taken
    only once a receiver lags, or with `delta`. With 2, a trainer may wait for a slow receiver."""
    max_updating: int | None = Field(None, ge=1)
    """How many generating instances may swap their weights at the same time, while the others keep generating; null:
    all."""
    delta: bool = False
    """Between nodes, send only what changed since the version that the other node has, where that is smaller; lossless.
    Has no effect on a single node, where nothing is sent."""
    proof_interval: int = Field(1, ge=0)
    """Prove the delivery of every N-th version, and always of the first one after a start or a restore: before a
    generator draws a token with it, its weights' checksums, and log-probabilities of a probe, are compared with the
    trainer's. A mismatch restarts the instance, a second one ends the run. 0: never."""
    timeout_s: float = Field(300.0, gt=0)
    """Deadline (s) that applies separately to each wait of an update: for receivers to be ready, for a free slot, for a
    group to be built, for a broadcast to end."""
    export: ExportConfig | None = None
    """Also write versions to disk; null: do not."""

    @model_validator(mode="after")
    def _delta_needs_an_older_version(self) -> Self:
        if self.delta and self.num_slots < 3:
            raise ValueError(
                "delta needs num_slots of 3 or more: the older version has to stay while the next is written"
            )
        return self


def _texts(value: JsonValue) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)
