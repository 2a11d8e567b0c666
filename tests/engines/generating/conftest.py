"""The adapters, their models, and engines that tests share: a real one takes seconds to start."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from workers.rollout.config import SamplingConfig

from .adapter import Adapter
from .hf_adapter import HfAdapter, HfFinishAdapter, HfKeepAdapter
from .lab import Lab
from .sim_adapter import SimAdapter
from .tiny_model import save_tiny_model
from .vllm_adapter import VllmAdapter, VllmTensorParallelAdapter
from .vllm_serve_adapter import VllmServeAdapter

ADAPTERS: list[Adapter] = [
    HfAdapter(),
    HfKeepAdapter(),
    HfFinishAdapter(),
    SimAdapter(),
    VllmAdapter(),
    VllmTensorParallelAdapter(),
    VllmServeAdapter(),
]

GATE = {"hf", "sim"}
"""Adapters of the gate; the first family of models is enough for it."""

MAX_TOKENS, SLOTS = 24, 16


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test every adapter (`lab`), or every family of those that compute (`model_lab`)."""
    if "lab" in metafunc.fixturenames:
        metafunc.parametrize(
            "lab", [_case(each, (each.families or ("llama",))[0], each.name) for each in ADAPTERS], indirect=True
        )
    if "model_lab" in metafunc.fixturenames:
        cases = [_case(each, family, f"{each.name}-{family}") for each in ADAPTERS for family in each.families]
        metafunc.parametrize("model_lab", cases, indirect=True)


def _case(adapter: Adapter, family: str, name: str) -> ParameterSet:
    of_the_gate = adapter.name in GATE and family == (adapter.families or (family,))[0]
    return pytest.param((adapter, family), id=name, marks=[pytest.mark.gate] if of_the_gate else [])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads cost more than they give on models of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Adapter, str], tuple[Path, Path]]:
    """Return a function that gives two models of a family, which differ in their weights."""
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def make(adapter: Adapter, family: str) -> tuple[Path, Path]:
        key = adapter.name, family
        if key not in made:
            root = tmp_path_factory.mktemp("-".join(key))
            first, second = (
                save_tiny_model(root / f"weights-{seed}", family, seed=seed, changes=adapter.model) for seed in (0, 1)
            )
            made[key] = first, second
        return made[key]

    return make


@pytest.fixture(scope="session")
def open_lab(model_dirs: Callable[[Adapter, str], tuple[Path, Path]]) -> Iterator[Callable[..., Lab]]:
    """Return a function that opens an engine, or gives the open one if it is alike; all are closed at the end."""
    with ExitStack() as stack:
        opened: dict[object, Lab] = {}

        def open_one(adapter: Adapter, family: str) -> Lab:
            key = adapter.name, family
            if key not in opened:
                old, new = model_dirs(adapter, family)
                sampling = SamplingConfig.model_validate(
                    {"max_response_tokens": MAX_TOKENS, "batch_size": SLOTS, "temperature": 0.8, "top_k": 11}
                    | adapter.sampling
                )
                engine = stack.enter_context(adapter.open(old, sampling))
                opened[key] = Lab(adapter, engine, sampling, old, new)
            return opened[key]

        yield open_one


@pytest.fixture
def lab(request: pytest.FixtureRequest, open_lab: Callable[..., Lab]) -> Lab:
    """An idle engine with the old weights, as version 0."""
    return open_lab(*request.param).reset()  # type: ignore[no-any-return]


@pytest.fixture
def model_lab(request: pytest.FixtureRequest, open_lab: Callable[..., Lab]) -> Lab:
    """As `lab`, with a model that computes."""
    return open_lab(*request.param).reset()  # type: ignore[no-any-return]
