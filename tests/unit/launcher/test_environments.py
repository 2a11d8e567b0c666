"""`launcher.environments`: what an interpreter of its own for a role must be, and what it is asked before a start."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from asyncflow import agreement
from asyncflow.agreement import differences, software
from asyncflow.errors import ConfigError
from asyncflow.job import GangSpec, own_name
from launcher.checks.environments import RowsToCheck, check_gangs, check_hosts, check_software, find_identity
from launcher.checks.models import check_libraries
from launcher.checks.placement import Devices, place_gangs
from launcher.checks.preflight import check_run
from launcher.checks.proof_cache import models_of
from launcher.checks.user_code import check_names
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from tests.support.interpreters import make_interpreter
from workers.settings.run import LauncherConfig, RunConfig

ROLES = "rollout:1,actor:1,ref:1"


def quickstart(*overrides: str, roles: str = ROLES) -> RunConfig:
    return load_config(find_recipe("quickstart"), overrides=("launcher.device=cpu", *overrides), roles=roles)


def test_interpreter_is_that_of_the_role_on_the_node() -> None:
    launcher = LauncherConfig.model_validate(
        {"environments": {"rollout": "/a/python", "actor": {1: "/b/python", own_name(): "/c/python"}}}
    )
    launcher = LauncherConfig.model_validate(launcher.model_dump(mode="json"))  # as a run keeps it
    assert launcher.interpreters(1, own_name()) == {"rollout": "/a/python", "actor": "/b/python"}
    assert launcher.interpreters(0, own_name()) == {"rollout": "/a/python", "actor": "/c/python"}
    assert launcher.interpreters(0, "other") == {"rollout": "/a/python"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{rolout: /a/python}", "launcher.environments: 'rolout' is not a role; roles: rollout actor ref"),
        ("{rollout: a/python}", "'a/python' is not absolute; write the interpreter's path out, from /"),
    ],
)
def test_what_cannot_be_meant_is_refused(value: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        quickstart(f"launcher.environments={value}")
    assert message in str(refused.value)


def script(place: Path, text: str) -> str:
    place.write_text(f"#!/bin/sh\n{text}\n")
    place.chmod(0o755)
    return str(place)


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ("exit 3", "is no Python interpreter that can be used (it ended with code 3); name another"),
        ("printf 'unknown option -P\\nTry -h.\\n' >&2; exit 2", "(unknown option -P); name another, of Python 3.11 or"),
        ("printf 'Traceback:\\n  x\\nNo module y\\n' >&2; exit 1", "can be used (No module y); name another"),
        ("printf '\\377'; exit 3", "is no Python interpreter that can be used (it ended with code 3); name another"),
        ("echo '[{}, \"\"]'", f"has no AsyncFlow; install {software()['AsyncFlow version']} there, as here"),
        (
            'echo noise; echo \'[{"AsyncFlow version": "0.0.9"}, ""]\'',
            f"another AsyncFlow than the launcher: AsyncFlow version (0.0.9, not {software()['AsyncFlow version']})",
        ),
    ],
)
def test_interpreter_without_this_asyncflow_is_one_line(tmp_path: Path, says: str, message: str) -> None:
    python = script(tmp_path / "python", says)
    with pytest.raises(ConfigError) as refused:
        check_software(python, ["rollout", "ref"])
    assert str(refused.value).startswith(f"launcher.environments: {python} (rollout, ref): ")
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_interpreter_that_does_not_exist_is_refused_before_anything_else_is_asked(tmp_path: Path) -> None:
    config = quickstart(f"launcher.environments={{rollout: {tmp_path}/none/python}}")
    gangs = place_gangs(config, Devices("cpu"))
    with pytest.raises(ConfigError, match=r"none/python \(rollout\): cannot be run \(No such file or directory\);"):
        check_gangs(config, gangs, 0, device="cpu", rows=RowsToCheck(None, None, ()))


def test_interpreters_are_asked_only_by_the_node_that_has_the_role(tmp_path: Path) -> None:
    config = quickstart(f"launcher.environments={{rollout: {tmp_path}/none/python}}", roles="rollout:1,actor:1")
    gangs = place_gangs(config, Devices("cpu"), num_nodes=2)
    (elsewhere,) = {0, 1} - {node for gang in gangs if gang.role == "rollout" for node in gang.parts}
    check_gangs(config, gangs, elsewhere, device="cpu", rows=RowsToCheck(None, None, ()))


def test_node_that_has_no_process_of_the_role_is_refused_rather_than_ignored() -> None:
    for name in ("1", "nobody"):
        config = quickstart(f"launcher.environments={{rollout: {{{name}: {sys.executable}}}}}")
        with pytest.raises(ConfigError, match=rf"rollout: node '{name}' has no rollout, which is on node 0; node 0 is"):
            check_gangs(config, place_gangs(config, Devices("cpu")), 0, device="cpu", rows=RowsToCheck(None, None, ()))
    config = quickstart(f"launcher.environments={{rollout: {{0: {sys.executable}}}}}", roles="rollout:1,actor:1")
    gangs = place_gangs(config, Devices("cpu"), num_nodes=2)
    (own,) = {node for gang in gangs if gang.role == "rollout" for node in gang.parts}
    if own != 0:
        with pytest.raises(ConfigError, match="node '0' has no rollout"):
            check_gangs(config, gangs, 1, device="cpu", rows=RowsToCheck(None, None, ()))


def test_host_that_no_node_of_the_role_has_is_refused_once_all_have_joined() -> None:
    config = quickstart("launcher.environments={rollout: {1: /a/python, alpha: /b/python}}", roles="rollout:2,actor:1")
    gangs = [GangSpec(f"rollout-{k}", "rollout", k, 1, ("cpu",), (k,)) for k in range(2)]
    check_hosts(config, gangs, {0: "alpha", 1: "beta", 2: "gamma"})
    with pytest.raises(ConfigError) as refused:
        check_hosts(config, gangs, {0: "alpah", 1: "beta", 2: "alpha"})
    assert str(refused.value) == (
        "launcher.environments: rollout: no node with a rollout is called 'alpha': it is on node 0 (alpah), 1 (beta); "
        "correct it"
    )
    check_hosts(config, [], {0: "a"})


def test_library_is_looked_for_where_its_role_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = quickstart("rollout.engine=vllm")
    monkeypatch.setattr("launcher.checks.models.is_installed", lambda module: False)
    check_libraries(config, device="cuda", roles=["actor", "ref"])
    with pytest.raises(ConfigError, match=r"^rollout.engine: vllm needs the package vllm"):
        check_libraries(config, device="cuda", roles=["rollout"])


def test_each_interpreter_proves_what_its_roles_compute() -> None:
    config = quickstart("rollout.engine=vllm", "algorithm.kl_coef=0.1")
    assert [use.parts for use in models_of(config, ["rollout"])] == []
    assert [use.parts for use in models_of(config, ["ref"])] == [("names", "packed")]
    assert [use.parts for use in models_of(config, ["actor"])] == [("names", "packed", "export")]


@pytest.mark.parametrize("function", ["reward.function=no_such_module:score", "rollout.function=no_such_module:talk"])
def test_functions_that_evaluators_call_are_looked_for_in_their_interpreter(function: str) -> None:
    settings = (function, "actor.max_tokens_per_micro_batch=64")
    for roles, is_asked in (("rollout:1,actor:1,evaluate:1", True), ("rollout:1,actor:1", False)):
        config = quickstart(*settings, roles=roles)
        with pytest.raises(ConfigError, match="no_such_module") if is_asked else nullcontext():
            check_names(config, lambda role: role == "evaluate")


def test_differences_are_named_with_both_values() -> None:
    first = {"AsyncFlow version": "1", "end tokens": "a", "chat template": "c"}
    assert differences(first, {"AsyncFlow version": "1", "end tokens": "b"}) == "end tokens (b, not a)"
    assert differences(first, {**first, "wire format": "x"}) == ""


def test_wire_format_follows_the_sources_of_what_processes_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_HOME", tmp_path)
    (tmp_path / "tq").mkdir()
    (tmp_path / "tq" / "messages.py").write_text("a = 1")
    before = agreement._wire_format()
    (tmp_path / "tq" / "messages.py").write_text("a = 2")
    assert agreement._wire_format() != before


OTHER_TOKENS = """
import sys
if "workers.calls.child" in " ".join(sys.orig_argv):
    import workers.data.tokenizer
    load = workers.data.tokenizer.load_tokenizer
    def load_tokenizer(*given):
        tokenizer = load(*given)
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(3)
        return tokenizer
    workers.data.tokenizer.load_tokenizer = load_tokenizer
"""


@pytest.mark.slow
def test_interpreter_whose_libraries_make_other_tokens_is_told_by_what_differs(tmp_path: Path) -> None:
    same, other = make_interpreter(tmp_path / "a"), make_interpreter(tmp_path / "b", sitecustomize=OTHER_TOKENS)
    bare = make_interpreter(tmp_path / "c", has_asyncflow=False)
    for python, message in (
        (same, ""),
        (other, r"than that of the launcher: end tokens \(\w+, not \w+\); use the same versions"),
        (bare, r"has no AsyncFlow"),
    ):
        checked = check_run(quickstart(f"launcher.environments={{rollout: {python}}}"))
        identity = find_identity(checked.config, checked.rows_to_check.first_chunk)
        assert set(identity) >= {"AsyncFlow version", "wire format", "end tokens", "first chunk of the data"}

        def check(one: Any = checked) -> None:
            check_gangs(one.config, one.gangs, 0, device="cpu", rows=one.rows_to_check)

        if message:
            with pytest.raises(ConfigError, match=message) as refused:
                check()
            assert str(refused.value).startswith(f"launcher.environments: {python} (rollout): ")
        else:
            check()


@pytest.mark.slow
def test_library_that_a_role_needs_is_missed_in_its_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    hides = "import sys; sys.modules['megatron'] = None"
    python = make_interpreter(tmp_path / "a", sitecustomize=hides)
    config = quickstart(f"launcher.environments={{ref: {python}}}", "ref.engine=megatron")
    gangs = place_gangs(config, Devices("cpu"))
    with pytest.raises(ConfigError, match=rf"^launcher.environments: {python} \(ref\): ref.engine: megatron needs"):
        check_gangs(config, gangs, 0, device="cuda", rows=RowsToCheck(None, None, ()))
