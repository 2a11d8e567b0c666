"""A task of the user's own: their function is called for every answer. It makes no columns but the one it names."""

import reprlib
from collections.abc import Iterator, Mapping

import torch

from asyncflow.errors import UserCodeFailed
from tq.batch import Column, PackedBatch
from workers.columns.config import UserTaskConfig
from workers.columns.row import ARGUMENTS, TaskRow
from workers.columns.task import ColumnTask
from workers.dataflow import LOSS_MASKS, TEXT_COLUMNS
from workers.rewards.base import as_number
from workers.tokenizer import TextDecoder
from workers.user_function import call, excerpt, load_function

_LARGEST = torch.finfo(torch.float32).max


class UserTask(ColumnTask):
    """Calls a function of one row; what it raises ends the run."""

    def __init__(self, config: UserTaskConfig, decoder: TextDecoder, *, num_rows: int) -> None:
        """Load the function.

        Args:
            config: of the task.
            decoder: of the model's tokens.
            num_rows: most rows at a time.

        Raises:
            ConfigError: there is no such function.
        """
        self.num_rows = num_rows
        self._config = config
        self._decoder = decoder
        self._function = load_function(config.function, field=f"task {config.name}: function", arguments=ARGUMENTS)

    def compute(self, batch: PackedBatch, _: int) -> Mapping[str, Column]:
        """Return the output, float32 [N].

        Raises:
            UserCodeFailed: the function raised, or returned no number that can be used; says which task and function.
        """
        values = [self._value(row) for row in self._rows(batch)]
        return {self._config.output: Column.of_scalars(torch.tensor(values, dtype=torch.float32))}

    def close(self) -> None:
        """Nothing is held."""

    def _rows(self, batch: PackedBatch) -> Iterator[TaskRow]:
        inputs, decoder, blank = self._config.inputs, self._decoder, [""] * len(batch)
        prompts = responses = answers = blank
        if "prompts" in inputs:
            prompts = [decoder.prompt(tokens.tolist()) for tokens in batch["prompts"].rows()]
        if "responses" in inputs:
            responses = [decoder.response(tokens.tolist()) for tokens in batch["responses"].rows()]
        if "answers" in inputs:
            answers = batch["answers"].texts()
        numbers = {name: batch[name].values.double().tolist() for name in inputs if name not in TEXT_COLUMNS}
        for k, texts in enumerate(zip(prompts, responses, answers, strict=True)):
            yield TaskRow(*texts, {name: values[k] for name, values in numbers.items()})

    def _value(self, row: TaskRow) -> float:
        what = f"task {self._config.name}: {self._config.function}"
        value = call(
            self._function, row,
            what=what, limit="its timeout_s", timeout_s=self._config.timeout_s,
            on=f"response {excerpt(row.response)}",
        )  # fmt: skip
        try:
            number = as_number(value)
        except Exception as error:  # the boundary to the user's objects
            raise UserCodeFailed(f"{what} returned {reprlib.repr(value)} instead of a number") from error
        if not abs(number) <= _LARGEST or (self._config.output == LOSS_MASKS and not 0 <= number <= 1):
            wanted = "between 0 and 1" if self._config.output == LOSS_MASKS else "that float32 holds"
            raise UserCodeFailed(
                f"{what} returned {number:g} on response {excerpt(row.response)}; "
                f"{self._config.output} must be a number {wanted}"
            )
        return number
