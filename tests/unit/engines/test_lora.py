"""Adapters in a process group of one, against a float64 LoRA written by hand; several ranks are in tests/multiproc."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

from asyncflow.errors import CheckpointError, ConfigError
from asyncflow.testing.plain import decay_groups
from workers.engines.fsdp.sharding import FsdpEngine, mixed_precision
from workers.engines.hf.adapter import Adapter
from workers.engines.hf.model import decoder_layers, empty_causal_lm, materialize
from workers.engines.hf.weights import HfWeights
from workers.engines.lora import (
    PREFIX,
    A,
    B,
    adapter_shapes,
    adapter_targets,
    check_adapter,
    initial_a,
    merge,
    read_adapter,
    write_adapter,
)
from workers.engines.packed_attention import PACKED_ATTENTION
from workers.engines.packed_forward import PackedInputs, response_log_probs
from workers.rows.packed_rows import Sequences
from workers.settings.engines import ActorConfig
from workers.settings.lora import LoraConfig

pytestmark = pytest.mark.usefixtures("single_rank")
CPU = torch.device("cpu")
LORA = {"rank": 4, "alpha": 6.0}


def make_engine(path: Path, *, merged: bool = False, lora: dict[str, object] = LORA, **actor: object) -> FsdpEngine:
    config = ActorConfig.model_validate({"lr": 1e-2, "eps": 0.05, "weight_decay": 0.1, "grad_clip": 0.5} | actor)
    return FsdpEngine(
        path,
        actor=config,
        temperature=0.9,
        device=CPU,
        seed=0,
        lora=LoraConfig.model_validate(lora),
        merged=merged,
    )


def square_loss(log_probs: Tensor, _entropy: Tensor) -> Tensor:
    return (log_probs + 1).square().sum()


def values(engine: FsdpEngine) -> dict[str, Tensor]:
    return {shard.name: shard.values.reshape(shard.box.size).clone() for shard in engine.shards()}


def train(engine: FsdpEngine, batch: Sequences, updates: int = 2) -> None:
    for _ in range(updates):
        engine.forward_backward(batch, square_loss)
        engine.step(1 / 16)


class Change(nn.Module):
    """W + scaling x B A, as a parametrization of W."""

    def __init__(self, a: Tensor, b: Tensor, scaling: float) -> None:
        super().__init__()
        self.a, self.b, self.scaling = nn.Parameter(a), nn.Parameter(b), scaling

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scaling * (self.b @ self.a)


def by_hand(path: Path, adapter: dict[str, Tensor], scaling: float) -> nn.Module:
    """Return the model in float64, frozen, with a `Change` for each pair of an adapter."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation=PACKED_ATTENTION
    )
    model.requires_grad_(False)
    for name in [name for name in adapter if name.endswith(A)]:
        module = name.removeprefix(PREFIX).removesuffix(A)
        pair = (adapter[PREFIX + module + end].double() for end in (A, B))
        parametrize.register_parametrization(model.get_submodule(module), "weight", Change(*pair, scaling))
    return model


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_updates_equal_a_float64_adapter_written_by_hand(
    make_model_dir: Callable[..., Path], batch: Sequences, groups: Sequences, family: str, packed: bool
) -> None:
    """Loss, gradients and AdamW's updates; with prompts that samples share, and without."""
    path, batch = make_model_dir(family), groups if packed else batch
    engine = make_engine(path, shared_prompt=packed)
    plain = by_hand(path, values(engine), 6 / 4)
    trained = {name: value for name, value in plain.named_parameters() if value.requires_grad}
    optimizer = torch.optim.AdamW(decay_groups(plain, 0.1), lr=1e-2, eps=0.05)
    inputs = PackedInputs.from_batch(batch, CPU)
    losses: list[Tensor] = []
    for _ in range(3):
        engine.forward_backward(batch, lambda given, _: losses.append(square_loss(given, given)) or losses[-1])
        expected = square_loss(response_log_probs(plain, inputs, 0.9)[0], inputs.targets_A)
        (expected / 16).backward()
        assert float(losses[-1].detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
        gradients = {name: value.grad for name, value in engine._model.named_parameters()}
        for name, value in trained.items():
            own = name.replace(".parametrizations.weight.0.a", A).replace(".parametrizations.weight.0.b", B)
            torch.testing.assert_close(gradients.pop(own).double() / 16, value.grad, rtol=1e-3, atol=2e-6)
        assert set(gradients.values()) == {None}, "the base gets no gradient"
        stats = engine.step(1 / 16)
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), 0.5)
        assert stats.grad_norm == pytest.approx(float(norm), rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    found = values(engine)
    assert len(found) == len(trained) == 2 * 2 * 7
    for name, value in trained.items():
        own = name.replace(".parametrizations.weight.0.a", A).replace(".parametrizations.weight.0.b", B)
        torch.testing.assert_close(found[PREFIX + own].double(), value.detach(), rtol=1e-4, atol=1e-6)


def test_base_stays_as_it_was_and_is_the_reference(model_dir: Path, batch: Sequences) -> None:
    engine, base = make_engine(model_dir, merged=True), load_file(model_dir / "model.safetensors")
    reference = engine.open_copy(initial=True)
    before = engine.log_probs(batch)
    assert before.equal(reference.log_probs(batch)), "B is 0: the policy is the base"
    train(engine, batch)
    assert reference.log_probs(batch).equal(before)
    assert not engine.log_probs(batch).equal(before)
    merged = values(engine)
    assert merged.keys() == base.keys()
    for name, value in base.items():
        assert dict(engine._model.named_parameters())[name].equal(value)
        assert merged[name].equal(value) == ("_proj.weight" not in name)


@pytest.mark.parametrize("autocast", ["float32", "bfloat16"])
def test_merged_weights_compute_what_the_adapter_does(model_dir: Path, batch: Sequences, autocast: str) -> None:
    engine = make_engine(model_dir, merged=True, autocast=autocast)
    train(engine, batch)
    model = empty_causal_lm(model_dir, dtype=torch.float32, attention=PACKED_ATTENTION)
    materialize(model, CPU)
    with torch.no_grad():
        for name, value in values(engine).items():
            model.get_parameter(name).copy_(value)
    found, _ = response_log_probs(model, PackedInputs.from_batch(batch, CPU), 0.9)
    torch.testing.assert_close(found, engine.log_probs(batch), rtol=0, atol=1e-4 if autocast == "float32" else 0.15)


def test_one_rank_computes_in_bfloat16_what_fsdp2_does(model_dir: Path, batch: Sequences) -> None:
    """Beside a float32 adapter, the base is in bfloat16 on both ways."""
    engine = make_engine(model_dir, autocast="bfloat16")
    kinds = {(p.requires_grad, p.dtype) for p in engine._model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    model = empty_causal_lm(model_dir, dtype=torch.bfloat16, attention=PACKED_ATTENTION)
    adapter = Adapter(model, LoraConfig.model_validate(LORA))
    mesh, policy = init_device_mesh("cpu", (1,)), mixed_precision(ActorConfig(autocast="bfloat16"))
    for module in (*decoder_layers(model), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    materialize(model, CPU)
    weights = HfWeights(model_dir)
    for name, parameter in model.named_parameters():
        if adapter.is_base(name):
            with torch.no_grad():
                parameter.to_local().copy_(weights.read_whole(name))
    adapter.fill(seed=0)
    for _ in range(2):
        engine.forward_backward(batch, square_loss)
        log_probs, _ = response_log_probs(model, PackedInputs.from_batch(batch, CPU), 0.9)
        square_loss(log_probs, log_probs).backward()
    for name, parameter in engine._model.named_parameters():
        other = model.get_parameter(name).grad
        assert (parameter.grad is None) == (other is None), name
        if other is not None:
            torch.testing.assert_close(parameter.grad, other.to_local(), rtol=1e-6, atol=1e-7)


def test_recomputed_activations_change_no_gradient_not_even_with_dropout(model_dir: Path, batch: Sequences) -> None:
    norms = []
    for recomputes in (False, True):
        engine = make_engine(model_dir, lora=LORA | {"dropout": 0.3}, gradient_checkpointing=recomputes)
        train(engine, batch, 1)
        engine.forward_backward(batch, square_loss)
        norms.append(engine.step(1.0).grad_norm)
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_dropout_is_for_passes_with_gradient_alone(model_dir: Path, batch: Sequences) -> None:
    engine = make_engine(model_dir, lora=LORA | {"dropout": 0.5})
    train(engine, batch)
    found = engine.log_probs(batch)
    assert engine.log_probs(batch).equal(found)
    seen: list[Tensor] = []
    for _ in range(2):
        engine.forward_backward(batch, lambda given, _: seen.append(given.detach()) or given.sum())
    assert not seen[0].equal(seen[1]) and not seen[0].equal(found)


def test_state_holds_the_adapter_alone_and_resumes_bit_for_bit(
    model_dir: Path, batch: Sequences, tmp_path: Path
) -> None:
    lora = LORA | {"dropout": 0.3}
    engine = make_engine(model_dir, lora=lora)
    train(engine, batch)
    state = engine.state_dict()
    trained = {name.removeprefix(PREFIX) for name in values(engine)}
    assert state["model"].keys() == state["optimizer"]["state"].keys() == trained
    dcp.save(state, checkpoint_id=tmp_path / "saved")
    random, losses = torch.get_rng_state(), []

    def go_on(one: FsdpEngine) -> None:
        torch.set_rng_state(random)  # a checkpoint holds it
        for _ in range(2):
            one.forward_backward(batch, lambda given, _: losses.append(square_loss(given, given)) or losses[-1])
            one.step(1 / 16)

    resumed = make_engine(model_dir, lora=lora)
    loaded = resumed.state_dict()
    dcp.load(loaded, checkpoint_id=tmp_path / "saved")
    resumed.load_state_dict(loaded)
    assert resumed.optimizer_updates == 2
    go_on(engine)
    go_on(resumed)
    assert losses[0].equal(losses[2]) and losses[1].equal(losses[3]) and not losses[0].equal(losses[1])
    for name, value in values(engine).items():
        assert value.equal(values(resumed)[name])


def test_merged_weights_follow_a_resumed_state(model_dir: Path, batch: Sequences) -> None:
    engine, resumed = make_engine(model_dir, merged=True), make_engine(model_dir, merged=True)
    train(engine, batch)
    resumed.load_state_dict(deepcopy(engine.state_dict()))
    for name, value in values(engine).items():
        assert value.equal(values(resumed)[name]), name


def test_export_is_the_merged_model_and_the_adapter(model_dir: Path, batch: Sequences, tmp_path: Path) -> None:
    engine = make_engine(model_dir)
    train(engine, batch)
    dcp.save(engine.state_dict(), checkpoint_id=tmp_path / "saved")
    engine.export_hf(tmp_path / "hf", tmp_path / "saved")
    adapter = load_file(tmp_path / "hf/adapter/adapter_model.safetensors")
    for name, value in values(engine).items():
        assert adapter.pop(name).equal(value)
    assert not adapter
    base, merged = (load_file(path / "model.safetensors") for path in (model_dir, tmp_path / "hf"))
    assert merged.keys() == base.keys()
    for name, value in values(make_merged(engine)).items():
        assert merged[name].equal(value), name
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")  # its `adapter/` is not taken for the model
    config = json.loads((tmp_path / "hf/adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 6, "LORA")
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def make_merged(engine: FsdpEngine) -> FsdpEngine:
    """Return the engine, delivering whole weights from now on."""
    engine._merged = True
    engine._mark_changed()
    return engine


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's, of transformers
def test_adapter_loads_in_peft_and_peft_s_in_ours(model_dir: Path, batch: Sequences, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    engine = make_engine(model_dir, lora=LORA | {"targets": ["q_proj", "down_proj"], "use_rslora": True})
    train(engine, batch)
    dcp.save(engine.state_dict(), checkpoint_id=tmp_path / "saved")
    engine.export_hf(tmp_path / "hf", tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation=PACKED_ATTENTION)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "hf/adapter")
    found, _ = response_log_probs(theirs.base_model.model, PackedInputs.from_batch(batch, CPU), 0.9)
    torch.testing.assert_close(found, engine.log_probs(batch), rtol=0, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    lora = LORA | {"targets": ["q_proj", "down_proj"], "use_rslora": True, "path": str(tmp_path / "theirs")}
    again = values(make_engine(model_dir, lora=lora))
    for name, value in values(engine).items():
        assert again[name].equal(value)


def test_modules_to_save_are_trained_whole(model_dir: Path, batch: Sequences, tmp_path: Path) -> None:
    lora = LORA | {"targets": ["q_proj"], "modules_to_save": ["norm", "lm_head"]}
    engine, base = make_engine(model_dir, lora=lora, merged=True), load_file(model_dir / "model.safetensors")
    reference = engine.open_copy(initial=True)
    before = engine.log_probs(batch)
    train(engine, batch)
    changed = {name for name, value in values(engine).items() if not value.equal(base[name])}
    assert changed == {"model.norm.weight", "lm_head.weight"} | {name for name in base if "q_proj.weight" in name}
    assert reference.log_probs(batch).equal(before), "a copy: the base itself has changed"
    dcp.save(engine.state_dict(), checkpoint_id=tmp_path / "saved")
    engine.export_hf(tmp_path / "hf", tmp_path / "saved")
    for name, value in load_file(tmp_path / "hf/model.safetensors").items():
        assert value.equal(values(engine)[name])
    assert PREFIX + "lm_head.weight" in load_file(tmp_path / "hf/adapter/adapter_model.safetensors")


def test_state_of_another_adapter_is_refused(model_dir: Path, batch: Sequences, tmp_path: Path) -> None:
    engine = make_engine(model_dir, lora={"rank": 2, "targets": ["q_proj"]})
    dcp.save(engine.state_dict(), checkpoint_id=tmp_path / "saved")
    with pytest.raises(CheckpointError, match="k_proj.lora_A.weight"):
        make_engine(model_dir, lora={"rank": 2}).export_hf(tmp_path / "hf", tmp_path / "saved")
    state = make_engine(model_dir, lora={"rank": 2}).state_dict()
    with pytest.raises(dcp.CheckpointException, match="k_proj.lora_A"):
        dcp.load(state, checkpoint_id=tmp_path / "saved")


SHAPES = {
    "model.embed_tokens.weight": (13, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.q_proj.bias": (8,),
    "model.layers.0.mlp.up_proj.weight": (16, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.norm.weight": (8,),
    "lm_head.weight": (13, 8),
}


def test_targets_are_linear_layers_of_decoder_layers() -> None:
    q, up = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
    assert adapter_targets(SHAPES, LoraConfig(rank=2)) == {q: (8, 8), up: (16, 8)}
    assert adapter_targets(SHAPES, LoraConfig(rank=2, targets=("up_proj",))) == {up: (16, 8)}
    assert adapter_targets(SHAPES, LoraConfig(rank=2, targets=("self_attn.q_proj",))) == {q: (8, 8)}
    saved = LoraConfig(rank=2, modules_to_save=("mlp",))
    assert adapter_targets(SHAPES, saved) == {q: (8, 8)}
    assert adapter_shapes({up: (16, 8)}, 2) == {PREFIX + up + A: (2, 8), PREFIX + up + B: (16, 2)}


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"targets": ["proj"]}, "no such module; it has q_proj up_proj"),
        ({"targets": ["lm_head"]}, "lm_head is no linear layer of a decoder layer"),
        ({"targets": ["q_proj"], "modules_to_save": ["self_attn"]}, "no linear layer is left"),
        ({"modules_to_save": ["head"]}, "has no module 'head'"),
    ],
)
def test_targets_that_a_model_lacks_are_refused(lora: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adapter_targets(SHAPES, LoraConfig.model_validate({"rank": 2} | lora))


def test_initial_values_depend_on_name_and_seed_alone() -> None:
    lora = LoraConfig(rank=4)
    one = initial_a("x", (4, 64), lora, seed=0)
    assert one.equal(initial_a("x", (4, 64), lora, seed=0))
    assert not one.equal(initial_a("y", (4, 64), lora, seed=0))
    assert not one.equal(initial_a("x", (4, 64), lora, seed=1))
    assert 0.9 / 8 < float(one.abs().max()) <= 1 / 8
    normal = initial_a("x", (4, 4096), LoraConfig(rank=4, init="gaussian"), seed=0)
    assert float(normal.std()) == pytest.approx(1 / 4, rel=0.05)


def test_merging_is_exact_in_float32_and_casts_once() -> None:
    weight = torch.tensor([[1.0]], dtype=torch.bfloat16)
    merged = merge(weight, torch.tensor([[2.0**-12]]), torch.tensor([[1.0]]), 1.0)
    assert merged.dtype == torch.float32 and float(merged) == 1 + 2.0**-12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 8}, r"has r 8, but lora.rank is 2"),
        ({"lora_alpha": 16}, r"has lora_alpha 16, but lora.alpha is 2"),
        ({"use_dora": True}, "has use_dora, which is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights pissa, which rewrites the base"),
        ({"bias": "all"}, "trains biases"),
        ({"kasa_config": {"beta": 1e-4}}, "has kasa_config, which is not supported"),
        ({"peft_type": "IA3"}, "is a IA3 adapter"),
    ],
)
def test_adapter_that_is_no_plain_lora_of_these_settings_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    lora, targets = LoraConfig(rank=2), {"model.layers.0.mlp.up_proj": (16, 8)}
    tensors = {name: torch.randn(shape) for name, shape in adapter_shapes(targets, 2).items()}
    write_adapter(tmp_path, tensors, lora, targets, base="base")
    for name, value in read_adapter(tmp_path, lora, targets).items():
        assert value.equal(tensors[name])
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        check_adapter(tmp_path, lora, targets)


def test_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    lora, targets = LoraConfig(rank=2), {"model.layers.0.mlp.up_proj": (16, 8)}
    tensors = {name: torch.randn(shape) for name, shape in adapter_shapes(targets, 2).items()}
    write_adapter(tmp_path, tensors, lora, targets, base="base")
    with pytest.raises(ConfigError, match=r"lora_B.weight has shape \(16, 2\), but the model asks for \(12, 2\)"):
        check_adapter(tmp_path, lora, {"model.layers.0.mlp.up_proj": (12, 8)})
    save_file({"other": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="it lacks base_model.* and also has other; set them to"):
        check_adapter(tmp_path, lora, targets)
    with pytest.raises(ConfigError, match="cannot be read as an adapter"):
        check_adapter(tmp_path / "nowhere", lora, targets)


def test_damaged_adapter_is_refused(tmp_path: Path) -> None:
    lora, targets = LoraConfig(rank=2), {"model.layers.0.mlp.up_proj": (16, 8)}
    tensors = {name: torch.ones(shape, dtype=torch.int32) for name, shape in adapter_shapes(targets, 2).items()}
    write_adapter(tmp_path, tensors, lora, targets, base="base")
    with pytest.raises(ConfigError, match="lora_A.weight has elements of type I32; name an adapter of floats"):
        check_adapter(tmp_path, lora, targets)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="^lora.path: .*safetensors is not a complete safetensors file"):
        check_adapter(tmp_path, lora, targets)
    weights.unlink()
    with pytest.raises(ConfigError, match="has no adapter_model.safetensors; name a directory in which peft saved"):
        check_adapter(tmp_path, lora, targets)
    with pytest.raises(ConfigError, match="has r 2, but lora.rank is 4"):
        check_adapter(tmp_path, LoraConfig(rank=4), targets)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"cannot be read as an adapter \(adapter_config.json holds no settings\)"):
        check_adapter(tmp_path, lora, targets)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_adapter_with_a_number_that_is_not_finite_is_refused(tmp_path: Path, dtype: torch.dtype, number: float) -> None:
    lora, targets = LoraConfig(rank=2), {"model.layers.0.mlp.up_proj": (16, 8)}
    largest = torch.finfo(dtype).max
    tensors = {name: torch.full(shape, largest, dtype=dtype) for name, shape in adapter_shapes(targets, 2).items()}
    write_adapter(tmp_path, tensors, lora, targets, base="base")
    check_adapter(tmp_path, lora, targets)
    tensors[PREFIX + "model.layers.0.mlp.up_proj" + B][-1, -1] = number
    write_adapter(tmp_path, tensors, lora, targets, base="base")
    with pytest.raises(
        ConfigError, match=r"^lora.path: .*up_proj.lora_B.weight has numbers that are not finite; name "
    ):
        check_adapter(tmp_path, lora, targets)
