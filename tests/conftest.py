"""Settings of all tests: which are slow, what runs first, and the examples of property tests.

Nothing is judged by the time that it takes, since machines are busy. Property tests try the same examples every time,
so that a change is judged by what it changes: few of them, or many with `--hypothesis-profile=full`, or others every
time with `--hypothesis-profile=random`.
"""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Models are tiny and tests run beside each other: more threads would wait for cores. Before anybody imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("random", deadline=None)
settings.register_profile("full", deadline=None, derandomize=True)
settings.register_profile("few", deadline=None, derandomize=True, max_examples=20)
settings.load_profile("few")

ROOT = Path(__file__).parent
SUITES = (
    "slurm", "faults", "vllm_engine", "megatron_engine", "nodes", "runs", "device", "engines", "multiproc", "browser",
)  # fmt: skip
"""Tests that start processes, the longest first: what a worker begins last should be short."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what starts processes, but for the cases of each suite that are marked for the gate."""
    order = {suite: place for place, suite in enumerate(SUITES)}
    suites = {item: item.path.relative_to(ROOT).parts[0] for item in items}
    for item, suite in suites.items():
        if suite in order and item.get_closest_marker("gate") is None:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: order.get(suites[item], len(SUITES)))
