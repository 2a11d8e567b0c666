"""The `megatron` engine on Gloo ranks, however the model is divided, against float64 references of transformers.

References: one sample at a time, no packing, no shared prompt, torch's AdamW and clipping, in float64.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils import parametrize
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from asyncflow.testing.plain import decay_groups
from launcher.run.export import write_export
from weightsync.plan import Box, ShardSpec, plan_transfer
from workers.engines.device_memory import ModelSizes, megatron_memory
from workers.engines.lora import (
    PREFIX,
    A,
    B,
    adapter_shapes,
    adapter_targets,
    initial_a,
    write_adapter,
)
from workers.settings.engines import ActorConfig
from workers.settings.lora import LoraConfig

from .samples import NUM_SAMPLES, TEMPERATURE, make_sample

pytestmark = pytest.mark.timeout(900)  # of the fixture: alone on two cores it takes half a minute
FILE, ADAPTER_FILE = "model.safetensors", "adapter/adapter_model.safetensors"
SCRIPT = Path(__file__).with_name("megatron_ranks.py")
DEADLINE_S = 800
SIZES: dict[str, Any] = {
    "vocab_size": 13, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "bos_token_id": None,
    "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
"""13 tokens do not divide by two: the vocabulary is padded."""


def division(tensor: int = 1, stages: int = 1, pieces: int = 4, context: int = 1, chunks: int = 1) -> dict[str, int]:
    return {
        "virtual_pipeline": chunks,
        "tensor_parallel": tensor,
        "context_parallel": context,
        "pipeline_parallel": stages,
        "pipeline_pieces": pieces,
    }


CASES: dict[str, dict[str, Any]] = {
    "one": {"model": "llama", "ranks": 1, "actor": {"megatron": division()}},
    "tp2": {"model": "llama", "ranks": 2, "actor": {"megatron": division(2)}},
    "pp2": {"model": "qwen3", "ranks": 2, "actor": {"megatron": division(1, 2, 3), "gradient_checkpointing": True}},
    "pp2-samples": {
        "model": "qwen3",
        "ranks": 2,
        "actor": {"megatron": division(1, 2, 3), "gradient_checkpointing": True},
        "per_sample": True,
    },
    "pp2-vp2": {"model": "deep", "ranks": 2, "actor": {"megatron": division(1, 2, 3, chunks=2)}, "per_sample": True},
    "tp2-pp2-vp2": {"model": "deep", "ranks": 4, "actor": {"megatron": division(2, 2, 3, chunks=2)}},
    "tp2-pp2": {"model": "llama", "ranks": 4, "actor": {"megatron": division(2, 2)}},
    "tp2-dp2": {"model": "qwen2", "ranks": 4, "actor": {"megatron": division(2)}},
    "cp4": {"model": "llama", "ranks": 4, "actor": {"megatron": division(context=4)}},
    "cp2-pp2": {
        "model": "qwen3",
        "ranks": 4,
        "actor": {"megatron": division(1, 2, 3, context=2), "gradient_checkpointing": True},
    },
    "tp2-cp2": {"model": "qwen2", "ranks": 4, "actor": {"megatron": division(2, context=2)}},
    "cp2-dp2": {"model": "qwen2", "ranks": 4, "actor": {"megatron": division(context=2)}},
    "resumed": {"model": "qwen2", "ranks": 2, "actor": {"megatron": division(1, 2)}, "resume": "tp2-dp2"},
    "resumed-pp2": {"model": "deep", "ranks": 2, "actor": {"megatron": division(1, 2)}, "resume": "tp2-pp2-vp2"},
    "resumed-cp2": {"model": "qwen2", "ranks": 2, "actor": {"megatron": division(context=2)}, "resume": "tp2-dp2"},
    "cp2-bfloat16": {"model": "qwen3", "ranks": 2, "actor": {"megatron": division(context=2), "autocast": "bfloat16"}},
    "bfloat16": {"model": "qwen3", "ranks": 2, "actor": {"megatron": division(2), "autocast": "bfloat16"}},
}
LORA: dict[str, Any] = {"rank": 3, "alpha": 6}  # a rank that does not divide by two
SOME: dict[str, Any] = {**LORA, "targets": ["k_proj", "v_proj", "up_proj", "down_proj"], "path": "some"}
DROPOUT: dict[str, Any] = {**LORA, "path": "all", "dropout": 0.3}


def adapted(
    model: str, ranks: int, megatron: dict[str, int], lora: dict[str, Any] | None = None, **others: Any
) -> dict[str, Any]:
    """A case with an adapter; `lora.path`: of which there is one with the model's."""
    settings = LORA if lora is None else lora
    settings = {**settings, "path": f"adapters/{model}-{settings['path']}"} if "path" in settings else settings
    options = {key: others.pop(key) for key in ("resume", "per_sample") if key in others}
    return {"model": model, "ranks": ranks, "actor": {"megatron": megatron, **others}, "lora": settings, **options}


ALL = {**LORA, "path": "all"}
ADAPTED: dict[str, dict[str, Any]] = {
    "lora-new": adapted("llama", 1, division(), gradient_checkpointing=True),
    "lora-tp2": adapted("qwen2", 2, division(2), ALL),
    "lora-pp2": adapted("qwen3", 2, division(1, 2, 3), ALL, gradient_checkpointing=True, per_sample=True),
    "lora-tp2-pp2-vp2": adapted("deep", 4, division(2, 2, 3, chunks=2), ALL),
    "lora-tp2-dp2": adapted("qwen2", 4, division(2), SOME, gradient_checkpointing=True),
    "lora-tp2-cp2": adapted("qwen2", 4, division(2, context=2), ALL),
    "lora-dp4-little": adapted("llama", 4, division(), {"rank": 1, "targets": ["0.self_attn.q_proj"]}),
    "lora-bfloat16": adapted("qwen3", 2, division(2), ALL, autocast="bfloat16"),
    "lora-dropout": adapted("qwen2", 2, division(2), DROPOUT),
    "lora-dropout-recomputed": adapted("qwen2", 2, division(2), DROPOUT, gradient_checkpointing=True),
    "lora-resumed": adapted("qwen2", 2, division(1, 2), SOME, resume="lora-tp2-dp2"),
    "lora-resumed-dropout": adapted("qwen2", 2, division(2), DROPOUT, resume="lora-dropout"),
}
EXACT_ADAPTED = [
    "lora-new", "lora-tp2", "lora-pp2", "lora-tp2-pp2-vp2", "lora-tp2-dp2", "lora-tp2-cp2", "lora-dp4-little",
]  # fmt: skip
GATE = "tp2"
"""The case of the gate: there it is the only one that runs."""
EXACT = [
    "one",
    pytest.param(GATE, marks=pytest.mark.gate),
    "pp2",
    "pp2-samples",
    "pp2-vp2",
    "tp2-pp2-vp2",
    "tp2-pp2",
    "tp2-dp2",
    "cp4",
    "cp2-pp2",
    "tp2-cp2",
    "cp2-dp2",
]


@dataclass(frozen=True)
class Reference:
    """Attributes:
    log_probs_A: before the first update.
    norms: of the gradients of four updates.
    weights: after them, by Hugging Face name.
    """

    log_probs_A: Tensor
    norms: list[float]
    weights: dict[str, Tensor]


class Change(torch.nn.Module):
    """W + scaling x B A, as a parametrization of W."""

    def __init__(self, a: Tensor, b: Tensor, scaling: float) -> None:
        super().__init__()
        self.a, self.b, self.scaling = torch.nn.Parameter(a), torch.nn.Parameter(b), scaling

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scaling * (self.b @ self.a)


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory after all cases were run that are asked for."""
    ours = [item for item in request.session.items if item.path == request.path]
    of_adapters = ["adapter" in item.name for item in ours]
    cases = {} if all(of_adapters) else CASES
    if all(item.get_closest_marker("gate") for item in ours):
        cases = {GATE: CASES[GATE]}
    elif any(of_adapters):
        cases = cases | ADAPTED
    root = tmp_path_factory.mktemp("megatron")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(root / "models" / "llama")
    qwen2 = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    for name, parameter in qwen2.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    qwen2.save_pretrained(root / "models" / "qwen2")
    Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)).save_pretrained(root / "models" / "qwen3")
    deep = LlamaConfig(**SIZES | {"num_hidden_layers": 4}, tie_word_embeddings=True)
    LlamaForCausalLM(deep).save_pretrained(root / "models" / "deep")
    for case in ADAPTED.values():
        if "path" in case["lora"]:
            case["lora"]["path"] = str(write_random_adapter(root, case["model"], case["lora"]))
    (root / "cases.json").write_text(json.dumps(cases))
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen([sys.executable, SCRIPT, root], env=environment)
    try:
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()  # its ranks die with it
        process.wait()
    return root


@pytest.fixture(scope="module")
def references(root: Path) -> dict[str, Reference]:
    return {name: reference(root / "models" / name) for name in ("llama", "qwen2", "qwen3", "deep")}


def reference(model_dir: Path) -> Reference:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    model.get_input_embeddings().padding_idx = None  # else the padding token's row would get no gradient
    before_A, norms = train_reference(model)
    return Reference(before_A, norms, {name: p.detach() for name, p in model.named_parameters()})


def train_reference(model: PreTrainedModel) -> tuple[Tensor, list[float]]:
    """Return the log-probabilities before, and the norms of four updates."""
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=1e-2, eps=0.05)
    before_A, norms = log_probs(model).detach(), []
    for _ in range(4):
        optimizer.zero_grad()
        found_A, entropy_A = log_probs(model), entropies(model)
        (((found_A + 1).square().sum() - (0.5 * found_A.detach() * entropy_A).sum()) / 16).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 4.0)))
        optimizer.step()
    return before_A, norms


def write_random_adapter(root: Path, model: str, lora: dict[str, Any]) -> Path:
    """Write an adapter in peft's form, with random A and B, and return its directory."""
    path = root / lora["path"]
    settings = LoraConfig.model_validate(lora | {"path": None})
    shapes = {name: tuple(value.shape) for name, value in load_file(root / "models" / model / FILE).items()}
    targets = adapter_targets(shapes, settings)
    random = torch.Generator().manual_seed(1)
    tensors = {
        name: 0.2 * torch.randn(shape, generator=random)
        for name, shape in adapter_shapes(targets, settings.rank).items()
    }
    write_adapter(path, tensors, settings, targets, base="base")
    return path


def adapted_reference(root: Path, case: str) -> tuple[Reference, Tensor]:
    """Return what a float64 adapter written by hand is trained to, and the log-probabilities of the final one."""
    options = ADAPTED[case]
    lora = LoraConfig.model_validate(options["lora"])
    model_dir = root / "models" / options["model"]
    shapes = {name: tuple(value.shape) for name, value in load_file(model_dir / FILE).items()}
    targets = adapter_targets(shapes, lora)
    if lora.path is not None:
        adapter = load_file(Path(lora.path) / "adapter_model.safetensors")
    else:
        adapter = {
            name: initial_a(name, shape, lora, seed=0) if name.endswith(A) else torch.zeros(shape)
            for name, shape in adapter_shapes(targets, lora.rank).items()
        }
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    model.requires_grad_(False)
    for module in targets:
        a, b = (adapter[PREFIX + module + end].double() for end in (A, B))
        parametrize.register_parametrization(model.get_submodule(module), "weight", Change(a, b, lora.scaling))
    before_A, norms = train_reference(model)
    ends = {".parametrizations.weight.0.a": A, ".parametrizations.weight.0.b": B}
    trained = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    weights = {
        PREFIX + name.removesuffix(end) + own: value
        for name, value in trained.items()
        for end, own in ends.items()
        if name.endswith(end)
    }
    return Reference(before_A, norms, weights), log_probs(model).detach()


def log_probs(model: PreTrainedModel) -> Tensor:
    rows = range(NUM_SAMPLES)
    return torch.cat([distributions(model, row).gather(-1, make_sample(row)[1][:, None])[:, 0] for row in rows])


def entropies(model: PreTrainedModel) -> Tensor:
    found = [distributions(model, row) for row in range(NUM_SAMPLES)]
    return torch.cat([-(each.exp() * each).sum(-1) for each in found])


def distributions(model: PreTrainedModel, row: int) -> Tensor:
    """Return the log-probabilities of all tokens at each of a sample's drawn ones."""
    prompt, response = make_sample(row)
    logits: Tensor = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1)


def saved(root: Path, case: str, rank: int = 0) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(root / f"{case}-{rank}.pt")
    return loaded


def exported(root: Path, case: str) -> dict[str, Tensor]:
    return load_file(root / f"export-{case}" / "model.safetensors")


@pytest.mark.parametrize("case", EXACT)
def test_log_probs_are_those_of_the_reference_on_every_rank(
    root: Path, references: dict[str, Reference], case: str
) -> None:
    expected = references[CASES[case]["model"]].log_probs_A
    for rank in range(CASES[case]["ranks"]):
        torch.testing.assert_close(saved(root, case, rank)["log_probs"].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", EXACT)
def test_updates_are_those_of_the_reference(root: Path, references: dict[str, Reference], case: str) -> None:
    expected = references[CASES[case]["model"]]
    for rank in range(CASES[case]["ranks"]):
        assert saved(root, case, rank)["norms"] == pytest.approx(expected.norms, rel=1e-4)
    weights = exported(root, case)
    assert weights.keys() == expected.weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value.double(), expected.weights[name], rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("case", EXACT)
def test_a_copy_has_the_bits_of_the_policy_and_keeps_them_over_updates(root: Path, case: str) -> None:
    for rank in range(CASES[case]["ranks"]):
        assert saved(root, case, rank)["copies"] == [True, True, True], "initial, after updates, taken anew"


def test_two_tensor_parallel_ranks_compute_what_one_does(root: Path) -> None:
    one, two = exported(root, "one"), exported(root, "tp2")
    initial = load_file(root / "models" / "llama" / "model.safetensors")
    for name, value in two.items():
        torch.testing.assert_close(value, one[name], rtol=1e-4, atol=1e-6)
        assert not value.equal(initial[name]), name


@pytest.mark.parametrize("case", ["resumed", "resumed-cp2", "resumed-pp2"])
def test_a_state_is_resumed_by_another_division_of_the_model(root: Path, case: str) -> None:
    source = CASES[case]["resume"]
    through, resumed = saved(root, source), saved(root, case)
    assert resumed["norms"] == pytest.approx(through["norms"][2:], rel=1e-4)
    assert resumed["updates"] == through["updates"] == 4
    expected = exported(root, source)
    for name, value in exported(root, case).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("case", ["bfloat16", "cp2-bfloat16"])
def test_bfloat16_trains_float32_master_weights(root: Path, references: dict[str, Reference], case: str) -> None:
    expected = references["qwen3"]
    found = saved(root, case)
    torch.testing.assert_close(found["log_probs"].double(), expected.log_probs_A, rtol=0.05, atol=0.1)
    assert found["norms"][0] == pytest.approx(expected.norms[0], rel=0.05)
    assert {values.dtype for *_, values in found["shards"]} == {torch.bfloat16}
    for name, value in exported(root, case).items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected.weights[name], rtol=0.05, atol=0.02, msg=name)


def test_pieces_that_go_back_one_by_one_give_the_gradient_of_whole_micro_batches(root: Path) -> None:
    whole, pieces = exported(root, "pp2"), exported(root, "pp2-samples")
    for name, value in pieces.items():
        torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("case", ["tp2-pp2", "tp2-dp2", "tp2-cp2", "tp2-pp2-vp2"])
def test_shards_of_all_ranks_make_the_exported_weights(root: Path, case: str) -> None:
    held = [saved(root, case, rank)["shards"] for rank in range(CASES[case]["ranks"])]
    specs = [[ShardSpec(name, shape, "float32", Box(*box)) for name, shape, *box, _ in shards] for shards in held]
    plan_transfer(specs, bucket_bytes=2**20, dtype="float32")  # refuses gaps and overlaps
    expected = exported(root, case)
    assert {spec.name for rank in specs for spec in rank} == expected.keys()
    for shards in held:
        for name, _, offset, size, values in shards:
            assert values.reshape(size).equal(expected[name][Box(offset, size).slices]), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", ["one", "tp2-pp2", "tp2-dp2", "tp2-cp2"])
def test_ranks_together_and_a_process_without_megatron_write_the_same_export(
    root: Path, case: str, tmp_path: Path
) -> None:
    write_export(root / f"end-{case}", tmp_path / "export", root / "models" / CASES[case]["model"])
    for directory in (root / f"shared-{case}", tmp_path / "export"):
        for path in (root / f"export-{case}").iterdir():
            assert (directory / path.name).read_bytes() == path.read_bytes(), path


def test_export_is_loaded_by_transformers(root: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(root / "export-tp2-pp2")
    assert model.model.embed_tokens.weight.equal(exported(root, "tp2-pp2")["model.embed_tokens.weight"])


@pytest.mark.parametrize("case", EXACT_ADAPTED)
def test_updates_of_an_adapter_are_those_of_the_reference(root: Path, case: str) -> None:
    """Log-probabilities, gradients and weights after four updates, on every rank; the base stays as it was."""
    expected, final_A = adapted_reference(root, case)
    for rank in range(ADAPTED[case]["ranks"]):
        found = saved(root, case, rank)
        torch.testing.assert_close(found["log_probs"].double(), expected.log_probs_A, rtol=1e-5, atol=1e-5)
        assert found["norms"] == pytest.approx(expected.norms, rel=1e-4)
        torch.testing.assert_close(found["final"].double(), final_A, rtol=1e-4, atol=1e-4)
    adapter = load_file(root / f"export-{case}" / ADAPTER_FILE)
    assert adapter.keys() == expected.weights.keys()
    for name, value in adapter.items():
        torch.testing.assert_close(value.double(), expected.weights[name], rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("case", ["lora-new", "lora-tp2", "lora-pp2", "lora-tp2-cp2"])
def test_base_of_an_adapter_is_the_reference_without_a_copy(
    root: Path, references: dict[str, Reference], case: str
) -> None:
    expected = references[ADAPTED[case]["model"]].log_probs_A
    for rank in range(ADAPTED[case]["ranks"]):
        found = saved(root, case, rank)
        torch.testing.assert_close(found["initial"].double(), expected, rtol=1e-5, atol=1e-5)
        assert found["copies"] == [case == "lora-new", True], "new: B is 0; and after updates"


@pytest.mark.parametrize("case", [*EXACT_ADAPTED, "lora-bfloat16"])
def test_shards_of_all_ranks_make_the_exported_adapter_and_the_merged_model(root: Path, case: str) -> None:
    exports = {"shards": load_file(root / f"export-{case}" / ADAPTER_FILE), "merged": exported(root, case)}
    for kind, expected in exports.items():
        held = [saved(root, case, rank)[kind] for rank in range(ADAPTED[case]["ranks"])]
        specs = [[ShardSpec(name, shape, "float32", Box(*box)) for name, shape, *box, _ in shards] for shards in held]
        plan_transfer(specs, bucket_bytes=2**20, dtype="float32")  # refuses gaps and overlaps
        assert {spec.name for rank in specs for spec in rank} == expected.keys()
        tolerance = 0.02 if kind == "merged" and "bfloat16" in case else 1e-6
        for shards in held:
            for name, _, offset, size, values in shards:
                part = expected[name][Box(offset, size).slices]
                torch.testing.assert_close(values.reshape(size).float(), part, rtol=0, atol=tolerance, msg=name)
                assert kind == "merged" or values.dtype == torch.float32
    base = load_file(root / "models" / ADAPTED[case]["model"] / FILE)
    changed = {name.removesuffix(".weight") for name, value in exports["merged"].items() if not value.equal(base[name])}
    lora = LoraConfig.model_validate(ADAPTED[case]["lora"])
    assert changed == adapter_targets({name: tuple(value.shape) for name, value in base.items()}, lora).keys()


@pytest.mark.parametrize("case", ["lora-tp2-dp2", "lora-tp2-pp2-vp2"])
def test_ranks_together_write_the_export_of_an_adapter(root: Path, case: str, tmp_path: Path) -> None:
    lora = LoraConfig.model_validate(ADAPTED[case]["lora"])
    write_export(root / f"end-{case}", tmp_path / "export", root / "models" / ADAPTED[case]["model"], lora)
    files = [path for path in (root / f"export-{case}").rglob("*.*") if path.is_file()]
    assert root / f"export-{case}" / ADAPTER_FILE in files
    for path in files:
        inside = path.relative_to(root / f"export-{case}")
        for directory in (root / f"shared-{case}", tmp_path / "export"):
            assert (directory / inside).read_bytes() == path.read_bytes(), path


def test_adapter_is_resumed_by_another_division_of_the_model(root: Path) -> None:
    through, resumed = saved(root, "lora-tp2-dp2"), saved(root, "lora-resumed")
    assert resumed["norms"] == pytest.approx(through["norms"][2:], rel=1e-4)
    assert resumed["updates"] == through["updates"] == 4
    expected = load_file(root / "export-lora-tp2-dp2" / ADAPTER_FILE)
    for name, value in load_file(root / "export-lora-resumed" / ADAPTER_FILE).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=2e-6, msg=name)


def test_adapter_is_resumed_bit_for_bit_also_with_dropout(root: Path) -> None:
    through, resumed = saved(root, "lora-dropout"), saved(root, "lora-resumed-dropout")
    assert resumed["norms"] == through["norms"][2:]
    exports = [root / f"export-{case}" for case in ("lora-dropout", "lora-resumed-dropout")]
    for file in (FILE, ADAPTER_FILE):
        assert (exports[0] / file).read_bytes() == (exports[1] / file).read_bytes()


def test_dropout_of_an_adapter_is_for_training_alone_and_the_same_when_recomputed(root: Path) -> None:
    plain, dropped, recomputed = (saved(root, f"lora-{case}") for case in ("tp2", "dropout", "dropout-recomputed"))
    assert dropped["log_probs"].equal(plain["log_probs"])
    assert recomputed["norms"] == pytest.approx(dropped["norms"], rel=1e-5)
    assert abs(dropped["norms"][0] / plain["norms"][0] - 1) > 0.01


def test_adapter_alone_has_gradients_and_is_float32_beside_a_bfloat16_base(
    root: Path, references: dict[str, Reference]
) -> None:
    found = saved(root, "lora-bfloat16")
    assert found["types"] == [(False, "torch.bfloat16"), (True, "torch.float32")]
    trained = sum(values.numel() for _, _, _, _, values in found["shards"])
    assert trained <= found["trained"] <= trained + 64 * len(found["shards"]) + 128, "buffers: Megatron pads tensors"
    torch.testing.assert_close(found["initial"].double(), references["qwen3"].log_probs_A, rtol=0.05, atol=0.1)
    expected, final_A = adapted_reference(root, "lora-bfloat16")
    torch.testing.assert_close(found["log_probs"].double(), expected.log_probs_A, rtol=0.05, atol=0.1)
    assert found["norms"][0] == pytest.approx(expected.norms[0], rel=0.05)
    torch.testing.assert_close(found["final"].double(), final_A, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("case", ["lora-tp2", "lora-pp2", "lora-tp2-pp2-vp2", "lora-tp2-dp2"])
def test_ranks_have_as_much_of_an_adapter_as_is_estimated(root: Path, case: str) -> None:
    options = ADAPTED[case]
    actor = ActorConfig.model_validate({"engine": "megatron", **options["actor"]})
    sizes = ModelSizes.from_config(json.loads((root / "models" / options["model"] / "config.json").read_text()))
    assert sizes is not None
    trained = sizes.trained_parameters(LoraConfig.model_validate(options["lora"]))
    estimated = megatron_memory(sizes, actor, options["ranks"], 1, trained=trained)["gradients"]
    held = [saved(root, case, rank)["held"] for rank in range(options["ranks"])]
    assert [4 * number for number in held] == [estimated] * options["ranks"]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's, of transformers
def test_exported_adapter_loads_in_peft(root: Path) -> None:
    peft = pytest.importorskip("peft")
    export = root / "export-lora-tp2-dp2"
    base = AutoModelForCausalLM.from_pretrained(root / "models" / "qwen2", dtype=torch.float64)
    model = peft.PeftModel.from_pretrained(base, export / "adapter").base_model.model
    final = saved(root, "lora-tp2-dp2")["final"].double()
    torch.testing.assert_close(log_probs(model).detach(), final, rtol=1e-5, atol=1e-5)
