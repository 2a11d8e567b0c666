"""A task of the user's own: their function is called for every response. It makes no columns but the one it names."""

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Future

import torch

from asyncflow.errors import UserCodeFailed
from tq.columns import Column, PackedBatch
from workers.calls.pool import CallPool, Entry
from workers.calls.user_function import excerpt
from workers.data.tokenizer import TextDecoder
from workers.rows.rows import responses_of
from workers.settings.dataflow import LOSS_WEIGHTS, TEXT_COLUMNS
from workers.settings.tasks import UserTaskConfig
from workers.tasks.column_tasks import ColumnTask
from workers.tasks.row import TaskRow

_LARGEST = torch.finfo(torch.float32).max


class UserTask(ColumnTask):
    """Calls a function of one row, in child processes; what it raises ends the run."""

    def __init__(self, config: UserTaskConfig, decoder: TextDecoder, *, num_rows: int) -> None:
        """Load the function.

        Args:
            decoder: of the model's tokens.
            num_rows: most rows at a time.

        Raises:
            ConfigError: there is no such function.
        """
        self.num_rows = num_rows
        self._config = config
        self._decoder = decoder
        self._what = f"task {config.name}: {config.function}"
        field = f"task {config.name}: function"
        self._pool = CallPool(
            Entry(
                "workers.tasks.row:task_function",
                {"what": self._what, "function": config.function, "field_name": field},
            ),
            what=self._what,
            limit="its timeout_s",
            timeout_s=config.timeout_s,
            concurrency=config.concurrency,
        )
        try:
            self._pool.until_ready()
        except BaseException:
            self._pool.close()
            raise

    def compute(self, batch: PackedBatch, _: int) -> Mapping[str, Column]:
        """Return the output, float32 [N].

        The function is not called on a row that lacks one of its numbers (NaN: the reward failed, so the row has no
        weight): its weight is 0, any other output NaN.

        Raises:
            UserCodeFailed: the function raised, or returned no number that can be used; says which task and function.
        """
        rows = list(self._rows(batch))
        calls = [None if any(map(math.isnan, row.columns.values())) else self._called(row) for row in rows]
        missing = 0.0 if self._config.output == LOSS_WEIGHTS else math.nan
        values = [
            missing if call is None else self._checked(call.result(), row)
            for call, row in zip(calls, rows, strict=True)
        ]
        return {self._config.output: Column.of_scalars(torch.tensor(values, dtype=torch.float32))}

    def close(self) -> None:
        """End the children."""
        self._pool.close()

    def _called(self, row: TaskRow) -> "Future[float]":
        return self._pool.submit(
            row.prompt, row.response, row.ground_truth, row.columns, on=f"response {excerpt(row.response)}"
        )

    def _rows(self, batch: PackedBatch) -> Iterator[TaskRow]:
        inputs, decoder, blank = self._config.inputs, self._decoder, [""] * len(batch)
        prompts = responses = ground_truths = blank
        if "prompts" in inputs:
            prompts = [decoder.prompt(tokens.tolist()) for tokens in batch["prompts"].rows()]
        if "responses" in inputs:
            responses = [decoder.response(tokens.tolist()) for tokens in responses_of(batch)]
        if "ground_truth" in inputs:
            ground_truths = batch["ground_truth"].texts()
        numbers = {name: batch[name].values.double().tolist() for name in inputs if name not in TEXT_COLUMNS}
        for k, texts in enumerate(zip(prompts, responses, ground_truths, strict=True)):
            yield TaskRow(*texts, {name: values[k] for name, values in numbers.items()})

    def _checked(self, number: float, row: TaskRow) -> float:
        if not abs(number) <= _LARGEST or (self._config.output == LOSS_WEIGHTS and not 0 <= number <= 1):
            wanted = "between 0 and 1" if self._config.output == LOSS_WEIGHTS else "that float32 holds"
            raise UserCodeFailed(
                f"{self._what} returned {number:g} on response {excerpt(row.response)}; "
                f"{self._config.output} must be a number {wanted}"
            )
        return number
