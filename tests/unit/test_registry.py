"""Names in settings: built-in ones, those of installed packages, `module:Class`."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncflow.errors import ConfigError
from asyncflow.registry import Registry
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from workers.settings.run import RunConfig

ENGINES = Registry("asyncflow.rollout_engines", {"hf": "a.b:Hf", "sim": "a.c:Sim"})
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a package of nothing but entry points: name, `group=name:value`."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setenv("ASYNCFLOW_CODE_DIRECTORY", "")

    def made(package: str, **groups: str) -> None:
        directory = tmp_path / f"{package}-1.0.dist-info"
        directory.mkdir()
        (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"[asyncflow.{group}]\n{entry}\n" for group, entry in groups.items()]
        (directory / "entry_points.txt").write_text("\n".join(lines))

    return made


def test_built_in_names_and_import_paths_stay_as_they_are() -> None:
    assert [ENGINES.resolve_name(name) for name in ("hf", "mine:Engine")] == ["hf", "mine:Engine"]
    assert [ENGINES.locate_class(name) for name in ("hf", "mine:Engine")] == ["a.b:Hf", "mine:Engine"]


def test_a_name_of_an_installed_package_is_its_import_path(install: Install) -> None:
    install("theirs", rollout_engines="fast = theirs.engine:Fast\nhf = theirs.engine:Hf")
    assert (ENGINES.resolve_name("fast"), ENGINES.locate_class("fast")) == ("theirs.engine:Fast",) * 2
    assert ENGINES.resolve_name("hf") == "hf", "a built-in one comes first"


def test_an_unknown_name_is_told_which_there_are(install: Install) -> None:
    install("theirs", rollout_engines="fast = theirs.engine:Fast")
    with pytest.raises(ValueError, match=r"^it must be one of hf sim fast or module:Class; did you mean 'fast'\?$"):
        ENGINES.resolve_name("fats")
    with pytest.raises(ValueError, match="^it must be module:Class$"):
        Registry("asyncflow.nothing", {}).resolve_name("x")


def test_a_name_that_two_packages_have_is_refused(install: Install) -> None:
    install("theirs", rollout_engines="fast = theirs:Fast")
    install("others", rollout_engines="fast = others:Fast")
    with pytest.raises(ValueError, match="name one of others:Fast theirs:Fast"):
        ENGINES.resolve_name("fast")


def configured(*settings: str) -> RunConfig:
    return load_config(find_recipe("quickstart"), overrides=settings)


def test_names_of_installed_packages_are_import_paths_in_a_run(install: Install, tmp_path: Path) -> None:
    install(
        "theirs",
        policies="oldest = their_code:Oldest",
        backends="tape = their_code:Tape",
        loggers="paper = their_code:Paper",
        rewards="kind = their_code:kind",
        rollouts="walk = their_code:walk",
    )
    (tmp_path / "their_code.py").write_text(
        "from tq.policies import Fifo\nfrom launcher.loggers.backends import Logger\n"
        "class Oldest(Fifo): pass\nclass Paper(Logger):\n    def __init__(self, run): pass\n"
        "from tq.backends.backend import MemoryBackend\nclass Tape(MemoryBackend): pass\n"
    )
    named = ("tq.policy=oldest", "tq.backend.kind=tape", "loggers=[paper]", "reward.function=kind")
    config = configured(*named, "rollout.function=walk", f"code_directory={tmp_path}")
    assert (config.tq.policy, config.tq.backend.kind) == ("their_code:Oldest", "their_code:Tape")
    assert config.loggers[0].name == "their_code:Paper"
    assert (config.reward.function, config.rollout.function) == ("their_code:kind", "their_code:walk")
    assert "their_code" not in sys.modules, "the launcher imports no class of a user's"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rollout.engine=vlm", r"rollout.engine: 'vlm' .*one of hf vllm openai sim or module:Class; did .* 'vllm'\?"),
        ("evaluate.engine=openai", "evaluate.engine: 'openai' .*one of hf vllm sim or"),
        (
            "ref={engine_options: {a: 1}}",
            "ref.engine_options: .*; only a class of your own takes options, not hf; remove",
        ),
        ("actor.engine=deepspeed", "actor.engine: 'deepspeed' .*one of fsdp megatron sim or"),
        ("ref.engine=vllm", "ref.engine: 'vllm' .*one of hf fsdp megatron sim or"),
        ("reward.function=exat", "reward.function: 'exat' .*regex or module:function or a URL; did you mean 'exact'"),
        ("rollout.function=tool", "rollout.function: 'tool' .*one of tools or module:function"),
        ("data={source: sums}", r"data.source: 'sums' .*it must be one of feed or module:Class"),
        ("loggers=[wand]", r"loggers.0.name: 'wand' .*one of tensorboard wandb .*; did you mean 'wandb'\?"),
        ("tq.policy=lifo(window=2)", r"tq.policy: 'lifo\(window=2\)' .*one of fifo token-budget "),
        ("tq.backend.kind=rediss", r"tq.backend.kind: 'rediss' .*one of memory redis mooncake or .* did .* 'redis'\?"),
        ("tq.backend={kind: redis, address: 'redis://h:nan'}", ".*; address 'redis://h:nan' is not a Redis URL"),
        ("tq.backend.options={a: 1}", ".*only a class of your own takes options, not memory; remove them"),
        ("algorithm.name=grop", r"algorithm.name: 'grop' .*one of grpo dapo .* or module:Class; did you mean 'grpo'\?"),
    ],
)
def test_a_name_that_nothing_has_is_one_line(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}") as refused:
        configured(setting)
    assert "\n" not in str(refused.value)
