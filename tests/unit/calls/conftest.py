"""Pools over functions of a test module."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workers.calls.pool import CallPool, Entry

Open = Callable[..., CallPool]


@pytest.fixture(name="open_pool")
def _open_pool(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens pools over the functions in the test module's `SOURCE`; their children end with the test."""
    (tmp_path / "users_code.py").write_text(request.module.SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    pools: list[CallPool] = []

    def open_pool(name: str, *, entry: str = "entry", timeout_s: float = 60, concurrency: int = 1) -> CallPool:
        pool = CallPool(
            Entry(f"users_code:{entry}", {"name": name}),
            what=f"reward.function: mine:{name}",
            limit="reward.timeout_s",
            timeout_s=timeout_s,
            concurrency=concurrency,
        )
        pools.append(pool)
        return pool

    yield open_pool
    for pool in pools:
        pool.close()
