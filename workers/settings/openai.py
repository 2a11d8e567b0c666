"""Settings of the `openai` engine. Torch-free, and read by every command."""

import os
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from asyncflow.errors import ConfigError
from asyncflow.settings import Settings

UPDATE_ARGUMENTS = ("directory",)
"""Of the user's function `update`."""


class OpenAIConfig(Settings):
    """The user's servers, which speak OpenAI's completions API (`rollout.engine: openai`).

    They must return token ids and take prompts as token ids, as vLLM's do (`return_token_ids`).
    """

    urls: tuple[str, ...] = ()
    """Servers of one and the same model, e.g. `[http://10.0.0.7:8000]`; all calls of a rollout go to one of
    them."""
    model: str = ""
    """Name under which they serve the model; empty: the first that they list."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable of the rollout that holds the key; without such a variable none is sent."""
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """Which log-probabilities they return: `raw`, before temperature and filters, or `processed`, after both
    (`vllm serve --logprobs-mode processed_logprobs`)."""
    update: str = "vllm"
    """How they take new weights, which lie in a directory then: `vllm`: through vLLM's own requests, which a server
    with VLLM_SERVER_DEV_MODE=1 has, again after it was started again; or a function of yours, `module:function`, called
    with the directory (pathlib.Path), which returns once all servers compute with it."""
    weights_dir: str = ""
    """Where new weights are written; an absolute path, under which the servers can read it, too. Needed."""
    timeout_s: float = Field(600.0, gt=0)
    """Longest silence of a server that answers (s)."""
    update_timeout_s: float = Field(600.0, gt=0)
    """Deadline of one server's request to take new weights (s)."""
    retries: int = Field(6, ge=0, le=1000)
    """How often a response is asked for again after a server that is busy, not there, or fails (429, 5xx)."""
    retry_pause_s: float = Field(1.0, ge=0)
    """Before the first of these attempts; each further one waits twice as long, up to a minute (s). The defaults wait a
    minute in all; raise `retries` for servers that need longer to start again."""

    @field_validator("urls")
    @classmethod
    def _can_be_called(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            check_address(url)
            if urlsplit(url).path.rstrip("/").endswith("/v1"):
                raise ValueError(f"{url!r} ends with /v1; leave that out, other requests of the server do not have it")
        if len({url.rstrip("/") for url in urls}) < len(urls):
            raise ValueError("a server is named twice; name each once")
        return urls


def check_address(url: str) -> None:
    """Check the address of a server.

    Raises:
        ValueError: no request can be sent there, or it has what is not for logs.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or any(map(str.isspace, url)):
        raise ValueError(f"{url!r} is not an http:// or https:// address")
    try:
        number = parts.port
    except ValueError as error:
        raise ValueError(f"{url!r} has a port that is none; give a number from 1 to 65535") from error
    if number == 0:
        raise ValueError(f"{url!r} has a port that is none; give a number from 1 to 65535")
    if parts.username is not None:
        raise ValueError("an address with a user's name: it would be in logs; put a key into api_key_variable")
    if parts.query or parts.fragment:
        raise ValueError(f"{url!r} has more than a host and a path; leave that out")


def read_api_key(variable: str, field: str) -> str:
    """Return the key in an environment variable that a field of the configuration names, "" if there is none.

    Raises:
        ConfigError: it has characters that no request can carry.
    """
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{field}: what {variable} holds is not a key: it has line breaks, control or non-ASCII characters; set it "
            f"again"
        )
    return key
