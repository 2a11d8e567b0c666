"""On-policy distillation: each token is compared with the teacher."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncflow.errors import ConfigError
from launcher.checks.models import check_models
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.config.rules import AT_START, check_rules
from tq.columns import Column, PackedBatch
from workers.algorithms.algorithm import Distill
from workers.algorithms.parts import PolicyLoss, top_reverse_kl
from workers.engines.device_memory import state_of_roles
from workers.engines.lora import Trained
from workers.settings.algorithms import DistillConfig
from workers.settings.dataflow import REF_TOP_COLUMNS, TEACHER_TOP_COLUMNS, place_tasks
from workers.settings.run import RunConfig

LENGTHS = (2, 0, 3, 1)
POLICY = [-1.0, -0.5, -2.0, -30.0, -0.1, -0.2]
TEACHER = [-0.5, -0.5, -3.0, -0.01, -0.1, -40.0]


def batch(rewards: list[float]) -> PackedBatch:
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    columns = {
        "old_log_probs": Column(torch.tensor(POLICY), lengths),
        "ref_log_probs": Column(torch.tensor(TEACHER), lengths),
        "rewards": Column.of_scalars(torch.tensor(rewards)),
    }
    return PackedBatch((0, 1, 2, 3), columns, (0, 0, 1, 1))


def advantages(config: DistillConfig, rewards: list[float]) -> Column:
    algorithm = Distill(config, max_response_tokens=4, mask_truncated=False)
    return algorithm.advantages(batch(rewards), group_size=2)["advantages"]


def test_advantage_of_a_token_is_how_much_likelier_the_teacher_holds_it() -> None:
    found = advantages(DistillConfig(kl_coef=0.5), [1.0, 0.0, 0.0, 1.0])
    assert found.lengths.tolist() == list(LENGTHS)
    # A token that one of the two all but excludes counts as 20 nats.
    assert found.values.tolist() == pytest.approx([0.25, 0.0, -0.5, 10.0, 0.0, -10.0])


def test_rewards_are_added_as_grpo_compares_them() -> None:
    found = advantages(DistillConfig(kl_coef=1.0, reward_coef=2.0, advantage_eps=1e-9), [1.0, 0.0, 1.0, 1.0])
    plain = advantages(DistillConfig(kl_coef=1.0), [1.0, 0.0, 1.0, 1.0])
    added = (found.values - plain.values).tolist()
    # Of a group of two rewards, the one is (1 - 0.5) / (1 / sqrt 2) better than the mean; equal ones are not.
    assert added == pytest.approx([2 * 0.5 * 2**0.5] * 2 + [0.0] * 4, rel=1e-6)


def test_a_reward_that_failed_leaves_its_tokens_the_teachers() -> None:
    failed = [float("nan"), float("nan"), 0.0, 1.0]
    found = advantages(DistillConfig(reward_coef=1.0), failed)
    assert found.values[:2].tolist() == pytest.approx([0.5, 0.0])
    drawn = torch.tensor(LENGTHS, dtype=torch.int32)
    rows = batch(failed).with_columns(
        {
            "sample_drawn": Column.of_scalars(drawn),
            "row_drawn": Column.of_scalars(drawn),
            "row_begins": Column.of_scalars(torch.ones(4, dtype=torch.bool)),
            "truncated": Column.of_scalars(torch.zeros(4)),
        }
    )
    counts = Distill(DistillConfig(), max_response_tokens=4, mask_truncated=False).counts(rows)
    # The second row drew nothing, so there is nothing to judge.
    assert (counts.tokens, counts.sequences, counts.responses) == (6, 3, 3)


def test_without_a_teacher_nothing_starts() -> None:
    config = load_config(find_recipe("quickstart"), overrides=("algorithm={name: distill}",))
    with pytest.raises(ConfigError, match="ref.path: null, but algorithm.name distill learns from a teacher"):
        config.algorithm.check(config)


def test_rewards_need_something_to_be_compared_with() -> None:
    assert DistillConfig().min_group_size == 1
    assert DistillConfig(reward_coef=0.1).min_group_size == 2
    assert DistillConfig().has_reward_penalty, "log-probabilities of policy and teacher are needed before the loss"


def test_divergence_over_some_tokens_is_that_of_fewer_outcomes() -> None:
    """Merging outcomes can only lower it; the gradient is that of the merged distribution."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 11, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = (2 * torch.randn(5, 11, generator=generator, dtype=torch.float64)).log_softmax(-1)
    policy = logits.log_softmax(-1)
    whole = (policy.exp() * (policy - teacher)).sum(1).detach()
    before = torch.zeros(5, dtype=torch.float64)
    for k in (1, 3, 10):
        chosen = teacher.topk(k).indices
        found = top_reverse_kl(policy.gather(1, chosen), teacher.gather(1, chosen))
        merged = [torch.cat([p.gather(1, chosen), 1 - p.gather(1, chosen).sum(1, keepdim=True)], 1)
                  for p in (policy.exp(), teacher.exp())]  # fmt: skip
        expected = (merged[0] * (merged[0] / merged[1]).log()).sum(1)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        ours, theirs = (torch.autograd.grad(one.sum(), logits, retain_graph=True)[0] for one in (found, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
        assert (found.detach() >= before - 1e-12).all() and (found.detach() <= whole + 1e-12).all()
        before = found.detach()
    torch.testing.assert_close(before, whole)


def test_certain_models_have_a_finite_divergence() -> None:
    sure = torch.tensor([[-1e-9, -30.0]], requires_grad=True)
    assert float(top_reverse_kl(sure, torch.tensor([[-2e-9, -25.0]])).detach()) == pytest.approx(0.0, abs=1e-5)
    far = top_reverse_kl(sure, torch.tensor([[-30.0, 0.0]]))
    far.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(far).all() and float(far.detach()) > 10
    assert sure.grad is not None and torch.isfinite(sure.grad).all()


def test_with_top_k_the_teacher_is_a_term_of_the_loss() -> None:
    config = DistillConfig(top_k=4, reward_coef=2.0, advantage_eps=1e-9)
    found = advantages(config, [1.0, 0.0, 1.0, 1.0])
    assert found.values.tolist() == pytest.approx([2 * 0.5 * 2**0.5, -2 * 0.5 * 2**0.5, 0.0, 0.0], rel=1e-6)
    assert not config.has_reward_penalty, "the policy at the start of the step takes no pass of its own"
    tasks = {task.name: task for task in config.tasks()}
    assert tasks["ref_log_probs"].outputs == REF_TOP_COLUMNS
    assert set(REF_TOP_COLUMNS) < set(tasks["actor_train"].inputs)
    assert "ref_log_probs" not in tasks["actor_train"].inputs


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("actor.engine=megatron", "actor.engine: megatron cannot be used with algorithm.top_k"),
        ("ref.engine=megatron", "ref.engine: megatron cannot be used with algorithm.top_k"),
        ("actor.tri_model=true", "actor.tri_model: true cannot be used with algorithm.top_k"),
    ],
)
def test_engines_that_give_no_other_tokens_are_refused(tmp_path: Path, setting: str, complaint: str) -> None:
    given = ("algorithm={name: distill, top_k: 8}", f"ref.path={tmp_path}", setting)
    config = load_config(find_recipe("quickstart"), overrides=given)
    with pytest.raises(ConfigError, match=complaint):
        config.algorithm.check(config)


def own_teacher(**settings: object) -> DistillConfig:
    return DistillConfig.model_validate({"name": "distill", "teacher_coef": 0.5, **settings})


def test_a_teacher_beside_the_reference_has_a_task_of_its_own() -> None:
    """The reference is then what it is to GRPO: a KL term of the loss, and none unless it is asked for."""
    assert own_teacher().kl_coef == 0.0 and DistillConfig().kl_coef == 1.0
    names = {task.name for task in own_teacher().tasks(old_log_probs=True)}
    assert "teacher_log_probs" in names and "ref_log_probs" not in names
    both = own_teacher(kl_coef=0.1)
    assert both.kl_loss == (0.1, "k3") and DistillConfig().kl_loss[0] == 0
    tasks = {task.name: task for task in both.tasks(old_log_probs=True)}
    assert {"teacher_log_probs", "ref_log_probs"} <= set(tasks["actor_train"].inputs)
    assert tasks["compute_advantages_and_returns"].inputs == ("rewards", "old_log_probs", "teacher_log_probs")
    top = {task.name: task for task in own_teacher(kl_coef=0.1, top_k=4).tasks()}
    assert set(top["actor_train"].inputs) > {"ref_log_probs", *TEACHER_TOP_COLUMNS}
    assert top["teacher_log_probs"].outputs == TEACHER_TOP_COLUMNS
    place_tasks(both.tasks(old_log_probs=True), ["rollout", "actor", "teacher"])
    with pytest.raises(ConfigError, match="'teacher' is missing; task teacher_log_probs runs there"):
        place_tasks(both.tasks(old_log_probs=True), ["rollout", "actor"])


@pytest.mark.parametrize("top_k", [0, 2])
def test_loss_has_both_the_teacher_and_the_reference(top_k: int) -> None:
    config = own_teacher(kl_coef=0.1, top_k=top_k)
    algorithm = Distill(config, max_response_tokens=4, mask_truncated=False)
    rows = batch([1.0, 0.0, 0.0, 1.0])
    drawn = torch.tensor(LENGTHS, dtype=torch.int32)
    teacher = torch.tensor(TEACHER).flip(0)
    columns = {
        "sample_drawn": Column.of_scalars(drawn),
        "row_drawn": Column.of_scalars(drawn),
        "row_begins": Column.of_scalars(torch.ones(4, dtype=torch.bool)),
        "truncated": Column.of_scalars(torch.zeros(4)),
        "rollout_log_probs": Column(torch.tensor(POLICY), drawn),
        "ref_log_probs": Column(torch.tensor(POLICY) + 0.5, drawn),
        "teacher_log_probs": Column(teacher, drawn),
        "teacher_top_log_probs": Column(torch.tensor([0.3, 0.4]).log().repeat(6), 2 * drawn),
    }
    rows = rows.with_columns(columns)
    rows = rows.with_columns(algorithm.advantages(rows, group_size=2))
    expected = torch.zeros(6) if top_k else 0.5 * (teacher - torch.tensor(POLICY)).clamp(-20, 20)
    torch.testing.assert_close(rows["advantages"].values, expected[: 4 if top_k else 6])
    loss = algorithm.loss(rows, device=torch.device("cpu"))
    assert isinstance(loss, PolicyLoss)
    others = torch.tensor([0.6, 0.1]).log().repeat(6)
    total = loss(torch.tensor(POLICY), torch.zeros(6), *((others,) if top_k else ()))
    k3 = math.expm1(0.5) - 0.5  # e^-d - 1 + d, d = policy - reference
    assert float(loss.stats["kl"]) == pytest.approx(6 * k3)
    merged = 0.6 * math.log(2) + 0.1 * math.log(0.25) + 0.3 * math.log(1)
    if top_k:
        assert float(loss.stats["teacher_kl"]) == pytest.approx(6 * merged)
        assert float(total) == pytest.approx(6 * (0.1 * k3 + 0.5 * merged))
    else:
        assert float(total) == pytest.approx(float(-expected.sum() + 6 * 0.1 * k3))
        parts = loss.cut_loss([(2, 2), (2, 4)])
        assert parts is not None
        cut = [
            part(torch.tensor(POLICY)[k], torch.zeros(6)[k])
            for part, k in zip(parts, (slice(2), slice(2, 6)), strict=True)
        ]
        assert float(sum(cut)) == pytest.approx(float(total))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ((), "teacher.path: null, but algorithm.teacher_coef 0.5 needs a teacher"),
        (("teacher.sources={a: {path: HERE}}",), "teacher.sources: 'a' is no source of data.mixture .sources: none"),
        (("teacher.path=HERE",), "roles: 'teacher' is missing, which computes for algorithm.teacher_coef"),
        (
            ("teacher.path=HERE", "teacher.engine=fsdp", "roles={rollout: 1, actor: 1, teacher: 1}"),
            "teacher.engine: fsdp divides a copy over ranks",
        ),
        (
            ("algorithm.top_k=4", "roles={rollout: 1, actor: 1, teacher: 0}"),
            "roles: teacher:0 cannot be used with algorithm.top_k",
        ),
    ],
)
def test_a_teacher_that_cannot_be_asked_is_refused(tmp_path: Path, settings: tuple[str, ...], complaint: str) -> None:
    given = [setting.replace("HERE", str(tmp_path)) for setting in settings]
    config = load_config(find_recipe("quickstart"), overrides=("algorithm={name: distill, teacher_coef: 0.5}", *given))
    with pytest.raises(ConfigError, match=complaint):
        config.algorithm.check(config)


def test_a_teacher_that_nothing_asks_is_refused(tmp_path: Path) -> None:
    config = load_config(find_recipe("quickstart"), overrides=(f"teacher.path={tmp_path}",))
    with pytest.raises(ConfigError, match="teacher: has nothing to do because no algorithm.teacher_coef is set"):
        check_rules(config, AT_START)
    config = load_config(find_recipe("quickstart"), roles="rollout:1,actor:1,teacher:1")
    with pytest.raises(ConfigError, match="roles: 'teacher' has nothing to do because no .*, or leave teacher out$"):
        check_rules(config, AT_START)
    with pytest.raises(ConfigError, match="^algorithm.kl_coef: 0.0 .*; teacher_coef is 0, too"):
        load_config(find_recipe("quickstart"), overrides=("algorithm={name: distill, kl_coef: 0}",))


def with_other_model(path: Path, *settings: str, own_teacher: bool, **config: object) -> RunConfig:
    """The quickstart with a teacher like its policy, but for its config.json."""
    shutil.copytree(find_recipe("quickstart").parent / "quickstart" / "model", path)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | config))
    coef, key, role = ("teacher_coef", "teacher.path", "teacher") if own_teacher else ("kl_coef", "ref.path", "ref")
    given = (f"algorithm={{name: distill, {coef}: 1.0}}", f"{key}={path}", *settings)
    return load_config(find_recipe("quickstart"), overrides=given, roles=f"rollout:1,actor:1,{role}:1")


@pytest.mark.parametrize("own_teacher", [False, True])
def test_a_teacher_that_cannot_compute_the_student_s_samples_is_refused(tmp_path: Path, own_teacher: bool) -> None:
    key = "teacher.path" if own_teacher else "ref.path"
    enough = with_other_model(tmp_path / "enough", own_teacher=own_teacher, max_position_embeddings=12)
    check_models(enough)
    few = with_other_model(tmp_path / "few", own_teacher=own_teacher, max_position_embeddings=11)
    with pytest.raises(
        ConfigError, match=f"^{key}: .*/few has 11 positions, but prompt and response may have 12 tokens"
    ):
        check_models(few)
    turns = ("rollout.function=own:rollout", "rollout.max_context_tokens=13")
    talks = with_other_model(tmp_path / "talks", *turns, own_teacher=own_teacher, max_position_embeddings=12)
    with pytest.raises(ConfigError, match=f"^{key}: .*/talks has 12 positions, but a turn .* may have 13 tokens"):
        check_models(talks)


def test_more_likeliest_tokens_than_there_are_tokens_are_refused(tmp_path: Path) -> None:
    config = with_other_model(tmp_path / "one", "algorithm.top_k=17", own_teacher=True)
    with pytest.raises(ConfigError, match=r"^algorithm.top_k: 17 is more than the 16 tokens of model.path .*; set it"):
        check_models(config)


@pytest.mark.parametrize("own_teacher", [False, True])
def test_the_memory_of_a_teacher_is_that_of_its_own_size(tmp_path: Path, own_teacher: bool) -> None:
    """Where it has a role, and where the actor has it."""
    other = tmp_path / "large"
    config = with_other_model(other, "launcher.device_memory_gb=80", own_teacher=own_teacher)
    weights = load_file(other / "model.safetensors")
    save_file(weights | {"model.more.weight": torch.zeros(1_000_000)}, other / "model.safetensors")
    models = check_models(config)
    large = models.num_parameters + 1_000_000
    assert models.memory["teacher" if own_teacher else "ref"]["weights"] == 4 * large
    if not own_teacher:
        hosted = config.model_copy(update={"roles": {"rollout": 1, "actor": 1}})
        assert check_models(hosted).memory["actor"]["reference"] == 4 * large
        assert state_of_roles(hosted, 1, Trained(1), models.others)["actor"] == 16 + 4 * large


def test_the_memory_of_several_teachers_is_that_of_all(tmp_path: Path) -> None:
    """Each model once, whatever the number of its sources; and of their passes that of the largest."""
    source = "{path: quickstart/train.jsonl, name: %s}"
    mixture = ", ".join(source % name for name in "abc")
    small = shutil.copytree(find_recipe("quickstart").parent / "quickstart" / "model", tmp_path / "small")
    settings = (
        "data.path=null",
        f"data.mixture=[{mixture}]",
        f"teacher.sources={{a: {{path: {small}}}, b: {{path: {small}}}}}",
        "launcher.device_memory_gb=80",
    )
    models = check_models(with_other_model(tmp_path / "rest", *settings, own_teacher=True))
    assert models.memory["teacher"]["weights"] == 2 * 4 * models.num_parameters
    one = check_models(with_other_model(tmp_path / "one", "launcher.device_memory_gb=80", own_teacher=True))
    both = [
        {name: size for name, size in each.memory["teacher"].items() if name != "weights"} for each in (models, one)
    ]
    assert both[0] == both[1]
