"""Engines and a queue in one process: what a loop by hand asks of them."""

import pytest
import torch

import asyncflow
from asyncflow.errors import ConfigError, DeadlineExceeded
from workers.rows.packed_rows import sequences_of

ROWS = [{"prompt": "3+5=", "answer": "8"}, {"prompt": "9+9=", "answer": "18"}]
SMALL = {"schedule.n_samples_per_prompt": 4, "schedule.rollout_batch_size": 2, "actor.micro_batch_size": 4}


@pytest.mark.gate
def test_a_step_by_hand_trains_and_the_generator_draws_by_the_new_weights() -> None:
    trainer = asyncflow.Trainer("quickstart", overrides={**SMALL, "algorithm.kl_coef": 0.01})
    with trainer.init_engines() as engines:
        for step in (1, 2):
            engines.put_prompts_data(ROWS)
            prompts = engines.get_experience_data("actor_rollout")
            engines.put_experience_data(prompts, engines.generate_sequences(prompts))
            batch = engines.get_experience_data("rewards")
            assert batch["ground_truth"].texts() == ["8"] * 4 + ["18"] * 4
            rewards = [float(len(text)) + k % 2 for k, text in enumerate(engines.responses(batch))]
            with pytest.raises(ConfigError, match="give rewards correct"):
                engines.put_experience_data(batch, {"rewards": rewards})
            engines.put_experience_data(batch, {"rewards": rewards, "correct": [False] * 8})
            batch = engines.get_experience_data("actor_train")
            drawn = batch["rollout_log_probs"].values
            assert set(batch["versions"].values.tolist()) == {step - 1}
            torch.testing.assert_close(engines.trainer.log_probs(sequences_of(batch.batch)), drawn, atol=1e-3, rtol=0)
            figures = engines.update(batch)
            assert figures["step"] == step
            with pytest.raises(ConfigError, match="update: the lease was trained on already; get another one"):
                engines.update(batch)
            assert figures["grad_norm"] > 0
            assert figures["reward_mean"] == pytest.approx(sum(rewards) / 8)
            moved = engines.trainer.log_probs(sequences_of(batch.batch)) - drawn
            assert float(moved.abs().max()) > 2e-3  # so that equality above says something of the next step
            engines.put_experience_data(batch)
            assert engines.weight_sync_notify() == step
        with pytest.raises(DeadlineExceeded, match="task rewards: no row was ready within 0.1 s"):
            engines.get_experience_data("rewards", timeout_s=0.1)
        with pytest.raises(ConfigError, match="actor_rollout rewards actor_train"):
            engines.get_experience_data("score")
        with pytest.raises(ConfigError, match="row 0: no field 'prompt'"):
            engines.put_prompts_data([{"question": "1+1="}])
    assert not torch.distributed.is_initialized()


def test_a_subclass_generates_in_its_own_way() -> None:
    class Constant(asyncflow.LocalEngines):
        def generate_sequences(self, lease):  # type: ignore[no-untyped-def]
            columns = dict(super().generate_sequences(lease))
            columns["truncated"] = [True] * len(lease)
            return columns

    with asyncflow.Trainer("quickstart", overrides=SMALL).init_engines(Constant) as engines:
        for wrong in ([], "1+1=", ROWS[0], ["1+1="]):
            with pytest.raises(ConfigError, match="is not a list of rows; give one dict or more, in a list"):
                engines.put_prompts_data(wrong)
        with pytest.raises(ConfigError, match=r"the prompt has \d+ tokens, more than data.max_prompt_tokens = "):
            engines.put_prompts_data([*ROWS, {"prompt": "11111111111111111111+1=", "answer": "2"}])
        engines.put_prompts_data(ROWS[:1])
        prompts = engines.get_experience_data("actor_rollout")
        engines.put_experience_data(prompts, engines.generate_sequences(prompts))
        assert engines.get_experience_data("rewards").rows == prompts.rows
