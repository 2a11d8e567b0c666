"""How fast prompts are fed: by a process that joined with `connect`, and by the process that keeps them."""

import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

ROW = {"prompt": "12+34=" * 40, "answer": "46"}
BATCH = 512
BATCHES = 10
ROUNDS = 9
_TIMEOUT_S = 60.0

Put = Callable[[Sequence[dict[str, str]]], object]


def measure(_: int) -> dict[str, float]:
    """Return the figures of this part."""
    from asyncflow.job import LOOPBACK
    from asyncflow.process import ServiceThreads
    from asyncflow.sealed_store import serve_store
    from asyncflow.transport.meeting import Credentials
    from launcher.config.load_config import load_config
    from launcher.config.paths import find_recipe
    from workers.admission.feed_service import FeedService
    from workers.data.feed_file import FeedFile
    from workers.data.prompt_dataset import FedPrompts, PromptTokens
    from workers.outside.run_client import Announcement

    config = load_config(
        find_recipe("quickstart"), overrides=["data.path=null", "data.source=feed", "data.max_prompt_tokens=512"]
    )
    secret = secrets.token_bytes(32)
    store, port = serve_store(LOOPBACK, timedelta(seconds=_TIMEOUT_S))
    credentials = Credentials(store, secret, _TIMEOUT_S)
    Announcement({}, config.tq.model_dump(mode="json", exclude={"backend"}), 0, {}, takes_prompts=True).publish(
        credentials
    )
    with tempfile.TemporaryDirectory() as temporary:
        file = FeedFile(Path(temporary) / "feed.jsonl", appends=True)
        prompts = FedPrompts(file, PromptTokens(config.data, model_dir=Path(config.model.path), own_rollout=False))
        service = FeedService(credentials, prompts, threads=ServiceThreads("feed"))

        def put(rows: Sequence[dict[str, str]]) -> None:
            prompts.check(rows)
            file.put("local", rows)

        command = [sys.executable, "-m", "benchmarks.doors.feed", f"{LOOPBACK}:{port}"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[2]
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            joined, local = [], []
            for line in [secret.hex(), *["go"] * ROUNDS]:  # in turns, so that what else the machine does slows both
                print(line, file=child.stdin, flush=True)
                joined.append(float(child.stdout.readline()))
                local.append(_rows_per_s(put))
            child.stdin.close()
        service.close()
        prompts.close()
    figures = [statistics.median(rates[1:]) for rates in (joined, local)]  # the first ones load libraries
    return {
        "feed_rows_per_s": figures[0],
        "feed_rows_per_s_local": figures[1],
        "feed_rows_share": figures[0] / figures[1],
    }


def _rows_per_s(put: Put) -> float:
    began = time.perf_counter()
    for _ in range(BATCHES):
        put([ROW] * BATCH)
    return BATCHES * BATCH / (time.perf_counter() - began)


def _feed_on_demand(address: str) -> None:
    """Join, and feed a round per line of standard input."""
    import asyncflow

    with asyncflow.connect(address, sys.stdin.readline().strip()) as run:
        feed = run.feed("joined")
        print(_rows_per_s(feed.put), flush=True)
        for _ in sys.stdin:
            print(_rows_per_s(feed.put), flush=True)


if __name__ == "__main__":
    _feed_on_demand(sys.argv[1])
