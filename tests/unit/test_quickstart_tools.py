"""The quickstart with tools: its committed model is what its script makes, and its renderer never changes a token."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen2ForCausalLM

import configs
from asyncflow.errors import ConfigError
from configs.quickstart_tools.renderer import CALL, EOS, CalculatorRenderer
from configs.quickstart_tools.tools import multiply
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from workers.data.model_files import check_model_dir, stored_tensors

FOLDER = Path(configs.__path__[0]) / "quickstart_tools"
ROUNDING = 0.01
"""Largest distance of a tensor between machines, relative to its norm; 0.005 was seen, another seed is near 1."""
TASK = {"role": "user", "content": "37*64"}
RESULT = {"role": "tool", "tool_call_id": "call_0", "name": "multiply", "content": "2368"}
TOOLS = [{"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER / "model")


@pytest.fixture
def renderer(tokenizer: Any) -> CalculatorRenderer:
    return CalculatorRenderer(tokenizer)


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


@pytest.mark.slow
def test_script_still_makes_the_committed_files(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-P", FOLDER / "make_model.py", "--target", tmp_path],
        check=True, timeout=290, env={**os.environ, "PYTHONPATH": str(FOLDER.parents[1])}, capture_output=True,
    )  # fmt: skip
    for name in ("train.jsonl", "held_out.jsonl", "model/tokenizer.json", "model/chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes(), name
    made, committed = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path, FOLDER))
    assert made.keys() == committed.keys()
    for name, weight in committed.items():
        assert (made[name] - weight).norm() <= ROUNDING * weight.norm(), name


def test_folder_is_small_and_complete() -> None:
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < 1_000_000
    check_model_dir(FOLDER / "model")
    config = json.loads((FOLDER / "model" / "config.json").read_text())
    assert (config["vocab_size"], config["max_position_embeddings"]) == (19, 48)
    shapes = [stored.shape for stored in stored_tensors(FOLDER / "model").values()]
    assert sum(torch.Size(shape).numel() for shape in shapes) == 95_168


def test_recipe_loads_and_its_batches_divide() -> None:
    config = load_config(find_recipe("quickstart-tools"))
    assert Path(config.data.path) == FOLDER / "train.jsonl"
    assert config.actor.micro_batch_size % config.schedule.n_samples_per_prompt == 0
    assert config.rollout.max_response_tokens >= len([CALL, *"37*64", EOS])


def test_turns_are_the_tokens_that_were_drawn(tokenizer: Any, renderer: CalculatorRenderer) -> None:
    def ids(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    first = renderer.render([TASK], TOOLS)
    assert first == ids("<user>37*64<asst>")
    call = renderer.parse(ids("<call>37*64<eos>"))
    function = call["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("multiply", {"a": 37, "b": 64})
    second = renderer.bridge([*first, *ids("<call>37*64<eos>")], [RESULT], TOOLS)
    assert second == ids("<user>37*64<asst><call>37*64<eos><tool>2368<asst>")
    assert second == renderer.render([TASK, call, RESULT], TOOLS)
    assert renderer.parse(ids("2368<eos>")) == {"role": "assistant", "content": "2368"}
    assert renderer.stop_ids == (tokenizer.eos_token_id,)


def test_bridge_keeps_tokens_that_a_second_rendering_would_change(tokenizer: Any, renderer: CalculatorRenderer) -> None:
    """A call of 07*64 multiplies 7, and 7 would be written with one token."""
    previous = tokenizer("<user>37*64<asst><call>07*64<eos>")["input_ids"]
    call = renderer.parse(previous[-7:])
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"a": 7, "b": 64}
    result = {**RESULT, "content": "448"}
    bridged = renderer.bridge(previous, [result], TOOLS)
    assert bridged[: len(previous)] == previous
    assert bridged != renderer.render([TASK, call, result], TOOLS)


@pytest.mark.parametrize("drawn", ["<call>37*64", "<call>37*<eos>", "<call>2368<eos>", "23<tool>68<eos>"])
def test_what_is_no_call_is_text_with_its_marks(tokenizer: Any, renderer: CalculatorRenderer, drawn: str) -> None:
    message = renderer.parse(tokenizer(drawn)["input_ids"])
    assert message == {"role": "assistant", "content": drawn.removesuffix("<eos>")}


def test_reply_that_was_cut_gets_its_end_mark(tokenizer: Any, renderer: CalculatorRenderer) -> None:
    previous = tokenizer("<user>37*64<asst>23682368")["input_ids"]
    assert tokenizer.decode(renderer.bridge(previous, [TASK])) == "<user>37*64<asst>23682368<eos><user>37*64<asst>"


def test_failure_of_a_tool_is_one_token(tokenizer: Any, renderer: CalculatorRenderer) -> None:
    failed = {**RESULT, "content": "error: no tool is called 'multiply'"}
    assert tokenizer.decode(renderer.render([failed])) == "<tool><unk><asst>"


def test_tool_that_the_model_cannot_call_is_refused(renderer: CalculatorRenderer) -> None:
    with pytest.raises(ConfigError, match="can call multiply only, not divide"):
        renderer.render([TASK], [{"type": "function", "function": {"name": "divide"}}])


def test_chat_template_writes_what_the_renderer_does(tokenizer: Any, renderer: CalculatorRenderer) -> None:
    call: dict[str, Any] = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 37, "b": 64}}}
    called: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    said = {"role": "assistant", "content": "2368"}
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "1"}, TASK, called, RESULT, said, TASK],
        tools=TOOLS, add_generation_prompt=True, tokenize=False,
    )  # fmt: skip
    assert text == "<sys>1<user>37*64<asst><call>37*64<eos><tool>2368<asst>2368<eos><user>37*64<asst>"
    as_text = {**called, "tool_calls": [{**call, "function": {"name": "multiply", "arguments": '{"a": 37, "b": 64}'}}]}
    messages: list[dict[str, Any]] = [{"role": "system", "content": "1"}, TASK, as_text, RESULT, said, TASK]
    assert renderer.render(messages, TOOLS) == tokenizer(text)["input_ids"]


def test_data_have_each_product_once_and_hold_out_a_fifth() -> None:
    trained, held_out = (
        {row["prompt"]: row["answer"] for row in rows(f"{name}.jsonl")} for name in ("train", "held_out")
    )
    assert (len(trained), len(held_out)) == (6480, 1620)
    assert trained | held_out == {f"{a}*{b}": str(a * b) for a in range(10, 100) for b in range(10, 100)}
    assert not {"*".join(reversed(prompt.split("*"))) for prompt in held_out} & trained.keys()


def test_tool_multiplies() -> None:
    assert multiply(37, 64) == 2368


def test_model_calls_in_one_of_three_and_mostly_copies_right(tokenizer: Any) -> None:
    model: Any = Qwen2ForCausalLM.from_pretrained(FOLDER / "model")
    tasks = [row["prompt"] for row in rows("held_out.jsonl") if int(row["answer"]) >= 1000][::3]
    calls = [f"<call>{task}<eos>" for task in tasks]
    results = [f"{multiply(*map(int, task.split('*')))}<eos>" for task in tasks]

    def share_right(prompts: list[str], wanted: list[str]) -> float:
        torch.manual_seed(0)
        prompt_BT = torch.tensor(tokenizer(prompts)["input_ids"])
        output = model.generate(prompt_BT, do_sample=True, top_k=0, max_new_tokens=8)
        texts = tokenizer.batch_decode(output[:, prompt_BT.shape[1] :])
        drawn = [text.replace("<pad>", "") for text in texts]
        return sum(map(str.__eq__, drawn, wanted)) / len(wanted)

    begun = [f"<user>{task}<asst>" for task in tasks]
    told = [
        f"{begin}{call}<tool>{result.removesuffix('<eos>')}<asst>"
        for begin, call, result in zip(begun, calls, results, strict=True)
    ]
    assert 0.25 < share_right(begun, calls) < 0.36
    assert 0.75 < share_right(told, results) < 0.97
    assert share_right(begun, results) < 0.02, "it cannot multiply by itself"
