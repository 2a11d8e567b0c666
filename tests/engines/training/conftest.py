"""Runs the ranks of each adapter and layout once; every test looks at what they wrote."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncflow.testing.tiny_model import save_tiny_model

from .adapter import Adapter
from .adapters import ADAPTERS
from .plain import Plain

DEADLINE_S = 800
GATE = ("fsdp", "2")
"""Adapter and layout of the gate."""
"""All families of a layout, on a busy machine."""
TESTS = Path(__file__).parents[2]


@dataclass
class Trained:
    """What the ranks of one layout did with one family.

    Attributes:
        adapter: of the engine.
        model_dir: the initial model.
        out: holds `export`.
        ranks: results of each rank, see rank.py.
        plain: plain PyTorch, with the same model.
    """

    adapter: Adapter
    model_dir: Path
    out: Path
    ranks: list[dict[str, Any]]
    plain: Plain


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test every adapter, layout and family."""
    if "trained" in metafunc.fixturenames:
        cases = [(a.name, layout, family) for a in ADAPTERS.values() for layout in a.layouts for family in a.families]
        parameters = [pytest.param(case, marks=[pytest.mark.gate] if case[:2] == GATE else []) for case in cases]
        metafunc.parametrize("trained", parameters, ids=["-".join(case) for case in cases], indirect=True)


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Adapter, str], Path]:
    """Return a function that runs a layout once, and gives its directory."""
    roots: dict[str, Path] = {}
    done: set[tuple[str, str]] = set()

    def run(adapter: Adapter, layout: str) -> Path:
        if adapter.name not in roots:
            roots[adapter.name] = root = tmp_path_factory.mktemp(adapter.name)
            for family in adapter.families:
                save_tiny_model(root / "models" / family, family, seed=0, changes=adapter.model)
        root = roots[adapter.name]
        if (adapter.name, layout) not in done:
            done.add((adapter.name, layout))
            for family in adapter.families:
                (root / layout / family).mkdir(parents=True)
            _run(adapter, layout, root)
        return root

    return run


@pytest.fixture
def trained(request: pytest.FixtureRequest, run_ranks: Callable[[Adapter, str], Path]) -> Trained:
    """What one layout did with one family."""
    name, layout, family = request.param
    adapter = ADAPTERS[name]
    for package in adapter.packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    root = run_ranks(adapter, layout)
    out, model_dir = root / layout / family, root / "models" / family
    files = [out / f"rank-{rank}.pt" for rank in range(adapter.num_ranks(layout))]
    ranks = [torch.load(file, weights_only=False) for file in files if file.exists()]
    assert len(ranks) == len(files), f"ranks of {name} failed, see their output in the first test of this layout"
    return Trained(adapter, model_dir, out, ranks, Plain.of(model_dir))


def _run(adapter: Adapter, layout: str, root: Path) -> None:
    paths = [str(TESTS), str(TESTS.parent), *filter(None, sys.path)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(paths)}
    module = [sys.executable, "-m", "engines.training.rank", adapter.name, layout]
    processes = [
        subprocess.Popen([*module, str(rank), str(root)], env=environment) for rank in range(adapter.num_ranks(layout))
    ]
    try:
        assert [process.wait(DEADLINE_S) for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
