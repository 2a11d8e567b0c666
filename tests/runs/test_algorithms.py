"""Every algorithm learns the quickstart's task; groups that teach nothing are replaced, wherever they are scored."""

from pathlib import Path

import pytest

from workers.records.ledger_file import read_ledger

from . import command

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 270
"""Of one run, also on a machine that others use."""
LEAN = ("--set", "algorithm.kl_coef=0", "--set", "checkpoint.interval=0", "--set", "rollout.samples_per_step=0")
DAPO = ("--set", "algorithm.name=dapo", "--set", "reward.function=exact")
SMALL = ("--set", "schedule.rollout_batch_size=8", "--set", "schedule.n_samples_per_prompt=8",
         "--set", "actor.micro_batch_size=8")  # fmt: skip


def test_kept_masks_reach_every_model_that_gives_log_probabilities(tmp_path: Path) -> None:
    """The generator reports those of what top-p and top-k leave; so do trainer, old policy and reference."""
    own = ("rollout.top_p=0.8", "rollout.top_k=6", "rollout.keep_sampling_mask=true", "actor.num_mini_batches=2")
    settings = [argument for setting in own for argument in ("--set", setting)]
    placed = ("--run-dir", "run", "--roles", "rollout:1,actor:1,ref:1", "--steps", "2", *settings)
    finished = command.run(*placed, *SMALL, cwd=tmp_path, deadline_s=DEADLINE_S)
    assert finished.returncode == 0, finished.stderr
    first = command.lines(tmp_path / "run/metrics.jsonl")[0]
    assert first["rollout_log_prob_diff_max"] < 1e-4
    assert first["old_policy_kl"] < 1e-6, "the pass before the updates has the masks"
    assert 0 < first["kl"] < 0.3, "the reference has them: over the whole distribution it would be nats away"
    assert "draws from a part of the distribution" not in finished.stderr + finished.stdout


def test_dppos_likeliest_tokens_bound_updates_of_one_rank_and_of_two_alike(tmp_path: Path) -> None:
    """In the second update, of the same responses, the policy has moved."""
    own = ("algorithm.name=dppo", "algorithm.divergence_top_k=5", "algorithm.max_divergence=0.02", "deterministic=true",
           "schedule.mode=sync", "actor.ppo_epochs=2", "actor.lr=0.003")  # fmt: skip
    settings = [argument for setting in own for argument in ("--set", setting)]
    found = []
    for ranks in (1, 2):
        placed = ("--run-dir", f"run-{ranks}", "--roles", f"rollout:1,actor:{ranks}", "--steps", "1", *LEAN, *settings)
        finished = command.run(*placed, *SMALL, cwd=tmp_path, deadline_s=DEADLINE_S)
        assert finished.returncode == 0, finished.stderr
        found += command.lines(tmp_path / f"run-{ranks}/metrics.jsonl")
    one, two = found
    assert 0 < one["clip_fraction"] < 1
    for name in ("clip_fraction", "loss", "grad_norm", "behaviour_kl", "reward_mean"):
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize("settings", [
    ("algorithm.name=dapo", "algorithm.overlong_buffer_tokens=1"), ("algorithm.name=rloo",), ("algorithm.name=gspo",),
    ("algorithm.name=reinforce_plus_plus",), ("algorithm.name=reinforce_plus_plus", "algorithm.baseline=group"),
    ("algorithm.scale_advantages_by_std=false", "algorithm.loss_normalization=constant"),
    ("algorithm.name=cispo",), ("algorithm.name=dppo",), ("algorithm.name=dppo", "algorithm.divergence=kl"),
    ("algorithm.name=dppo", "algorithm.divergence_top_k=4", "actor.num_mini_batches=2"),
    ("algorithm.off_policy.method=icepop", "algorithm.off_policy.mask=geometric"),
    ("algorithm.off_policy.mask=sequence",),
    ("algorithm.name=custom_algorithm:SoftGated", f"code_directory={EXAMPLES}"),
], ids=[
    "dapo", "rloo", "gspo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "dr_grpo",
    "cispo", "dppo_tv", "dppo_kl", "dppo_top_k", "icepop_geometric_mask", "sequence_mask", "custom",
])  # fmt: skip
def test_an_algorithm_learns_the_quickstart(tmp_path: Path, settings: tuple[str, ...]) -> None:
    own = [argument for setting in settings for argument in ("--set", setting)]
    finished = command.run(
        "--run-dir",
        "run",
        "--roles",
        "rollout:1,actor:1",
        "--steps",
        "12",
        *LEAN,
        *own,
        cwd=tmp_path,
        deadline_s=DEADLINE_S,
    )
    assert finished.returncode == 0, finished.stderr
    accuracy = [line["accuracy"] for line in command.lines(tmp_path / "run" / "metrics.jsonl")]
    assert accuracy[0] < 0.4
    assert sum(accuracy[-3:]) / 3 > accuracy[0] + 0.2
    command.check_verified(tmp_path / "run", last=12)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("roles", ["rollout:1,actor:1", "rollout:2,actor:1,reward:1"])
def test_groups_of_equal_rewards_are_replaced_once_also_over_a_resume(tmp_path: Path, roles: str) -> None:
    first = command.run(
        "--run-dir", "run", "--roles", roles, "--steps", "3", *LEAN, *DAPO, *SMALL, cwd=tmp_path, deadline_s=DEADLINE_S
    )
    assert first.returncode == 0, first.stderr
    known = {line.group for _, line in read_ledger(tmp_path / "run").filtered}
    assert known
    resumed = command.run("--run-dir", "run", "--resume", "latest", "--steps", "6", cwd=tmp_path, deadline_s=DEADLINE_S)
    assert resumed.returncode == 0, resumed.stderr
    ledger = read_ledger(tmp_path / "run")
    filtered, trained = [line.group for _, line in ledger.filtered], [line.group for _, line in ledger.trained]
    assert known < set(filtered) and len(set(filtered)) == len(filtered)
    assert len(trained) == 6 * 8 and not set(trained) & set(filtered)
    metrics = command.lines(tmp_path / "run" / "metrics.jsonl")
    assert sum(line["filtered_groups"] for line in metrics) == len(filtered)
    assert all(line["reward_std"] > 0 for line in metrics)
    command.check_verified(tmp_path / "run", last=6)


def test_a_reward_that_is_always_the_same_ends_the_run_and_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "constant_reward.py").write_text("def score(prompt, response, ground_truth):\n    return 0.5\n")
    constant = ("--set", "reward.function=constant_reward:score", "--set", "algorithm.max_filtered_share=0.5")
    failed = command.run(
        "--run-dir",
        "run",
        "--roles",
        "rollout:1,actor:1",
        *LEAN,
        *DAPO,
        *SMALL,
        *constant,
        cwd=tmp_path,
        deadline_s=DEADLINE_S,
    )
    assert failed.returncode == 1
    last = failed.stderr.splitlines()[-1]
    assert "groups, 53% of those that were generated for it" in last
    assert "raise algorithm.max_filtered_share" in last


def test_what_dynamic_sampling_cannot_be_with_is_refused(tmp_path: Path) -> None:
    for settings, message in (
        (
            ("deterministic=true", "schedule.mode=sync", "algorithm.name=dapo"),
            "deterministic: true cannot be used with",
        ),
        (("algorithm.name=grpo", "algorithm.overlong_buffer_tokens=8"), "it is a setting of dapo"),
        (("algorithm.name=dapoo",), "did you mean 'dapo'?"),
    ):
        own = [argument for setting in settings for argument in ("--set", setting)]
        refused = command.run("--run-dir", "run", *own, "--dry-run", cwd=tmp_path, deadline_s=DEADLINE_S)
        assert refused.returncode == 2 and message in refused.stderr, refused.stderr
