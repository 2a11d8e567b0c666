"""Import paths that pages once named still lead to the same objects, with a warning."""

import importlib
import sys

import pytest

from asyncflow.former_names import FORMER


@pytest.mark.parametrize("name", FORMER)
def test_a_former_path_warns_and_has_the_same_objects(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns(DeprecationWarning, match=f"^{name} is now {FORMER[name]}$"):
        former = importlib.import_module(name)
    now = importlib.import_module(FORMER[name])
    public = [key for key in vars(now) if not key.startswith("_")]
    assert public and all(getattr(former, key) is getattr(now, key) for key in public)


@pytest.mark.parametrize(
    "path",
    [
        "launcher.loggers.base.Logger", "weightsync.external.connect_weights", "workers.agents.environment.Step",
        "workers.agents.messages.Message", "workers.algorithms.config.KlLossConfig", "workers.config.RunConfig",
        "workers.engines.model_files.eos_token_ids", "workers.engines.setup.EngineSetup",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_names_on_pages_are_there(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert hasattr(importlib.import_module(module), name)
