"""Settings of the `openai` engine. Torch-free, and read by every command."""

import os
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from asyncflow.errors import ConfigError
from asyncflow.settings import Settings

# Arguments of the user's function `update`.
UPDATE_ARGUMENTS = ("directory",)


class OpenAIConfig(Settings):
    """Your own servers with OpenAI's completions API (`rollout.engine: openai`).

    They must return token ids and take prompts as token ids, as vLLM's do (`return_token_ids`).
    """

    urls: tuple[str, ...] = ()
    """Servers of one and the same model, e.g. `[http://10.0.0.7:8000]`; a rollout sends all its calls to one of them.
    """
    model: str = ""
    """Name under which they serve the model; empty: the first that they list."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable of the rollout that holds the key; if it is not set, no key is sent."""
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """Which log-probabilities the servers return: `raw`, before temperature and filters, or `processed`, after both
    (`vllm serve --logprobs-mode processed_logprobs`)."""
    update: str = "vllm"
    """How the servers take new weights from a directory. `vllm`: through vLLM's own requests, which a server with
    VLLM_SERVER_DEV_MODE=1 offers; sent again after a server restarts. Or a function of your own, `module:function`,
    which is called with the directory (pathlib.Path) and returns once all servers compute with these weights."""
    weights_dir: str = ""
    """Where new weights are written: an absolute path, under which the servers can read them, too. Required."""
    timeout_s: float = Field(600.0, gt=0)
    """Longest silence of a server while it answers (s)."""
    update_timeout_s: float = Field(600.0, gt=0)
    """Deadline of one request to a server to take new weights (s)."""
    retries: int = Field(6, ge=0, le=1000)
    """How often a response is requested again after a server was busy, unreachable or failed (429, 5xx)."""
    retry_pause_s: float = Field(1.0, ge=0)
    """Pause before the first retry; each further retry waits twice as long, up to a minute (s). The defaults wait a
    minute in all; raise `retries` for servers that take longer to restart."""

    @field_validator("urls")
    @classmethod
    def _can_be_called(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            check_address(url)
            if urlsplit(url).path.rstrip("/").endswith("/v1"):
                raise ValueError(
                    f"{url!r} ends with /v1; leave that out, since other requests to the server do not use it"
                )
        if len({url.rstrip("/") for url in urls}) < len(urls):
            raise ValueError("a server is named twice; name each once")
        return urls


def check_address(url: str) -> None:
    """Raise ValueError if no request can be sent to a server's address, or it holds what must not appear in logs."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or any(map(str.isspace, url)):
        raise ValueError(f"{url!r} is not an http:// or https:// address")
    try:
        number = parts.port
    except ValueError as error:
        raise ValueError(f"{url!r} has an invalid port; give a number from 1 to 65535") from error
    if number == 0:
        raise ValueError(f"{url!r} has an invalid port; give a number from 1 to 65535")
    if parts.username is not None:
        raise ValueError("the address has a user name, which would appear in logs; put a key into api_key_variable")
    if parts.query or parts.fragment:
        raise ValueError(f"{url!r} has more than a host and a path; leave that out")


def read_api_key(variable: str, field: str) -> str:
    """Return the key in an environment variable that the setting `field` names; "" if it is not set. Raises ConfigError
    if it has characters that no request can carry."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{field}: what {variable} holds is not a key: it has line breaks, control or non-ASCII characters; set it "
            f"again"
        )
    return key
