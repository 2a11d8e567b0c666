"""Renderers: what the bridge adds, when it refuses, and which renderer a model gets."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncflow.errors import ConfigError
from launcher.checks.user_code import check_names, check_rollout_code
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from tests.support.chat_templates import QWEN25, SMOLLM2, TEMPLATES, tokenizer
from workers.agents.rendering import TOOL, TemplateRenderer, load_renderer, prove
from workers.agents.rollout_errors import BadAgentRequest
from workers.agents.turns import Message
from workers.data.tokenizer import load_tokenizer
from workers.settings.data import TemplateSettings

ASKED: list[Message] = [{"role": "user", "content": "What is 6*7?"}]
NEXT: list[Message] = [{"role": "user", "content": "And  37*64?\n"}]
NO_PACKAGE = importlib.util.find_spec("renderers") is None


def renderer_of(family: str, template: str | None = None) -> tuple[TemplateRenderer, Any]:
    made = tokenizer(family, template)
    return TemplateRenderer(made), made


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_bridge_reads_as_a_full_render(family: str) -> None:
    renderer, made = renderer_of(family)
    text = " 42." if family == "mistral" else "42."  # its template writes a space there
    previous = [*renderer.render(ASKED, None), *made.encode(text, add_special_tokens=False), renderer.stop_ids[0]]
    bridged = renderer.bridge(previous, NEXT, None)
    assert bridged is not None
    assert bridged[: len(previous)] == previous
    whole = renderer.render([*ASKED, {"role": "assistant", "content": "42."}, *NEXT], None)
    assert made.decode(bridged) == made.decode(whole)


def test_a_renderer_needs_no_torch() -> None:
    model = find_recipe("quickstart-tools").parent / "quickstart_tools" / "model"
    code = (
        "import sys, pathlib, workers.agents.service, workers.agents.worker\n"
        "from workers.agents.rendering import load_renderer\n"
        "load_renderer(pathlib.Path(sys.argv[1]), None).render([{'role': 'user', 'content': '6*7'}], None)\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, model], check=True, timeout=60)


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_cut_reply_gets_the_end_mark(family: str) -> None:
    renderer, _ = renderer_of(family)
    previous = [*renderer.render(ASKED, None), 40, 41]
    cut, ended = (renderer.bridge(ids, NEXT, None) for ids in (previous, [*previous, renderer.stop_ids[0]]))
    assert cut is not None
    assert cut == ended


@pytest.mark.parametrize(
    ("family", "with_tools", "lacks"),
    [
        ("qwen2.5", True, []),
        ("qwen3", True, []),
        ("llama3", True, ["bridge new messages of tool and tool"]),
        ("smollm2", False, []),
        ("mistral", False, []),
        ("mistral", True, ["bridge new messages of user", "bridge new messages of tool and user"]),
    ],
)
def test_the_proof_says_what_a_template_lacks(family: str, with_tools: bool, lacks: list[str]) -> None:
    assert prove(*renderer_of(family), [TOOL] if with_tools else None) == lacks


@pytest.mark.parametrize(
    "template",
    [
        SMOLLM2 + "{{ messages | length }}",
        SMOLLM2.replace("m['content'] +", "m['content'] + (loop.index | string) +"),
        "{{ messages[-1].content }}<|im_end|>{% if add_generation_prompt %}>{% endif %}",
        SMOLLM2.replace("m['role'] + ", "(m['role'] if loop.last else 'past') + "),
        SMOLLM2.replace("'<|im_end|>' + '\n'", "('<|im_end|>' if loop.last else '') + '\n'"),
    ],
)
def test_a_template_that_rewrites_history_is_not_bridged(template: str) -> None:
    renderer, made = renderer_of("smollm2", template)
    assert "bridge new messages of user" in prove(renderer, made, None)


def test_calls_in_an_unknown_form_are_told() -> None:
    renderer, made = renderer_of("qwen2.5", QWEN25.replace("tool_call>", "call>"))
    assert prove(renderer, made, [TOOL]) == ["read tool calls"]


def test_a_wrong_bridge_is_refused() -> None:
    class Wrong(TemplateRenderer):
        def bridge(self, *arguments: Any) -> list[int] | None:
            return [*(super().bridge(*arguments) or []), 7]

    made = tokenizer("qwen2.5")
    with pytest.raises(ConfigError, match="model.renderer: the bridge of Wrong writes '.*where a full render ends"):
        prove(Wrong(made), made, None)


def test_a_template_that_ignores_tools_is_refused() -> None:
    renderer, _ = renderer_of("smollm2")
    with pytest.raises(ConfigError, match=r"model\.path: the chat template of .* ignores tools"):
        renderer.render(ASKED, [TOOL])


def test_messages_that_a_template_refuses_are_the_agents_fault() -> None:
    renderer, _ = renderer_of("mistral")
    with pytest.raises(BadAgentRequest, match="messages: the chat template .* Only user and assistant roles"):
        renderer.render([*ASKED, {"role": "critic", "content": "no"}], None)
    assert renderer.bridge([1, 2], [{"role": "critic", "content": "no"}], None) is None


def test_an_assistants_message_is_not_bridged() -> None:
    renderer, _ = renderer_of("qwen2.5")
    assert renderer.bridge([1, 2], [{"role": "assistant", "content": "x"}, *NEXT], None) is None
    assert renderer.bridge([1, 2], [], None) is None


def test_a_prompt_that_opens_the_reasoning_is_bridged_and_parsed() -> None:
    opens = SMOLLM2.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
    renderer, made = renderer_of("smollm2", opens)
    assert prove(renderer, made, None) == []
    drawn = made.encode("hm</think>42<|im_end|>", add_special_tokens=False)
    assert renderer.parse(drawn) == {"role": "assistant", "content": "42", "reasoning_content": "hm"}


def test_special_tokens_are_no_content() -> None:
    renderer, made = renderer_of("llama3")
    drawn = made.encode("<|start_header_id|>4<|eom_id|>2<|eot_id|>", add_special_tokens=False)
    assert renderer.parse(drawn)["content"] == "42"


def test_text_that_is_no_unicode_is_rendered() -> None:
    renderer, made = renderer_of("qwen2.5")
    assert "?" in made.decode(renderer.render([{"role": "user", "content": json.loads('"\\ud800"')}], None))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    tokenizer("qwen3").save_pretrained(tmp_path)
    config = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 800, "eos_token_id": [702, 700]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_template_is_the_default_and_the_models_end_marks_count(model_dir: Path) -> None:
    assert load_renderer(model_dir, None).stop_ids == (702, 700)


def test_a_class_of_the_users_gets_the_tokenizer(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rendering.py").write_text(
        "class Mine:\n    def __init__(self, tokenizer): self.stop_ids = [len(tokenizer)]"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert list(load_renderer(model_dir, "my_rendering:Mine").stop_ids) == [len(tokenizer("qwen3"))]
    with pytest.raises(ConfigError, match=r"model\.renderer: .* defines no 'Yours'"):
        load_renderer(model_dir, "my_rendering:Yours")


def test_preflight_warns_of_what_a_template_cannot_do(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewrites = QWEN25.replace("m.content }}", "m.content + (messages | length | string) }}")
    tokenizer("qwen2.5", rewrites).save_pretrained(model_dir)
    settings = [f"model.path={model_dir}", "model.renderer=null", "rollout.tools=[]"]
    check_rollout_code(load_config(find_recipe("quickstart-tools"), overrides=settings))
    assert "the template cannot bridge new messages of user: each turn begins a new sample" in caplog.text


def test_preflight_refuses_a_template_that_ignores_the_tools_of_the_run(model_dir: Path) -> None:
    tokenizer("smollm2").save_pretrained(model_dir)
    settings = [f"model.path={model_dir}", "model.renderer=null"]
    with pytest.raises(ConfigError, match=r"model\.path: the chat template of .* ignores tools"):
        check_rollout_code(load_config(find_recipe("quickstart-tools"), overrides=settings))


def test_preflight_refuses_a_program_that_does_not_exist() -> None:
    settings = ["rollout.function=null", "rollout.tools=[]", "rollout.agent_command=[./no_such_program]"]
    with pytest.raises(ConfigError, match=r"rollout\.agent_command: there is no program '\./no_such_program'"):
        check_names(load_config(find_recipe("quickstart-tools"), overrides=settings))


@pytest.mark.skipif(not NO_PACKAGE, reason="the package renderers is installed")
def test_a_missing_package_is_told(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.renderer: 'qwen3' needs the package renderers: pip install"):
        load_renderer(model_dir, "qwen3")


@pytest.mark.skipif(NO_PACKAGE, reason="needs the package renderers: pip install renderers httpx")
def test_a_renderer_of_the_package_is_proven(model_dir: Path) -> None:
    made = tokenizer("qwen3")
    renderer = load_renderer(model_dir, "qwen3")
    assert prove(renderer, made, [TOOL]) == []
    text = '<think>hm</think>So: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><|im_end|>'
    message = renderer.parse(made.encode(text, add_special_tokens=False))
    assert message["reasoning_content"] == "hm"
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    with pytest.raises(ConfigError, match="No renderer config registered for name='nope'"):
        load_renderer(model_dir, "nope")
    with pytest.raises(ConfigError, match="never bridges"):
        load_renderer(model_dir, "default")


def test_a_prompt_that_leaves_nothing_to_say_is_refused() -> None:
    renderer, made = renderer_of("qwen2.5", "{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}")
    with pytest.raises(
        ConfigError, match=r"ends a prompt with <\|im_end\|>, which ends a response, so none could begin"
    ):
        prove(renderer, made, None)


_TWICE = (
    "<s><s>{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}[/INST]{% else %}</s>{% endif %}{% endfor %}"
)


def test_a_prompt_that_begins_twice_is_refused() -> None:
    renderer, made = renderer_of("mistral", _TWICE)
    with pytest.raises(ConfigError, match="begins a prompt with two <s>; take one out"):
        prove(renderer, made, None)


def test_a_template_of_an_agent_is_told_the_time_of_the_start(model_dir: Path) -> None:
    text = "{% for m in messages %}{{ strftime_now('%d %b %Y') }} {{ m.content }}<|im_end|>{% endfor %}"
    made = load_tokenizer(model_dir)
    made.chat_template = text
    made.save_pretrained(model_dir)
    renderer = load_renderer(model_dir, None, TemplateSettings("2001-02-03T04:05:06"))
    assert made.decode(renderer.render(ASKED[:1], None)).startswith("03 Feb 2001 ")


@pytest.mark.skipif(NO_PACKAGE, reason="needs the package renderers: pip install renderers httpx")
def test_a_renderer_of_the_package_is_told_the_day_of_the_start() -> None:
    from renderers import config_from_name

    from workers.agents.rendering import _at_time

    assert _at_time(config_from_name("gpt-oss"), "2001-02-03T04:05:06").conversation_start_date == "2001-02-03"
    plain = config_from_name("qwen3")
    assert _at_time(plain, "2001-02-03T04:05:06") is plain
