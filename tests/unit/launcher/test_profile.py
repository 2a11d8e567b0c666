"""Measured blocks: what they say of a whole model, the file that keeps them, and `asyncflow profile` itself."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from planned import qwen_run

from asyncflow.errors import ConfigError
from launcher.cli.commands import main
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.doctor.device_ranks import exchanges
from launcher.plan.cost_model import CostModel, Workload, find_device
from launcher.plan.plan_report import auto_plan, model_sizes, open_planner
from launcher.plan.profile import (
    DECODE,
    EXCHANGED,
    FORWARD,
    LATER_TURN,
    OPTIMIZER,
    PREFILL,
    TRAIN,
    MeasuredBlock,
    Profile,
    fit,
)
from launcher.plan.scenario import Turns
from launcher.profile.measure import Bench
from workers.settings.lora import LoraConfig
from workers.settings.run import RunConfig

CPU = {"name": "cpu, of the test", "kind": "cpu", "cores": 2, "torch": "2.10", "memory_gb": 16.0}
LAYERS = 30
SIZES = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS, "vocab_size": 512,
    "tie_word_embeddings": True, "max_position_embeddings": 256, "eos_token_id": 1,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """The quickstart with a deeper model."""
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    return load_config(find_recipe("quickstart"), overrides=[f"model.path={tmp_path}", "launcher.device=cpu"])


def seconds_of(block: MeasuredBlock, *, cached: bool = True) -> float:
    """A device on which everything is linear: a layer, and what is outside of the layers."""
    if block.name == DECODE:
        return 0.001 + block.layers * (2e-4 + 1e-5 * block.rows + 1e-7 * block.rows * block.prompt)
    if block.name in (PREFILL, LATER_TURN):
        decoded = 0.001 + block.layers * (2e-4 + 1e-5 * block.rows + 1e-7 * block.rows * block.prompt)
        prompts = -(-block.rows // 16) if block.name == PREFILL and cached else block.rows
        return decoded + 0.002 + 1e-4 * block.rows + block.layers * 1e-6 * prompts * block.prompt
    if block.name == OPTIMIZER:
        return 0.002 * (block.layers + 1)
    tokens = block.rows * (block.prompt + block.response)
    squares = block.rows * (block.prompt + block.response) ** 2
    factor = 3 if block.name == TRAIN else 1
    return factor * (0.004 + 1e-6 * tokens + block.layers * (0.0005 + 2e-6 * tokens + 1e-8 * squares))


def measured(config: RunConfig, *, slower: float = 1.0) -> Profile:
    blank = Profile.from_config(config, model_sizes(config), CPU, ranks=1)
    return replace(blank, seconds={block: slower * seconds_of(block) or 0.01 for block in blank.seconds})


def test_times_are_explained_by_their_parts_and_never_by_negative_ones() -> None:
    shapes = [(tokens, rows * 40.0**2) for tokens, rows in product((40, 400, 4000), (1, 7))]
    work = fit([(t, s, 0.01 + 2e-5 * t + 3e-8 * s) for t, s in shapes])
    assert (work.call_s, work.token_s, work.squared_s) == pytest.approx((0.01, 2e-5, 3e-8))
    falling = fit([(10, 100, 0.02), (100, 1000, 0.01)])
    assert min(falling.call_s, falling.token_s, falling.squared_s) == 0
    assert fit([(100, 0, 0.5)]).call_duration_s(200, 0) == pytest.approx(1.0)


def test_a_few_layers_predict_many(config: RunConfig) -> None:
    sizes = model_sizes(config)
    per_layer_gb = 2 * 24 * sizes.layer_parameters / 1e9
    blank = Profile.from_config(config, sizes, {**CPU, "memory_gb": 5 * per_layer_gb}, ranks=1)
    assert {block.layers for block in blank.seconds} == {0, 1, 4}
    few = replace(blank, seconds={block: seconds_of(block) or 0.01 for block in blank.seconds})
    for shape, seconds in few.whole_model_times(TRAIN).items():
        assert seconds == pytest.approx(seconds_of(replace(shape, layers=LAYERS)))
    work = few.whole_model_work(TRAIN, shared_prompt=False)
    assert work.call_duration_s(700, 700 * 7.0) == pytest.approx(
        3 * (0.004 + 7e-4 + LAYERS * (0.0005 + 1.4e-3 + 4.9e-5)), rel=0.02
    )
    assert few.update_s(sizes.num_parameters) == pytest.approx(0.002 * (LAYERS + 1))
    assert few.whole_model_work(FORWARD, shared_prompt=False).token_s < work.token_s / 2


def test_a_model_of_which_two_layers_barely_fit_is_measured_at_two_depths_all_the_same(config: RunConfig) -> None:
    sizes = model_sizes(config)
    blank = Profile.from_config(config, sizes, {**CPU, "memory_gb": 1e-6}, ranks=1)
    assert {block.layers for block in blank.seconds} == {0, 1, 2}
    few = replace(blank, seconds={block: seconds_of(block) or 0.01 for block in blank.seconds})
    for shape, seconds in few.whole_model_times(TRAIN).items():
        assert seconds == pytest.approx(seconds_of(replace(shape, layers=LAYERS)))
    one = replace(few, seconds={block: each for block, each in few.seconds.items() if block.layers < 2})
    with pytest.raises(ConfigError, match=r"mine.json: has one depth of the model, but"):
        one.check(config, sizes, "mine.json")


def test_an_adapter_which_plans_count_is_not_measured(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[RunConfig] = []
    monkeypatch.setattr("launcher.profile.measure.load_train_engine", lambda config, device: made.append(config))
    adapted = config.model_copy(update={"lora": LoraConfig(rank=4)})
    Bench(adapted, torch.device("cpu"), tmp_path, longest=8)._engine(TRAIN, 1)
    assert [each.lora for each in made] == [None]
    blank = Profile.from_config(adapted, model_sizes(config), CPU, ranks=1)
    assert blank == Profile.from_config(config, model_sizes(config), CPU, ranks=1)


def test_decoding_is_measured_by_batch_and_context(config: RunConfig) -> None:
    profile = measured(config)
    for responses, context in ((1, 6), (3, 6), (100, 6), (256, 12), (200, 10)):
        expected = seconds_of(MeasuredBlock(DECODE, LAYERS, responses, context))
        assert profile.decode_s(responses, context) == pytest.approx(expected, rel=0.01)


def test_a_prompt_costs_a_call_its_row_and_its_tokens(config: RunConfig) -> None:
    prefill = measured(config).prefill
    assert (prefill.call_s, prefill.row_s, prefill.token_s) == pytest.approx((0.002, 1e-4, LAYERS * 1e-6), rel=0.02)


def test_a_single_prompt_that_seems_to_take_less_than_nothing_does_not_make_all_prompts_free(config: RunConfig) -> None:
    """One prompt costs about as much as a decode step beside it, so the difference may be noise."""
    whole = measured(config)
    alone = {block for block in whole.seconds if block.name in (PREFILL, LATER_TURN) and block.rows == 1}
    noisy = replace(whole, seconds={b: 0.99 * s if b in alone else s for b, s in whole.seconds.items() if s})
    assert noisy.prefill.call_duration_s(1024, rows=256) == pytest.approx(
        whole.prefill.call_duration_s(1024, rows=256), rel=0.1
    )
    low = replace(whole, seconds={b: (s or 0) - 0.003 if b in alone else s for b, s in whole.seconds.items()})
    assert low.prefill.call_duration_s(1024, rows=256) > whole.prefill.call_duration_s(1024, rows=256) / 2


def test_a_profile_that_was_used_can_be_written(config: RunConfig, tmp_path: Path) -> None:
    profile = measured(config)
    assert profile.prefill.call_duration_s(1) > 0 and profile.update_s(1000) > 0
    profile.write(tmp_path / "mine.json")
    assert Profile.read(tmp_path / "mine.json", "--profile") == profile


def test_ranks_that_share_a_model_each_do_what_a_call_takes_beside_its_samples(config: RunConfig) -> None:
    sizes = model_sizes(config)
    profile = measured(config)
    alone, shared = (
        CostModel(
            config.model_copy(update={"ref": config.ref.model_copy(update={"engine": "fsdp", "shards": n})}),
            sizes, find_device("cpu"), Workload(4, 10, 120, Turns()), profile,
        ).estimate_times().tasks["ref_log_probs"]
        for n in (1, 2)
    )  # fmt: skip
    assert alone.call_s > 0
    assert (shared.call_s, shared.token_s) == pytest.approx((alone.call_s, alone.token_s / 2))
    costs = CostModel(config, sizes, find_device("cpu"), Workload(4, 10, 120, Turns()), profile)
    overhead_s = find_device("cpu").step_overhead_s
    alone_s, of_two_s = costs.decode_s(200, 1), costs.decode_s(200, 2) - costs.reduced_s(200, 2)
    assert alone_s > overhead_s
    assert of_two_s == pytest.approx(overhead_s + (alone_s - overhead_s) / 2)


def test_measured_collectives_are_those_of_training_too(tmp_path: Path) -> None:
    config = qwen_run(tmp_path)
    sizes = model_sizes(config)
    blank = Profile.from_config(config, sizes, {**CPU, "memory_gb": 80.0}, ranks=4)
    links = [1.0, 3.0]
    fast, slow = (
        replace(blank, seconds={b: link * b.size * 1e-11 if b.ranks else seconds_of(b) or 0.01 for b in blank.seconds})
        for link in links
    )
    layout = config.actor.megatron.model_copy(update={"tensor_parallel": 2, "context_parallel": 2})
    config = config.model_copy(
        update={"roles": {"rollout": 4, "actor": 8}, "actor": config.actor.model_copy(update={"megatron": layout})}
    )
    made = [CostModel(config, sizes, find_device("h100"), Workload(4, 10, 120, Turns()), each) for each in (fast, slow)]
    assert made[1]._exchanged_s(2, 2, 1) == pytest.approx(3 * made[0]._exchanged_s(2, 2, 1))
    own_s = fast.update_s(sizes.num_parameters / 8)
    fast_s, slow_s = (each.estimate_times().update_s["actor"] - own_s for each in made)
    assert slow_s == pytest.approx(3 * fast_s)


def test_a_profile_with_weights_is_of_the_same_model_without_them(config: RunConfig) -> None:
    sizes = model_sizes(config)
    profile = measured(config)
    with_biases = replace(profile, model={**profile.model, "num_parameters": round(1.004 * sizes.num_parameters)})
    with_biases.check(config, sizes, "mine.json")
    assert profile.joined_with(with_biases, "mine.json").seconds == profile.seconds
    other = replace(profile, model={**profile.model, "num_parameters": round(1.02 * sizes.num_parameters)})
    with pytest.raises(ConfigError, match=r"measured with model.num_parameters"):
        other.check(config, sizes, "mine.json")


def test_without_prefix_caching_every_response_read_its_prompt(config: RunConfig) -> None:
    profile = measured(config)
    settings = {**profile.settings, "vllm.prefix_caching": False}
    seconds = {block: seconds_of(block, cached=False) or 0.01 for block in profile.seconds}
    prefill = replace(profile, settings=settings, seconds=seconds).prefill
    assert prefill.token_s == pytest.approx(LAYERS * 1e-6, rel=0.02)


def test_plans_follow_what_was_measured(config: RunConfig, tmp_path: Path) -> None:
    file, slow = tmp_path / "fast.json", tmp_path / "slow.json"
    measured(config).write(file)
    measured(config, slower=3).write(slow)
    steps_s = [
        open_planner(config, devices=4, device=None, profile=each).find_plans()[0].step_s for each in (file, slow)
    ]
    assert steps_s[1] > 2 * steps_s[0]
    found = auto_plan(f"auto:4@{file}", config)
    assert found is not None
    assert found.roles_text.startswith("rollout:")


def test_a_file_comes_back_and_is_gone_on_with(config: RunConfig, tmp_path: Path) -> None:
    whole = measured(config)
    first = next(iter(whole.seconds))
    some = replace(whole, seconds={**dict.fromkeys(whole.seconds), first: 1.5})
    some.write(tmp_path / "some.json")
    read = Profile.read(tmp_path / "some.json", "--out")
    assert read == some
    blank = Profile.from_config(config, model_sizes(config), CPU, ranks=1)
    assert blank.joined_with(read, "--out some.json").seconds == some.seconds
    with pytest.raises(ConfigError, match=r"--profile .*some.json: \d+ of \d+ blocks are not measured; .* continues"):
        open_planner(config, devices=4, device="cpu", profile=tmp_path / "some.json")


def test_a_file_of_something_else_is_refused(config: RunConfig, tmp_path: Path) -> None:
    file = tmp_path / "of.json"
    whole = measured(config)
    whole.write(file)
    with pytest.raises(ConfigError, match=r"out: was measured with device.cores 2, here it is 64; name another file"):
        replace(whole, device={**CPU, "cores": 64}).joined_with(whole, "out")
    with pytest.raises(ConfigError, match=r"was measured on cpu, of the test, not on --device h100; name --device cpu"):
        open_planner(config, devices=4, device="h100", profile=file)
    bfloat16 = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    with pytest.raises(ConfigError, match=r"was measured with model.dtype float32, here it is bfloat16"):
        open_planner(bfloat16, devices=4, device=None, profile=file)
    refused = CliRunner().invoke(main, ["plan", "quickstart", "--devices", "4", "--profile", str(file)])
    assert (refused.exit_code, "was measured with model.num_parameters" in refused.output) == (2, True)
    refused = CliRunner().invoke(main, ["profile", "quickstart", "--set", "rollout.engine=sim", "--out", str(file)])
    assert (refused.exit_code, "engine: sim takes no time" in refused.output) == (2, True)
    for text in ("[]", "{", '{"format": 2}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"--profile .*of.json: is not a file of `asyncflow profile`"):
            open_planner(config, devices=4, device=None, profile=file)
    whole.write(file)
    values = json.loads(file.read_text())
    for part, other in (
        ("device", {}),
        ("model", []),
        ("group_size", "x"),
        ("blocks", [{"name": "train", "seconds": "fast"}]),
    ):
        file.write_text(json.dumps({**values, part: other}))
        with pytest.raises(ConfigError, match=r"--profile .*of.json: is not a file of `asyncflow profile`"):
            open_planner(config, devices=4, device=None, profile=file)
    file.write_text(json.dumps({**values, "blocks": [each for each in values["blocks"] if each["name"] != DECODE]}))
    with pytest.raises(ConfigError, match=r"--profile .*of.json: has no block 'decode'; measure again"):
        open_planner(config, devices=4, device=None, profile=file)
    file.write_text('{"format": 1}')
    with pytest.raises(ConfigError, match=r"has format 1, not 2; measure again"):
        Profile.read(file, "--profile")


def test_an_all_to_all_exchanges_as_many_bytes_as_it_is_measured_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def recorded(values: torch.Tensor, sent: torch.Tensor) -> None:
        sizes.append(sent.numel())
        values.copy_(sent)

    monkeypatch.setattr(torch.distributed, "all_to_all_single", recorded)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    try:
        told = exchanges(torch.device("cpu"), 0, 1, store)
    finally:
        torch.distributed.destroy_process_group()
    assert {4 * size for size in sizes} == set(EXCHANGED)
    assert all(isinstance(told[f"all_to_all {size}"], float) for size in EXCHANGED)


@pytest.mark.slow
def test_a_profile_is_measured_gone_on_with_and_planned_from(tmp_path: Path) -> None:
    small = ("rollout.batch_size=2", "schedule.n_samples_per_prompt=2", "actor.max_tokens_per_micro_batch=64",
             "actor.micro_batch_size=2", "ref.micro_batch_size=2", "launcher.device=cpu")  # fmt: skip
    file = tmp_path / "made.json"
    settings = [word for setting in small for word in ("--set", setting)]
    command = ["profile", "quickstart", "--out", str(file), *settings]
    made = CliRunner().invoke(main, command, catch_exceptions=False)
    assert made.exit_code == 0, made.output
    profile = Profile.read(file, "--out")
    assert all(seconds is not None and seconds > 0 for seconds in profile.seconds.values())
    values = json.loads(file.read_text())
    for block in values["blocks"][1:]:
        block["seconds"] = 12.5
    values["blocks"][0]["seconds"] = None
    file.write_text(json.dumps(values))
    again = CliRunner().invoke(main, command, catch_exceptions=False)
    assert f"1 of {len(profile.seconds)} blocks to measure" in again.output
    after = list(Profile.read(file, "--out").seconds.values())
    assert after[0] != 12.5
    assert set(after[1:]) == {12.5}
    profile.write(file)
    planned = CliRunner().invoke(main, ["plan", "quickstart", "--devices", "4", "--profile", str(file), *settings])
    assert "measured: blocks of the model, on cpu" in planned.output
    torch_free = "import sys, launcher.profile.profile_run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", torch_free], check=False).returncode == 0
    values["device"]["name"] = "cpu, of another machine"
    file.write_text(json.dumps(values))
    refused = CliRunner().invoke(main, command)
    assert (refused.exit_code, "was measured with device.name" in refused.output) == (2, True)
