"""Tells engines outside the run where new weights lie: one HTTP POST of JSON to each."""

# Looked up (November 2026) in the engines' sources and documentation:
#
# SGLang    POST /update_weights_from_disk, `UpdateWeightFromDiskReqInput`: `model_path`, and optionally `load_format`,
#           `abort_all_requests`, `weight_version`, `flush_cache`, ...; answers once the weights are loaded, with
#           `{"success": ..., "message": ...}` and status 200, or 400 if it could not load them.
#           https://docs.sglang.io/advanced_features/sglang_for_rl.html
# vLLM      only with VLLM_SERVER_DEV_MODE=1: POST /collective_rpc with `{"method": "reload_weights", "kwargs":
#           {"weights_path": DIRECTORY}}`; cached keys and values stay, so POST /reset_prefix_cache follows.
#           Newer servers with `--weight-transfer-config '{"backend": "disk"}'` take the same in three requests:
#           /start_weight_update, /update_weights, /finish_weight_update (targets of one server keep their order).
#           https://docs.vllm.ai/en/latest/training/layerwise/, .../training/weight_transfer/disk/
#
# Neither was run against here. Called by the exporter; knows nothing of weights.

import json
import logging
import threading
import time
from collections.abc import Sequence
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from typing import IO
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from pydantic import JsonValue

from weightsync.config import NotifyTarget
from weightsync.version import Version

logger = logging.getLogger(__name__)

PAUSES_S = (0.25, 1.0, 4.0)  # pauses before the second, third and fourth attempt (s)
_TOO_MANY_REQUESTS = 429
_SERVER_ERRORS = 500
_SHOWN_BYTES = 300


class _NoRedirects(HTTPRedirectHandler):
    """A redirected POST would arrive as a GET without its body."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        return None


_OPENER = build_opener(_NoRedirects, ProxyHandler({}))  # engines are nearby: ignore the environment's proxies


def weight_sync_notify(
    targets: Sequence[NotifyTarget],
    directory: Path,
    version: Version,
    *,
    stop: threading.Event | None = None,
    pauses_s: Sequence[float] = PAUSES_S,
) -> list[str]:
    """Tell all targets of an export; returns what went wrong, by address, and logs it.

    Targets of one host and port are told one after another, others at the same time. A target that is busy,
    unreachable, or answers with a server error (5xx) is retried until its `timeout_s`.

    Args:
        directory: absolute, and complete.
        stop: once set, nothing is retried.
        pauses_s: before each further attempt.
    """
    servers = _servers(targets)
    outcomes: dict[int, str] = {}
    stop = stop or threading.Event()

    def tell(queue: Sequence[NotifyTarget]) -> None:
        for target in queue:
            body = json.dumps(fill_in(target.body, directory, version)).encode()
            outcomes[id(target)] = _post(target, body, stop, pauses_s)

    threads = [(threading.Thread(target=tell, args=(queue,), daemon=True), queue) for queue in servers]
    for thread, _ in threads:
        thread.start()
    began = time.monotonic()
    for thread, queue in threads:  # a server that answers byte by byte outlasts every socket timeout
        thread.join(max(0.0, began + sum(target.timeout_s for target in queue) - time.monotonic()))
    told = [(target.url, outcomes.get(id(target), f"no answer within {target.timeout_s:g} s")) for target in targets]
    failures = [f"{url}: {problem}" for url, problem in told if problem]
    for failure in failures:
        logger.warning("weights of %s: not told to %s", version, failure)
    return failures


class Notifier:
    """Tells engines of the newest export, with one thread per server: one that hangs delays no other."""

    def __init__(self, targets: Sequence[NotifyTarget]) -> None:
        self._changed = threading.Condition()
        self._newest: tuple[Path, Version] | None = None
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep_telling, args=(server,), name="weight-notify", daemon=True)
            for server in _servers(targets)
        ]
        for thread in self._threads:
            thread.start()

    def tell(self, directory: Path, version: Version) -> None:
        """Tell every server; one that is busy with an older export is told of the newest one afterwards."""
        with self._changed:
            self._newest = directory, version
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Wait until every engine was told or did not answer in time; idempotent."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning("weights: an engine was not told of the last export, because it does not answer")

    def _keep_telling(self, server: Sequence[NotifyTarget]) -> None:
        told: Version | None = None
        while True:
            with self._changed:
                while (newest := self._newest) is None or newest[1] == told:
                    if self._closing.is_set():
                        return
                    self._changed.wait()
            directory, told = newest
            weight_sync_notify(server, directory, told, stop=self._closing)


def fill_in(template: JsonValue, directory: Path, version: Version) -> JsonValue:
    """Return a body with its placeholders filled in; see `NotifyTarget.body`."""
    if isinstance(template, dict):
        return {key: fill_in(value, directory, version) for key, value in template.items()}
    if isinstance(template, list):
        return [fill_in(value, directory, version) for value in template]
    if not isinstance(template, str):
        return template
    if template in ("{lineage}", "{step}"):
        return version.lineage if template == "{lineage}" else version.step
    places = {
        "version": f"{version.lineage}.{version.step}",
        "lineage": str(version.lineage),
        "step": str(version.step),
    }
    for place, text in places.items():
        template = template.replace(f"{{{place}}}", text)
    return template.replace("{directory}", str(directory))  # last, so that nothing in the path counts as a placeholder


def _servers(targets: Sequence[NotifyTarget]) -> list[list[NotifyTarget]]:
    servers: dict[str, list[NotifyTarget]] = {}
    for target in targets:
        servers.setdefault(urlsplit(target.url).netloc, []).append(target)
    return list(servers.values())


def _post(target: NotifyTarget, body: bytes, stop: threading.Event, pauses_s: Sequence[float]) -> str:
    deadline = time.monotonic() + target.timeout_s
    for pause_s in (*pauses_s, None):
        problem, lasting = _attempt(target.url, body, max(0.01, deadline - time.monotonic()))
        if not problem or lasting or pause_s is None or time.monotonic() + pause_s >= deadline or stop.wait(pause_s):
            break
    return problem


def _attempt(url: str, body: bytes, timeout_s: float) -> tuple[str, bool]:
    """Return what went wrong ("": nothing), and whether a retry is pointless."""
    request = Request(url, data=body, headers={"Content-Type": "application/json"}, method="POST")
    try:
        with _OPENER.open(request, timeout=timeout_s):
            return "", False
    except HTTPError as error:
        with error:
            said = _first_words(error)
        return (
            f"answered {error.code} {said}".rstrip(),
            error.code < _SERVER_ERRORS and error.code != _TOO_MANY_REQUESTS,
        )
    except (OSError, HTTPException) as error:
        return f"{type(error).__name__}: {error}", False


def _first_words(error: HTTPError) -> str:
    try:
        return " ".join(error.read(_SHOWN_BYTES).decode(errors="replace").split())
    except (OSError, HTTPException):
        return ""
