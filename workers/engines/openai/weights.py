"""How servers take new weights: by vLLM's own requests, or by the user's function `openai.update`. Torch-free.

    take        pause, reload from a directory, set a mark, resume
    unchanged   ask for the mark after a response: a server that was started again has lost it, and takes weights again

A server that starts again answers with the weights that it was started with. The mark is vLLM's version of the weights,
which is lost with them: a server that still has it after a response had the right weights throughout.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from asyncflow.errors import EngineFailed
from workers.calls.pool import CallPool, Entry
from workers.calls.user_function import Callee, load_function
from workers.engines.openai.server import OpenAIServer, RequestRefused, ServerBusy
from workers.settings.openai import UPDATE_ARGUMENTS, OpenAIConfig

logger = logging.getLogger(__name__)


class ServedWeights:
    """The weights of one vLLM server; made and used inside one event loop."""

    def __init__(self, server: OpenAIServer, *, timeout_s: float) -> None:
        """Args:
        server: of vLLM, with its requests for developers.
        timeout_s: of one request to take weights.
        """
        self._server = server
        self._timeout_s = timeout_s
        self._directory: Path | None = None
        self._mark: str | None = None
        self._taking = asyncio.Lock()

    async def take(self, directory: Path) -> None:
        """Have the server read weights and drop its cache of prompts; wait for one that is away.

        Raises:
            EngineFailed: it did not take them; says what to do.
        """
        try:
            self._mark = await self._server.when_there(lambda: self._take(directory))
        except EngineFailed as error:
            raise EngineFailed(
                f"{error}; a vLLM server with VLLM_SERVER_DEV_MODE=1 takes weights from {directory}; for others set "
                f"openai.update to a function of yours"
            ) from error
        self._directory = directory

    @asynccontextmanager
    async def unchanged(self) -> AsyncIterator[None]:
        """Make sure that a response asked for inside is drawn from the weights that were taken last.

        Raises:
            ServerBusy: on leaving, if it may not have been; the server has taken the weights again.
            EngineFailed: the server did not take them.
        """
        async with self._taking:  # a response asked for meanwhile would not count
            mark = self._mark
        yield
        if mark is None or await self._server.weights_mark() == mark:
            return
        async with self._taking:
            if self._mark == mark and self._directory is not None:
                logger.warning("openai: %s has lost its weights and takes them again", self._server.url)
                await self.take(self._directory)
        raise ServerBusy(
            f"openai: {self._server.url} had other weights than it was given: it was started again, or somebody else "
            f"gave it some"
        )

    async def _take(self, directory: Path) -> str | None:
        """Return the mark; None: an older vLLM, which keeps none."""
        post = partial(self._server.post, timeout_s=self._timeout_s)
        await post("/pause?mode=abort&clear_cache=true", {})
        await post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}})
        mark: str | None = secrets.token_hex(8)
        try:
            await post("/update_weight_version", {"new_version": mark})
        except RequestRefused:
            mark = None
        await post("/resume", {})
        return mark


def open_updates(config: OpenAIConfig) -> CallPool:
    """Return the pool that calls `openai.update`, one update after the other.

    Raises:
        ConfigError: the function cannot be imported.
    """
    pool = CallPool(
        Entry("workers.engines.openai.weights:update", {"name": config.update}),
        what=f"openai.update: {config.update}",
        limit="openai.update_timeout_s",
        timeout_s=config.update_timeout_s,
        concurrency=1,
    )
    try:
        pool.until_ready()
    except BaseException:
        pool.close()
        raise
    return pool


def update(name: str) -> Callee:
    """Import the function, in the pool's child; it gets a `Path`, and its result is ignored."""
    function = load_function(name, field="openai.update", arguments=UPDATE_ARGUMENTS)
    return Callee(function, takes=lambda texts: [Path(texts[0])], gives=lambda value, texts: None)
