"""What engines are made from."""

import pytest

from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from workers.engines.base import longest_call


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ([], 48),
        (["vllm.max_model_len=24"], 48),
        (["rollout.engine=vllm"], 48),
        (["rollout.engine=vllm", "vllm.max_model_len=24"], 24),
        (["rollout.engine=vllm", "vllm.max_model_len=24", "rollout.max_context_tokens=20"], 20),
    ],
)
def test_a_turn_is_cut_where_its_engine_would_refuse_it(settings: list[str], longest: int) -> None:
    run = load_config(find_recipe("quickstart-tools"), overrides=settings)
    assert longest_call(run, run.rollout) == longest
