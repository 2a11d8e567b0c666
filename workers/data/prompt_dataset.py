"""The prompts of a run, tokenized, in the order in which groups are admitted.

    group id     0 1 2 | 3 4 5 | 6 ...        D = 3 prompts
    epoch        0       1       2
    position     2 0 1   1 2 0   ...          permutation(seed, epoch), or 0 1 2 without shuffle

Group id -> (epoch, position) is a pure function, so a batch that an epoch does not fill goes on in the next one, and a
resumed run needs nothing but the next group id. Built in the process that admits groups; never scores, never batches.
"""

import functools
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.config import DataConfig
from workers.data.prompt_rows import PromptRow, check_fit, check_templates, conversation, nothing_fits, plain_text
from workers.data.tokenizer import load_tokenizer, missing_chat_template

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """The prompt of one group.

    Attributes:
        tokens: int64 [P].
        ground_truth: the reference answer as it stands in the file.
        epoch: number of passes over the data before this one.
        position: index into the prompts that were kept.
        text: what was tokenized, templates included.
    """

    tokens: Tensor
    ground_truth: str
    epoch: int
    position: int
    text: str


class PromptDataset:
    """D tokenized prompts and their order.

    Attributes:
        num_skipped: prompts left out because they are longer than `max_prompt_tokens`.
    """

    def __init__(self, rows: list[PromptRow], config: DataConfig, *, model_dir: Path, seed: int) -> None:
        """Tokenize all rows.

        Args:
            rows: of `read_prompt_rows`.
            model_dir: whose tokenizer and chat template apply.
            seed: of the order.
        Raises:
            ConfigError: a prompt is too long and `overlong` is `reject`, all prompts are too long, a prompt gives no
                tokens, or the tokenizer has no chat template.
        """
        check_templates(config)
        self._config = config
        self._seed = seed
        self._tokenizer = load_tokenizer(model_dir)
        if config.chat_template and not self._tokenizer.chat_template:
            raise missing_chat_template(model_dir)
        texts = [self._render(row.prompt) for row in rows]
        tokens = self._tokenizer(texts, add_special_tokens=not config.chat_template)["input_ids"]
        kept = [i for i, row in enumerate(rows) if check_fit(row, len(tokens[i]), config)]
        self.num_skipped = len(rows) - len(kept)
        if not kept:
            raise nothing_fits(len(rows), config)
        if self.num_skipped:
            logger.warning(
                "%d of %d prompts are longer than data.max_prompt_tokens = %d and left out",
                self.num_skipped, len(rows), config.max_prompt_tokens,
            )  # fmt: skip
        self._texts = [texts[i] for i in kept]
        self._ground_truths = [rows[i].ground_truth for i in kept]
        self._tokens = [np.asarray(tokens[i], dtype=np.int32) for i in kept]

    def __len__(self) -> int:
        """Return D, the number of prompts of one epoch."""
        return len(self._texts)

    def prompt(self, group: int) -> Prompt:
        """Return the prompt of a group; the same one for the same id, seed and data."""
        epoch, place = divmod(group, len(self))
        position = int(epoch_order(self._seed, epoch, len(self))[place]) if self._config.shuffle else place
        tokens = torch.from_numpy(self._tokens[position].astype(np.int64))
        return Prompt(tokens, self._ground_truths[position], epoch, position, self._texts[position])

    def _render(self, prompt: str) -> str:
        if not self._config.chat_template:
            return plain_text(prompt, self._config)
        messages = conversation(prompt, self._config)
        rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert isinstance(rendered, str), "a chat template renders one conversation to one text"
        return rendered


@functools.lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, num_prompts: int) -> NDArray[np.int64]:
    """Return a permutation of `num_prompts` positions, a pure function of its arguments.

    Sorts Philox's raw output, which numpy promises never to change; `Generator.permutation` may change.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    draws = np.asarray(np.random.Philox(key=key).random_raw(num_prompts))
    return np.argsort(draws, kind="stable")
