"""Several teachers: each gives the tokens of its sources' rows, whatever samples and pieces these are computed in."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncflow.timeline import NoTimeline
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from tq.columns import Column, PackedBatch
from workers.rows.packed_rows import Sequences
from workers.settings.run import RunConfig
from workers.tasks import column_tasks
from workers.tasks.chain import TaskChain

FACTORS = {"sums": -1.0, "products": -100.0, "": -10_000.0}
"""Of each source's teacher; the last one's is the other rows'."""


class Teacher:
    """A token's log-probability is the token times a factor, its K likeliest tokens are the next ones."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def log_probs(self, batch: Sequences) -> Tensor:
        return batch.tokens_T[batch.response_mask_T.bool()] * self._factor

    def top_log_probs(self, batch: Sequences, k: int, *, num_tokens: int) -> tuple[Tensor, Tensor]:
        ids_AK = batch.tokens_T[batch.response_mask_T.bool()].unsqueeze(1) + torch.arange(k)
        return ids_AK.int(), ids_AK * self._factor


def config_of(top_k: int, *, own_rollout: bool) -> RunConfig:
    settings = [
        f"algorithm={{name: distill, teacher_coef: 1.0, top_k: {top_k}}}",
        "data={mixture: [{path: quickstart/train.jsonl, name: sums}, {path: quickstart/train.jsonl, name: products}, "
        "{path: quickstart/train.jsonl, name: others}], max_prompt_tokens: 8}",
        # Any directories: nothing is read there.
        "teacher={path: quickstart/model, sources: {sums: {path: quickstart/reward_model}, "
        "products: {path: quickstart_tools}}}",
        "actor.max_tokens_per_micro_batch=10",
        *(["rollout.function=tools"] if own_rollout else []),
    ]
    return load_config(find_recipe("quickstart"), overrides=settings, roles="rollout:1,actor:1")


def rollouts(sources: list[str], *rows: list[int]) -> PackedBatch:
    """Rows with samples of these lengths; token k of all is k, and every second one was drawn."""
    total = sum(map(sum, rows))
    lengths = torch.tensor([sum(samples) for samples in rows], dtype=torch.int32)
    columns = {
        "tokens": Column(torch.arange(total), lengths),
        "sample_lengths": Column.of_rows([torch.tensor(samples, dtype=torch.int32) for samples in rows]),
        "response_mask": Column((torch.arange(total) % 2).to(torch.uint8), lengths),
        "sources": Column.of_texts(sources),
    }
    return PackedBatch(tuple(range(len(rows))), columns)


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("own_rollout", [False, True])
def test_each_drawn_token_is_judged_by_the_teacher_of_its_rows_source(
    top_k: int, own_rollout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors = dict(zip(("reward_model", "quickstart_tools", "model"), FACTORS.values(), strict=True))
    monkeypatch.setattr(column_tasks, "load_teacher", lambda _, path, **__: Teacher(factors[path.name]))
    monkeypatch.setattr(column_tasks, "tokens_of", lambda _: 10_000)
    config = config_of(top_k, own_rollout=own_rollout)
    context: Any = SimpleNamespace(
        config=config, device=torch.device("cpu"), timeline=NoTimeline(), report_state=lambda *_: None
    )
    samples = [[8, 7], [2, 3, 4], [12], [1], [6, 6]] if own_rollout else [[15], [9], [12], [1], [12]]
    sources = ["products", "others", "sums", "sums", "products"]
    made = TaskChain(["teacher_log_probs"], context).add_columns(rollouts(sources, *samples), step=1)
    begin = 0
    for row, (source, lengths) in enumerate(zip(sources, samples, strict=True)):
        drawn = [token for token in range(begin, begin + sum(lengths)) if token % 2]
        factor = FACTORS.get(source, FACTORS[""])
        wanted = [token + k for token in drawn for k in range(max(1, top_k))]
        name = "teacher_top_log_probs" if top_k else "teacher_log_probs"
        assert list(made[name].rows())[row].tolist() == [number * factor for number in wanted]
        if top_k:
            assert list(made["teacher_top_ids"].rows())[row].tolist() == wanted
        begin += sum(lengths)
