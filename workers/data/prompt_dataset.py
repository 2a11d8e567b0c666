"""The tokenized prompts of a run, in the order in which groups are admitted.

    group id     0 1 2 | 3 4 5 | 6 ...        D = 3 prompts
    epoch        0       1       2
    position     2 0 1   1 2 0   ...          permutation(seed, epoch), or 0 1 2 without shuffle

Group id -> (epoch, position) is a pure function, also for a mixture (`Mixture`). So a batch may span two epochs, and a
resumed run needs only the next group id. Tasks of a source (`data.source`) are made and tokenized on demand; endless
sources and feeds are taken in their own order. Built in the process that admits groups.
"""

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncflow.errors import ConfigError
from asyncflow.run_files import FEED_FILE
from workers.data.feed_file import FeedFile
from workers.data.model_files import eos_token_ids, load_raw_tokenizer
from workers.data.prompt_rows import (
    CHUNK,
    PromptRow,
    as_row,
    check_fit,
    check_left,
    conversation,
    ending_text,
    long_rows_text,
    plain_text,
    read_data,
)
from workers.data.supervised_rows import SupervisedTokens, TokenizedRow
from workers.data.task_source import TaskSource
from workers.data.tokenizer import PROBES, load_tokenizer, missing_chat_template, says_all
from workers.settings.data import BLOCK, DataConfig
from workers.settings.run import RunConfig

logger = logging.getLogger(__name__)

_COMPARED = 256  # rows whose tokens are compared with those that were checked before the start
_STREAM = 2**32  # larger than any seed: gives the orders of a mixture and of its sources their own keys


@dataclass(frozen=True)
class Prompt:
    """The prompt of one group."""

    tokens: Tensor  # int64 [P]
    ground_truth: str
    epoch: int  # number of earlier passes over the data (mixture: over the prompt's source)
    position: int  # index among the prompts that were kept, or of the source's task
    text: str  # what was tokenized, with templates applied
    task: str = ""  # the whole row as JSON text; may be "" if no user rollout or reward receives it
    source: str = ""
    mask: Tensor | None = None  # SFT: uint8 [P], 1: a token that is trained; None: a response is generated


class Prompts(Protocol):
    @property
    def size(self) -> int | None:
        """Prompts per epoch; None: they never end."""

    def place(self, group: int) -> tuple[int, int]:
        """Return (epoch, position) of a group: a pure function of seed and data."""

    def prompt_at(self, position: int, *, epoch: int = 0) -> Prompt:
        """Return the prompt at a position."""

    def prompt_of_group(self, group: int) -> Prompt:
        """Return the prompt of a group; deterministic given seed and data."""

    def close(self) -> None:
        """Release the source of the prompts; idempotent."""


def open_prompts(
    config: RunConfig, run_dir: Path, tokenizer: Any = None, *, progress: Callable[[str], None] = lambda done: None
) -> Prompts:
    """Return the prompts that a run trains on; those of a feed are a read-only view of the rows put so far.

    `progress`: see `PromptDataset`. Raises ConfigError if the data cannot be used, UserCodeFailed if the source failed.
    """
    data, model_dir, own = config.data, Path(config.model.path), config.rollout.is_own
    if data.source is None:
        rows = read_data(data, own_rollout=own)
        return PromptDataset(
            rows, data,
            model_dir=model_dir, seed=config.seed, own_rollout=own, with_tasks=config.sends_tasks, tokenizer=tokenizer,
            progress=progress,
        )  # fmt: skip
    tokens = PromptTokens(data, model_dir=model_dir, own_rollout=own, tokenizer=tokenizer)
    if data.is_feed:
        return FedPrompts(FeedFile(run_dir / FEED_FILE), tokens)
    source = TaskSource(data, seed=config.seed, own_rollout=own)
    return SourcePrompts(source, tokens, seed=config.seed, shuffle=data.shuffle)


class PromptTokens:
    """Renders and tokenizes rows according to `data`.

    A user's rollout function (`own_rollout`) makes its own prompts. Its rows keep the plain text of the prompt field,
    without templates and of any length, for the reward and the ledger; a row without one gets a single end token.
    Raises ConfigError if there is no tokenizer or no chat template.
    """

    def __init__(self, config: DataConfig, *, model_dir: Path, own_rollout: bool, tokenizer: Any = None) -> None:
        self.config = config
        self._chat = config.chat_template and not own_rollout
        self.own_rollout = own_rollout
        self._tokenizer = load_tokenizer(model_dir, config.templates) if tokenizer is None else tokenizer
        self._raw = load_raw_tokenizer(model_dir) if says_all(model_dir) else None
        self._model_dir = model_dir
        if self._chat and not self._tokenizer.chat_template:
            raise missing_chat_template(model_dir, config.key("chat_template"))
        self._supervised = None
        if config.completion_field is not None:
            self._supervised = SupervisedTokens(config, model_dir=model_dir, tokenizer=self._tokenizer)

    def tokenize_rows(self, rows: Sequence[PromptRow]) -> tuple[list[str], list[list[int]]]:
        texts = [self._render_row(row) for row in rows]
        tokens = self._tokenizer(texts, add_special_tokens=not self._chat)["input_ids"]
        self._compare_tokens(texts[:_COMPARED], tokens)
        if self.own_rollout:
            tokens = [ids or [self._tokenizer.eos_token_id or 0] for ids in tokens]
        return texts, tokens

    def make_rows(self, rows: Sequence[PromptRow]) -> list[TokenizedRow]:
        """Tokenize rows, those of SFT with their completions. Raises ConfigError as `SupervisedTokens` does."""
        if self._supervised is not None:
            return [self._supervised.tokenize_row(row) for row in rows]
        return [TokenizedRow(text, tokens) for text, tokens in zip(*self.tokenize_rows(rows), strict=True)]

    def _compare_tokens(self, texts: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        """Refuse a transformers tokenizer that differs from tokenizer.json, which was checked before the start."""
        # Once per run: with the first rows, and with some texts of our own.
        raw, self._raw = self._raw, None
        if raw is None:
            return
        from transformers import __version__

        own = self._tokenizer(list(PROBES), verbose=False)["input_ids"]
        expected = [one.ids for one in raw.encode_batch_fast(list(PROBES))]
        expected += [one.ids for one in raw.encode_batch_fast(list(texts), add_special_tokens=not self._chat)]
        for text, one, other in zip([*PROBES, *texts], [*own, *tokens], expected, strict=False):
            if one != other:
                raise ConfigError(
                    f"model.path: the tokenizer that transformers {__version__} makes of {self._model_dir} gives "
                    f"{self._tokenizer.convert_ids_to_tokens(one)} for {text!r}, where tokenizer.json gives "
                    f"{raw.encode(text, add_special_tokens=False).tokens}; use another version of transformers"
                )

    def row_fits(self, row: PromptRow, num_tokens: int) -> bool:
        return self.own_rollout or check_fit(row, num_tokens, self.config)

    def check_end(self, row: PromptRow, tokens: Sequence[int]) -> None:
        """Raise ConfigError for a prompt, made during the run, that ends with a token that ends responses."""
        if not self.own_rollout and row.completion is None and tokens[-1] in eos_token_ids(self._model_dir):
            end = f"{self._tokenizer.convert_ids_to_tokens(tokens[-1])} ({tokens[-1]})"
            raise ending_text(row.describe_place(self.config), end)

    def _render_row(self, row: PromptRow) -> str:
        if self.own_rollout:
            return str(row.prompt)
        if not self._chat:
            return plain_text(row.prompt, self.config)
        messages = conversation(row.prompt, self.config)
        rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert isinstance(rendered, str), "a chat template renders one conversation to one text"
        return rendered


class PromptDataset:
    """D tokenized prompts and their order.

    Args:
        rows: from `read_data`.
        own_rollout: a user's rollout function takes the rows.
        with_tasks: keep whole rows (`Prompt.task`).
        progress: told how far it is, again and again.

    `num_skipped`: prompts left out because they are longer than `max_prompt_tokens`. Raises ConfigError if a prompt has
    no tokens, is too long and `overlong` is `reject`, or all are too long.
    """

    def __init__(
        self,
        rows: list[PromptRow],
        config: DataConfig,
        *,
        model_dir: Path,
        seed: int,
        own_rollout: bool = False,
        with_tasks: bool = False,
        tokenizer: Any = None,
        progress: Callable[[str], None] = lambda done: None,
    ) -> None:
        self._config = config
        self._seed = seed
        maker = PromptTokens(config, model_dir=model_dir, own_rollout=own_rollout, tokenizer=tokenizer)
        kept: list[int] = []
        self._texts: list[str] = []
        self._tokens: list[NDArray[np.int32]] = []
        self._masks: list[NDArray[np.uint8] | None] = []
        for begin in range(0, len(rows), CHUNK):  # a large set takes minutes, and lists of it many times its arrays
            progress(f"tokenized {begin} of {len(rows)} rows")
            for i, made in enumerate(maker.make_rows(rows[begin : begin + CHUNK]), begin):
                if maker.row_fits(rows[i], len(made.tokens)):
                    kept.append(i)
                    self._texts.append(made.text)
                    self._tokens.append(np.asarray(made.tokens, dtype=np.int32))
                    self._masks.append(None if made.mask is None else np.asarray(made.mask, dtype=np.uint8))
        self.num_skipped = len(rows) - len(kept)
        left = Counter(rows[i].part for i in kept)
        check_left(rows, left, config)
        sizes, shuffle = [left[part] for part in sorted(left)], config.shuffle
        self._mixture = Mixture(config.block, sizes, seed=seed, shuffle=shuffle) if config.mixture else None
        if self.num_skipped:
            logger.warning("%s", long_rows_text(self.num_skipped, f"{len(rows)} prompts", config))
        self._ground_truths = [rows[i].ground_truth for i in kept]
        self._tasks = [rows[i].task if with_tasks else "" for i in kept]
        names = config.source_names or ("",)
        self._sources = [names[rows[i].part] for i in kept]

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def size(self) -> int:
        return len(self)

    def place(self, group: int) -> tuple[int, int]:
        if self._mixture is not None:
            return self._mixture.place(group)
        return _place(group, len(self), seed=self._seed, shuffle=self._config.shuffle)

    def prompt_at(self, position: int, *, epoch: int = 0) -> Prompt:
        tokens = torch.from_numpy(self._tokens[position].astype(np.int64))
        task, truth, mask = self._tasks[position], self._ground_truths[position], self._masks[position]
        return Prompt(
            tokens, truth, epoch, position, self._texts[position], task, self._sources[position],
            mask=None if mask is None else torch.from_numpy(mask),
        )  # fmt: skip

    def prompt_of_group(self, group: int) -> Prompt:
        epoch, position = self.place(group)
        return self.prompt_at(position, epoch=epoch)

    def close(self) -> None:
        """Nothing is open."""


class SourcePrompts:
    """The tasks of a source, tokenized on demand. For one thread; closes the source. `size`: tasks per epoch; None:
    endless, so that group g has task g and `shuffle` does not apply."""

    def __init__(self, source: TaskSource, tokens: PromptTokens, *, seed: int, shuffle: bool) -> None:
        self._source, self._tokens = source, tokens
        self._seed, self._shuffle = seed, shuffle
        self.size = source.size

    def place(self, group: int) -> tuple[int, int]:
        if self.size is None:
            return 0, group
        return _place(group, self.size, seed=self._seed, shuffle=self._shuffle)

    def prompt_at(self, position: int, *, epoch: int = 0) -> Prompt:
        """Make a task; raises UserCodeFailed if the source fails, ConfigError if the task lacks a field or is
        too long."""
        row = self._source.read_row(position)
        (made,) = self._tokens.make_rows([row])
        self._tokens.row_fits(row, len(made.tokens))
        self._tokens.check_end(row, made.tokens)
        return _prompt(row, made, epoch, position)

    def prompt_of_group(self, group: int) -> Prompt:
        epoch, position = self.place(group)
        return self.prompt_at(position, epoch=epoch)

    def close(self) -> None:
        self._source.close()


def _prompt(row: PromptRow, made: TokenizedRow, epoch: int, position: int) -> Prompt:
    tokens = torch.tensor(made.tokens, dtype=torch.int64)
    mask = None if made.mask is None else torch.tensor(made.mask, dtype=torch.uint8)
    return Prompt(tokens, row.ground_truth, epoch, position, made.text, row.task, mask=mask)


class FedPrompts:
    """The rows of a feed, tokenized on demand: group g has row g. Thread-safe; closes `rows`.

    After the feed's end, a group that replaces another may need one more row: then rows repeat from the first.

    `size`: None, even after the end.
    """

    def __init__(self, rows: FeedFile, tokens: PromptTokens) -> None:
        self.rows = rows
        self.size: int | None = None
        self._tokens = tokens
        self._lock = threading.Lock()  # several threads share the tokenizer

    def place(self, group: int) -> tuple[int, int]:
        """Return (0, row), or (1, row from the start) beyond the last row of a feed that has ended."""
        fed = self.rows.fed
        return divmod(group, fed.num_rows) if fed.ended else (0, group)

    def prompt_at(self, position: int, *, epoch: int = 0) -> Prompt:
        ((row, made),) = self._tokenize_rows([self.rows.read_row(position)])
        return _prompt(row, made, epoch, position)

    def prompt_of_group(self, group: int) -> Prompt:
        epoch, position = self.place(group)
        return self.prompt_at(position, epoch=epoch)

    def check(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raise ConfigError if a row of a put lacks its prompt or ground truth, or has no tokens or too many."""
        if rows:
            self._tokenize_rows(rows)

    def close(self) -> None:
        self.rows.close()

    def _tokenize_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[PromptRow, TokenizedRow]]:
        config, own_rollout = self._tokens.config, self._tokens.own_rollout
        given = [
            as_row(dict(fields), number, config, own_rollout=own_rollout, where=config.place(number))
            for number, fields in enumerate(rows, start=1)
        ]
        with self._lock:
            made = self._tokens.make_rows(given)
        for row, one in zip(given, made, strict=True):
            self._tokens.row_fits(row, len(one.tokens))
            self._tokens.check_end(row, one.tokens)
        return list(zip(given, made, strict=True))


class Mixture:
    """Maps groups to rows when several sources have weights.

        block 0                     block 1: `BLOCK` groups; each source has its fixed number of them in every block
        0 1 0 0 2 0 1 0 0 0 ...     0 0 1 2 ...           source of each group, permuted per block
        | |   |   '- row 0 of epoch 0 of source 2          each source goes through its rows like a single file

    Nothing is drawn at random: shares are exact, and a group's row is computed without those before it.

    Args:
        block: groups of each source in a block.
        sizes: rows of each source; sources are concatenated.
        shuffle: if false, sources take turns as evenly as possible, each in file order.
    """

    def __init__(self, block: Sequence[int], sizes: Sequence[int], *, seed: int, shuffle: bool) -> None:
        self._block, self._sizes, self._seed, self._shuffle = block, sizes, seed, shuffle
        # Place the k-th turn of a source at (k + 0.5) / its number of turns, and sort: an even spread.
        turns = np.concatenate([(np.arange(number) + 0.5) / number for number in block])
        self._turns = np.repeat(np.arange(len(block)), block)[np.argsort(turns, kind="stable")]

    def place(self, group: int) -> tuple[int, int]:
        """Return (passes over the source so far, position) of a group's row."""
        number, slot = divmod(group, BLOCK)
        parts = self._turns
        if self._shuffle:
            parts = parts[epoch_order(self._seed + _STREAM, number, BLOCK)]
        part = int(parts[slot])
        earlier = number * self._block[part] + int(np.count_nonzero(parts[:slot] == part))
        seed = self._seed + (2 + part) * _STREAM
        epoch, place = _place(earlier, self._sizes[part], seed=seed, shuffle=self._shuffle)
        return epoch, sum(self._sizes[:part]) + place


def _place(group: int, size: int, *, seed: int, shuffle: bool) -> tuple[int, int]:
    epoch, place = divmod(group, size)
    return epoch, int(epoch_order(seed, epoch, size)[place]) if shuffle else place


@functools.lru_cache(maxsize=16)
def epoch_order(seed: int, epoch: int, num_prompts: int) -> NDArray[np.int64]:
    """Return a permutation of `num_prompts` positions, a pure function of its arguments."""
    key = np.array([seed, epoch], dtype=np.uint64)
    # numpy promises never to change Philox's raw output; `Generator.permutation` may change.
    draws = np.asarray(np.random.Philox(key=key).random_raw(num_prompts))
    return np.argsort(draws, kind="stable")
