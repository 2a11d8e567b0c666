"""Losses that read log-probabilities of tokens that were not drawn, from the model to the gradient of its weights."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncflow.errors import BadRequest, ConfigError
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.config.rules import AT_START, check_rules
from tq.columns import Column, PackedBatch
from workers.algorithms.algorithm import DPPO, Distill
from workers.algorithms.parts import PolicyLoss
from workers.engines.base import GenerateRequest, TopTokensEngine, generate
from workers.engines.fsdp.sharding import FsdpEngine, FsdpFrozenModel
from workers.engines.hf.engine import HfEngine
from workers.engines.hf.frozen import FrozenModel
from workers.engines.hf.model import read_stored
from workers.engines.packed_forward import cut
from workers.rollout.outbox import _columns
from workers.rollout.rollouts import single_turn
from workers.rows.packed_rows import Sequences, TokenSets, drawn_column, samples_of, sequences_of
from workers.settings.algorithms import DistillConfig, DPPOConfig
from workers.settings.dataflow import KEPT_COLUMNS, ROLLOUT_TOP_COLUMNS, TEACHER_TOP_COLUMNS
from workers.settings.engines import ActorConfig
from workers.settings.rollout import RolloutConfig
from workers.settings.run import ModelConfig
from workers.tasks.chain import TaskChain
from workers.tasks.column_tasks import ReferenceLogProbs, TeacherLogProbs

CPU = torch.device("cpu")
TEMPERATURE, K = 0.9, 4

pytestmark = pytest.mark.usefixtures("single_rank")


def train_engine(path: Path) -> FsdpEngine:
    # Without a clip, and with an epsilon that hides no factor, the update shows the gradient.
    actor = ActorConfig(lr=1.0, eps=1.0, betas=(0.0, 0.0), grad_clip=None)
    return FsdpEngine(path, actor=actor, temperature=TEMPERATURE, device=CPU, seed=0)


def frozen(path: Path, kind: str) -> TopTokensEngine:
    if kind == "hf":
        return FrozenModel(path, ModelConfig(path=str(path)), temperature=TEMPERATURE, device=CPU)
    return FsdpFrozenModel(path, ActorConfig(), temperature=TEMPERATURE, device=CPU, weights_dir=path)


def rows_of(batch: Sequences, **columns: Column) -> PackedBatch:
    """One sample per row."""
    number = len(batch.lengths_N)
    own = {
        "tokens": Column(batch.tokens_T, batch.lengths_N),
        "sample_lengths": Column.of_scalars(batch.lengths_N),
        "response_mask": Column(batch.response_mask_T, batch.lengths_N),
        "truncated": Column.of_scalars(torch.zeros(number, dtype=torch.uint8)),
        "rewards": Column.of_scalars(torch.zeros(number)),
        "advantages": Column.of_scalars(torch.zeros(number)),
    }
    rows = PackedBatch(tuple(range(number)), own | columns, tuple(range(number)))
    return rows.with_columns({"rollout_log_probs": drawn_column(torch.full((batch.num_drawn,), -1.0), rows)})


def whole_log_probs(path: Path, batch: Sequences) -> tuple[torch.nn.Module, Tensor]:
    """A model in float64, and its tempered distribution where each drawn token was drawn, [A, V]."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    parts = (torch.split(tensor, batch.lengths_N.tolist()) for tensor in (batch.tokens_T, batch.response_mask_T))
    found = [model(tokens[None]).logits[0, :-1][mask[1:].bool()] for tokens, mask in zip(*parts, strict=True)]
    return model, (torch.cat(found) / TEMPERATURE).log_softmax(-1)


@pytest.mark.parametrize("kind", ["hf", "fsdp"])
def test_most_likely_tokens_of_a_frozen_model(model_dir: Path, groups: Sequences, kind: str) -> None:
    _, expected = whole_log_probs(model_dir, groups)
    ids, log_probs = frozen(model_dir, kind).top_log_probs(groups, K, num_tokens=13)
    assert ids.dtype == torch.int32 and log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), expected.detach().topk(K).values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(expected.detach().gather(1, ids.long()), log_probs.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("k", [1, K, 13])
def test_distilled_gradient_is_that_of_the_whole_distributions(
    make_model_dir: Callable[..., Path], groups: Sequences, k: int, packed: bool
) -> None:
    """Over K tokens and all others as one, as float64 has it from whole logits; with K the vocabulary, all of it."""
    student, teacher = make_model_dir(), make_model_dir(seed=1)
    model, policy = whole_log_probs(student, groups)
    with torch.no_grad():
        _, held = whole_log_probs(teacher, groups)
    chosen = held.topk(k).indices
    outcomes = [each.exp().gather(1, chosen) for each in (policy, held)]
    if k < held.shape[1]:
        outcomes = [torch.cat([each, 1 - each.sum(1, keepdim=True)], 1) for each in outcomes]
    expected = (outcomes[0] * (outcomes[0] / outcomes[1]).log()).sum()
    (0.5 * expected / groups.num_drawn).backward()

    algorithm = Distill(DistillConfig(kl_coef=0.5, top_k=k), max_response_tokens=8, mask_truncated=False)
    ids, log_probs = frozen(teacher, "hf").top_log_probs(groups, k, num_tokens=13)
    rows = rows_of(groups)
    top = {"ref_top_ids": drawn_column(ids, rows), "ref_top_log_probs": drawn_column(log_probs, rows)}
    samples = samples_of(rows.with_columns(top))
    engine, total = train_engine(student), 0.0
    before = {shard.name: shard.values.clone() for shard in engine.shards()}
    for positions in [range(len(samples))] if packed else [[k] for k in reversed(range(len(samples)))]:
        part = samples.select(positions)
        loss = algorithm.loss(part, device=CPU)
        engine.forward_backward(sequences_of(part, others=algorithm.other_tokens), loss)
        total += float(loss.stats["kl"])
    assert total == pytest.approx(float(expected.detach()), rel=1e-4)
    norm = engine.step(algorithm.scale(algorithm.counts(samples))).grad_norm
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert norm == pytest.approx(float(torch.stack([each.norm() for each in gradients.values()]).norm()), rel=1e-4)
    # AdamW without memory moves by g / (|g| + 1).
    for shard in engine.shards():
        gradient = gradients[shard.name]
        moved = (before[shard.name] - shard.values).double().view_as(gradient)
        torch.testing.assert_close(moved, gradient / (gradient.abs() + 1), rtol=2e-3, atol=2e-6)


def test_parts_of_a_batch_keep_their_tokens(turns: Sequences) -> None:
    counts = torch.arange(turns.num_drawn, dtype=torch.int32) % 3
    sets = TokenSets(torch.arange(int(counts.sum()), dtype=torch.int32), counts)
    parts = list(cut(Sequences(turns.tokens_T, turns.lengths_N, turns.response_mask_T, sets), 3))
    assert len(parts) == 3
    assert torch.cat([part.others.ids_P for part in parts if part.others is not None]).equal(sets.ids_P)
    assert [len(part.others.counts_A) for part in parts if part.others is not None] == [p.num_drawn for p in parts]


@pytest.mark.parametrize(
    ("ids", "counts", "complaint"),
    [([1, 2], [1, 1], "drawn tokens, but sets"), ([99] * 16, [1] * 16, "token 99"), ([-1] * 16, [1] * 16, "token -1")],
)
def test_tokens_that_no_model_has_are_refused(
    model_dir: Path, batch: Sequences, ids: list[int], counts: list[int], complaint: str
) -> None:
    sets = TokenSets(torch.tensor(ids, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32))
    asked = Sequences(batch.tokens_T, batch.lengths_N, batch.response_mask_T, sets)
    with pytest.raises(BadRequest, match=complaint):
        train_engine(model_dir).forward_backward(asked, lambda *_: torch.zeros(()))


@pytest.mark.parametrize("top_k", [0, K])
@pytest.mark.parametrize("own_rollout", [False, True])
def test_each_source_has_its_teacher(
    make_model_dir: Callable[..., Path], groups: Sequences, top_k: int, own_rollout: bool
) -> None:
    """Rows come back in their order; sources that are not named have the default."""
    paths = [make_model_dir(seed=seed) for seed in (1, 2)]
    given = [
        f"algorithm={{name: distill, teacher_coef: 1.0, top_k: {top_k}}}",
        f"teacher={{path: {paths[0]}, sources: {{other: {{path: {paths[1]}}}}}}}",
        "model.dtype=float32",
        f"rollout.temperature={TEMPERATURE}",
        *(("rollout.function=own:rollout", "actor.max_tokens_per_micro_batch=16") if own_rollout else ()),
    ]
    config = load_config(find_recipe("quickstart"), overrides=given)
    context = SimpleNamespace(config=config, device=CPU, report_state=lambda *_: None)
    task = TeacherLogProbs(context)  # type: ignore[arg-type]
    sources = ["math", "other", "other", "math", "other", "math", "math", "other", "math"]
    batch = rows_of(groups).with_columns({"sources": Column.of_texts(sources)})
    chain = object.__new__(TaskChain)
    found = chain._on_rows(task, batch, 1, len(batch))
    name = "teacher_top_log_probs" if top_k else "teacher_log_probs"
    expected = []
    for path in paths:
        with torch.no_grad():
            _, whole = whole_log_probs(path, groups)
        drawn = groups.tokens_T[groups.response_mask_T.bool()]
        values = whole.topk(K).values if top_k else whole.gather(1, drawn[:, None])
        counts = [int(part.sum()) for part in torch.split(groups.response_mask_T, groups.lengths_N.tolist())]
        expected.append(torch.split(values.float(), counts))
    assert set(found) == (set(TEACHER_TOP_COLUMNS) if top_k else {"teacher_log_probs"})
    for row, (ours, source) in enumerate(zip(found[name].rows(), sources, strict=True)):
        torch.testing.assert_close(ours, expected[source == "other"][row].flatten(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top_k", [0, K])
@pytest.mark.parametrize("own_teacher", [False, True])
def test_embeddings_may_be_padded_to_other_sizes(
    make_model_dir: Callable[..., Path], groups: Sequences, top_k: int, own_teacher: bool
) -> None:
    """A teacher's likeliest tokens are some that the student has; a token that it lacks itself becomes its last one."""
    student, wide, narrow = (
        make_model_dir(),
        make_model_dir(seed=1, vocab_size=40),
        make_model_dir(seed=2, vocab_size=8),
    )
    known = replace(groups, tokens_T=groups.tokens_T.clamp(max=7))
    for path, seen in ((wide, groups), (narrow, known)):
        teacher = f"teacher={{path: {path}}}" if own_teacher else f"ref.path={path}"
        given = [
            f"algorithm={{name: distill, {'teacher' if own_teacher else 'kl'}_coef: 1.0, top_k: {top_k}}}",
            *(teacher, f"model.path={student}", "model.dtype=float32", f"rollout.temperature={TEMPERATURE}"),
        ]
        config = load_config(find_recipe("quickstart"), overrides=given)
        context = SimpleNamespace(
            config=config, device=CPU, report_state=lambda *_: None, rank=0, start_step=0, job=SimpleNamespace()
        )
        task = TeacherLogProbs(context) if own_teacher else ReferenceLogProbs(context)  # type: ignore[arg-type]
        found = task.compute_columns(rows_of(groups), 1)
        with torch.no_grad():
            _, whole = whole_log_probs(path, seen)
        drawn = seen.tokens_T[seen.response_mask_T.bool()]
        expected = whole[:, :13].topk(K).values if top_k else whole.gather(1, drawn[:, None])
        name = next(name for name in found if name.endswith("log_probs"))
        torch.testing.assert_close(found[name].values, expected.flatten().float(), rtol=1e-5, atol=1e-5)
        assert not top_k or int(next(iter(found.values())).values.max()) < min(13, whole.shape[1])


def kept_of(batch: Sequences, vocabulary: int) -> TokenSets:
    """For each drawn token a random set with it, of one token up to all."""
    generator = torch.Generator().manual_seed(7)
    drawn = batch.tokens_T[batch.response_mask_T.bool()]
    sizes = torch.randint(1, vocabulary + 1, (len(drawn),), generator=generator)
    sizes[0], sizes[-1] = 1, vocabulary
    sets = []
    for token, size in zip(drawn.tolist(), sizes.tolist(), strict=True):
        others = torch.randperm(vocabulary, generator=generator)
        sets.append(torch.cat([torch.tensor([token]), others[others != token][: size - 1]]).flip(0))
    return TokenSets(torch.cat(sets).int(), sizes.int())


@pytest.mark.parametrize("packed", [True, False])
def test_masked_distribution_and_its_gradient_are_those_of_whole_logits(
    model_dir: Path, groups: Sequences, packed: bool
) -> None:
    """Log-probabilities and entropies over the kept tokens, for trainer, copies and reference."""
    model, whole = whole_log_probs(model_dir, groups)
    kept = kept_of(groups, whole.shape[1])
    batch = replace(groups, kept=kept)
    drawn = groups.tokens_T[groups.response_mask_T.bool()]
    mask = torch.zeros_like(whole, dtype=torch.bool)
    mask[torch.arange(len(drawn)).repeat_interleave(kept.counts_A), kept.ids_P.long()] = True
    masked = whole.masked_fill(~mask, -torch.inf).log_softmax(-1)
    log_probs = masked.gather(1, drawn[:, None])[:, 0]
    entropy = -(masked.exp() * masked.masked_fill(~mask, 0.0)).sum(1)
    weight = torch.linspace(-1, 1, len(drawn), dtype=torch.float64)
    (weight * log_probs + weight.flip(0) * entropy).sum().backward()

    engine, place = train_engine(model_dir), 0
    seen: list[tuple[Tensor, Tensor]] = []
    parts = [batch] if packed else list(cut(batch, len(batch.lengths_N)))
    assert len(parts) == (1 if packed else len(batch.lengths_N))
    for part in parts:
        own = slice(place, place := place + part.num_drawn)

        def loss(given: Tensor, spread: Tensor, own: slice = own) -> Tensor:
            seen.append((given.detach(), spread.detach()))
            return (weight[own] * given + weight.flip(0)[own] * spread).sum()

        engine.forward_backward(part, loss)
    for which, theirs in enumerate((log_probs, entropy)):
        ours = torch.cat([found[which] for found in seen])
        torch.testing.assert_close(ours.double(), theirs.detach(), rtol=1e-4, atol=1e-5)
    for scored in (engine.log_probs(batch), *(frozen(model_dir, kind).log_probs(batch) for kind in ("hf", "fsdp"))):
        torch.testing.assert_close(scored.double(), log_probs.detach(), rtol=1e-4, atol=1e-5)
    norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    assert engine.step(1.0).grad_norm == pytest.approx(float(torch.stack(norms).norm()), rel=1e-4)


def test_a_token_that_was_not_kept_is_refused(model_dir: Path, batch: Sequences) -> None:
    kept = kept_of(batch, 13)
    wrong = replace(kept, ids_P=torch.cat([(kept.ids_P[:1] + 1) % 13, kept.ids_P[1:]]))
    with pytest.raises(BadRequest, match="not among those that it was drawn from"):
        train_engine(model_dir).log_probs(replace(batch, kept=wrong))


def test_a_kept_mask_travels_from_the_engine_to_the_trainer(model_dir: Path) -> None:
    """The generator's log-probabilities are then the trainer's, whatever top-p and top-k leave out."""
    sampling = RolloutConfig.model_validate(
        {"max_response_tokens": 6, "temperature": TEMPERATURE, "top_p": 0.7, "top_k": 5, "keep_sampling_mask": True}
    )
    generator = HfEngine(model_dir, ModelConfig(path=str(model_dir)), sampling=sampling, device=CPU)
    generator.load_weights(read_stored(model_dir, generator.weight_needs()))
    prompts = [torch.tensor([3, 4, 5]), torch.tensor([6]), torch.tensor([3, 4, 5])]
    requests = [GenerateRequest(k, prompt, seed=k, ticket=k) for k, prompt in enumerate(prompts)]
    made = sorted(generate(generator, requests), key=lambda one: one.index)
    rolled = [single_turn(prompt, one) for prompt, one in zip(prompts, made, strict=True)]
    columns = _columns(rolled, KEPT_COLUMNS)
    rows = samples_of(PackedBatch(tuple(range(3)), columns, (0, 0, 0))).select([2, 0, 1])
    scored = train_engine(model_dir).log_probs(sequences_of(rows))
    torch.testing.assert_close(scored, rows["rollout_log_probs"].values, rtol=1e-4, atol=1e-5)
    assert rows["kept_counts"].values.max() <= 5 and rows["kept_counts"].values.min() >= 1


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (("rollout.top_p=1",), "^rollout.keep_sampling_mask: True .*=true.; without top_p below 1 or top_k"),
        (("rollout.engine=sim",), "engine sim does not say which tokens it kept"),
        (("rollout.engine=vllm",), "vLLM keeps masks only where top_k bounds their size"),
        (("rollout.function=own:rollout",), "rollout.function has calls of its own"),
    ],
)
def test_masks_that_no_engine_reports_are_refused_at_loading(settings: tuple[str, ...], complaint: str) -> None:
    given = ("rollout.keep_sampling_mask=true", "rollout.top_p=0.9", *settings)
    with pytest.raises(ConfigError, match=complaint):
        load_config(find_recipe("quickstart"), overrides=given)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (("actor.engine=megatron",), "cannot be used with actor.engine megatron"),
        (("ref.engine=megatron",), "cannot be used with ref.engine megatron"),
        (("algorithm={name: distill}",), "cannot be used with algorithm.name distill"),
        (("roles={rollout: 1, actor: 1, ref: 0}",), "cannot be used with roles ref:0"),
    ],
)
def test_engines_that_ignore_masks_are_refused(settings: tuple[str, ...], complaint: str) -> None:
    given = ("rollout.keep_sampling_mask=true", "rollout.top_p=0.9", *settings)
    config = load_config(find_recipe("quickstart"), overrides=given)
    with pytest.raises(ConfigError, match=complaint):
        check_rules(config, {message: rule for message, rule in AT_START.items() if "keep_sampling_mask" in message})


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("kind", "bound"), [("tv", 0.5), ("kl", 1.0)])
@pytest.mark.parametrize("k", [1, K, 13])
def test_gradient_inside_the_trust_region_of_the_likeliest_tokens_is_that_of_whole_distributions(
    make_model_dir: Callable[..., Path], groups: Sequences, k: int, kind: str, bound: float, packed: bool
) -> None:
    """Which tokens are dropped is decided from whole logits in float64, token by token."""
    student, behaviour = make_model_dir(), make_model_dir(seed=1)
    model, policy = whole_log_probs(student, groups)
    with torch.no_grad():
        _, held = whole_log_probs(behaviour, groups)
    drawn = groups.tokens_T[groups.response_mask_T.bool()]
    log_probs, rollout = (each.gather(1, drawn[:, None])[:, 0] for each in (policy, held))
    advantage = torch.where(torch.arange(len(drawn)) % 2 == 0, 1.0, -1.0).double()
    apart, kept = [], []
    for place, token in enumerate(drawn.tolist()):
        compared = {token, *held[place].topk(k).indices.tolist()}
        outcomes = [[float(each[place, one].exp().detach()) for one in compared] for each in (held, policy)]
        if len(compared) < held.shape[1]:
            outcomes = [[*each, 1 - sum(each)] for each in outcomes]
        pairs = list(zip(*outcomes, strict=True))
        apart.append(sum(abs(m - p) / 2 if kind == "tv" else m * math.log(m / p) for m, p in pairs))
        moves_on = float(advantage[place] * (log_probs[place] - rollout[place]).detach()) > 0
        kept.append(not (moves_on and apart[-1] > bound))
    assert 0 < sum(kept) < len(kept) and min(abs(each - bound) for each in apart) > 1e-4
    ratio = (log_probs - rollout).exp().detach()
    expected = -(ratio.clamp(max=20) * advantage * log_probs * torch.tensor(kept)).sum() / len(drawn)
    expected.backward()

    config = DPPOConfig(divergence=kind, divergence_top_k=k, max_divergence=bound, off_policy={"method": "none"})  # type: ignore[arg-type]
    algorithm = DPPO(config, max_response_tokens=8, mask_truncated=False)
    rows = rows_of(groups)
    found = held.float().topk(k)
    columns = {
        "rollout_log_probs": drawn_column(rollout.float(), rows),
        "advantages": drawn_column(advantage.float(), rows),
        "rollout_top_ids": drawn_column(found.indices.int(), rows),
        "rollout_top_log_probs": drawn_column(found.values, rows),
    }
    samples = samples_of(rows.with_columns(columns))
    engine, clipped = train_engine(student), 0.0
    for positions in [range(len(samples))] if packed else [[k] for k in reversed(range(len(samples)))]:
        part = samples.select(positions)
        loss = algorithm.loss(part, device=CPU)
        engine.forward_backward(sequences_of(part, others=algorithm.other_tokens), loss)
        clipped += float(loss.stats["clip_fraction"])
    assert clipped == int((~torch.tensor(kept) | (ratio > 20)).sum())
    norm = engine.step(algorithm.scale(algorithm.counts(samples))).grad_norm
    norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    assert norm == pytest.approx(float(torch.stack(norms).norm()), rel=1e-4)


def test_a_loss_of_likeliest_tokens_is_computed_whole(groups: Sequences) -> None:
    """A pipeline would cut the drawn tokens' log-probabilities, and not those of the others."""
    config = DPPOConfig(divergence_top_k=2)
    rows = rows_of(groups)
    ids = drawn_column(torch.zeros(groups.num_drawn, 2, dtype=torch.int32), rows)
    top = {"rollout_top_ids": ids, "rollout_top_log_probs": drawn_column(torch.zeros(groups.num_drawn, 2), rows)}
    loss = DPPO(config, max_response_tokens=8, mask_truncated=False).loss(
        samples_of(rows.with_columns(top)), device=CPU
    )
    assert isinstance(loss, PolicyLoss) and loss.cut_loss([(1, 1)]) is None


@pytest.mark.parametrize("k", [K, 99])
def test_likeliest_tokens_travel_from_the_engine_to_the_trainer(model_dir: Path, k: int) -> None:
    """Of the whole tempered distribution, whatever top-p and top-k leave out; all tokens, if there are fewer."""
    sampling = RolloutConfig(max_response_tokens=6, temperature=TEMPERATURE, top_p=0.7, top_k=5)
    generator = HfEngine(
        model_dir, ModelConfig(path=str(model_dir)), sampling=sampling, device=CPU, num_top_log_probs=k
    )
    generator.load_weights(read_stored(model_dir, generator.weight_needs()))
    prompts = [torch.tensor([3, 4, 5]), torch.tensor([6]), torch.tensor([3, 4, 5])]
    requests = [GenerateRequest(k, prompt, seed=k, ticket=k) for k, prompt in enumerate(prompts)]
    made = sorted(generate(generator, requests), key=lambda one: one.index)
    rolled = [single_turn(prompt, one) for prompt, one in zip(prompts, made, strict=True)]
    rows = PackedBatch(tuple(range(3)), _columns(rolled, ROLLOUT_TOP_COLUMNS), (0, 0, 0))
    samples = samples_of(rows).select([2, 0, 1])
    _, expected = whole_log_probs(model_dir, sequences_of(samples))
    ids, log_probs = (samples[name].values for name in ROLLOUT_TOP_COLUMNS)
    size = min(k, expected.shape[1])
    torch.testing.assert_close(
        log_probs.view(-1, size).double(), expected.topk(size).values.detach(), rtol=1e-4, atol=1e-5
    )
    chosen = expected.gather(1, ids.view(-1, size).long()).detach()
    torch.testing.assert_close(chosen, log_probs.view(-1, size).double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (("rollout.engine=sim",), "rollout.engine: sim cannot be used with algorithm.divergence_top_k"),
        (("rollout.engine=openai",), "rollout.engine: openai cannot be used with algorithm.divergence_top_k"),
        (("actor.engine=megatron",), "actor.engine: megatron cannot be used with algorithm.divergence_top_k"),
        (("actor.tri_model=true",), "actor.tri_model: true cannot be used with algorithm.divergence_top_k"),
        (
            ("rollout.top_k=5", "rollout.keep_sampling_mask=true"),
            "rollout.keep_sampling_mask: true cannot be used with algorithm.divergence_top_k",
        ),
        (
            ("rollout.function=own:rollout",),
            "rollout.function: own:rollout cannot be used with algorithm.divergence_top",
        ),
        (("roles={rollout: 0, actor: 1}",), "roles: rollout:0 cannot be used with algorithm.divergence_top_k"),
    ],
)
def test_engines_without_the_likeliest_tokens_are_refused(settings: tuple[str, ...], complaint: str) -> None:
    given = ("algorithm={name: dppo, divergence_top_k: 4}", *settings)
    config = load_config(find_recipe("quickstart"), overrides=given)
    with pytest.raises(ConfigError, match=f"^{complaint}"):
        config.algorithm.check(config)
