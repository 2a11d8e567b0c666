"""Users' modules: installed ones first, then those beside the configuration, then the working directory's."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import workers
from asyncflow.errors import ConfigError
from workers.calls.user_function import load_function, search_beside

ARGUMENTS = ("prompt", "response", "ground_truth")


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The configuration's directory, which is not the working directory."""
    monkeypatch.setenv("ASYNCFLOW_CODE_DIRECTORY", "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "cwd").mkdir()
    (tmp_path / "beside").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    search_beside(str(tmp_path / "beside"))
    yield tmp_path / "beside"
    for name in [name for name in sys.modules if name.startswith("searched_")]:
        del sys.modules[name]


def write(path: Path, value: int) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"def score(prompt, response, ground_truth): return {value}\n")


def score(name: str) -> object:
    return load_function(name, field="reward.function", arguments=ARGUMENTS)("", "", "")


def refusal(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_function(name, field="reward.function", arguments=ARGUMENTS)
    return str(caught.value)


def test_configuration_s_directory_comes_before_the_working_directory(beside: Path) -> None:
    write(Path("searched_both.py"), 1)
    write(beside / "searched_both.py", 2)
    write(Path("searched_here.py"), 3)
    write(beside / "searched_package" / "there.py", 4)
    names = ["searched_both:score", "searched_here:score", "searched_package.there:score"]
    assert [score(name) for name in names] == [2, 3, 4]


def test_installed_module_comes_first_and_what_it_hides_is_to_be_renamed(beside: Path) -> None:
    write(Path("workers/mine.py"), 1)
    message = refusal("workers.mine:score")
    assert message.startswith("reward.function: no module 'workers.mine': ")
    own = Path.cwd() / "workers"
    assert f"{own} is hidden by the installed 'workers' (" in message
    assert message.endswith("which comes first; rename yours, say to my_workers")
    assert "install it" not in message
    write(beside / "json.py", 1)
    message = refusal("json:score")
    assert "defines no 'score'; " in message
    assert f"{beside / 'json.py'} is hidden by the installed 'json' (" in message
    write(Path("math.py"), 1)
    assert f"{Path('math.py').absolute()} is hidden by the installed 'math' (" in refusal("math:score")


def test_missing_module_is_told_where_it_may_be(beside: Path) -> None:
    assert refusal("searched_missing:score").endswith(
        f"no module 'searched_missing'; install it, or put searched_missing.py into {beside} or {Path.cwd()}"
    )


def test_a_folder_named_as_our_recipes_hides_neither_them_nor_its_own_modules(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").touch()
    write(tmp_path / "configs" / "mine.py", 5)
    program = (
        "from launcher.config.paths import find_recipe; from launcher.plan.cost_model import _catalogue\n"
        "from workers.calls.user_function import load_function\n"
        "import configs\n"
        "print(configs.__file__, find_recipe(None).name, len(_catalogue()) > 3)\n"
        "print(load_function('configs.mine:score', field='f', arguments=None)('', '', ''))\n"
        "print(load_function('configs.quickstart_tools.tools:multiply', field='f', arguments=None).__name__)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(workers.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "configs/__init__.py"), "quickstart.yaml", "True", "5", "multiply"]


def test_arguments_in_another_order_are_refused_and_other_names_are_not(beside: Path) -> None:
    (beside / "searched_order.py").write_text(
        "def swapped(base_url, task, api_key): ...\ndef renamed(row, url, key): ...\ndef right(task, *rest): ...\n"
    )
    arguments = ("task", "base_url", "api_key")
    with pytest.raises(
        ConfigError, match="^rollout.agent: searched_order:swapped has parameter 'base_url' where 'task' is"
    ):
        load_function("searched_order:swapped", field="rollout.agent", arguments=arguments)
    for name in ("renamed", "right"):
        load_function(f"searched_order:{name}", field="rollout.agent", arguments=arguments)
