"""The file of `asyncflow profile`: measured durations of blocks on a device, and predictions for a whole model. Pure.

The profile measures a model of one layer and one of several. Their difference is the cost of layers; the rest is that
of the embedding, the head and the Python around them. A model of any number of layers is predicted from these two.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from asyncflow.errors import ConfigError
from asyncflow.json_lines import replace_text
from launcher.plan.scenario import Work, prompt_tokens_of
from workers.engines.device_memory import ModelSizes
from workers.settings.run import RunConfig

FORMAT = 2
TRAIN, FORWARD, OPTIMIZER, PREFILL, DECODE = "train", "forward", "optimizer", "prefill", "decode"
LATER_TURN = "later turn"
"""Like `PREFILL`, but no two responses share a prompt."""
COPY_OUT, COPY_IN = "copy_out", "copy_in"
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send and recv")
_COPIED = 2**26
EXCHANGED = (2**16, 2**20, 2**24)
"""Sizes of collectives (bytes): of all ranks together where each rank has a part."""
_OTHER_PARAMETERS = 0.01
"""Share of a model's parameters that config.json may not account for."""
_STATE_BYTES = 24
"""Bytes per parameter: training state, and a copy of the weights from which the engine is built."""


@dataclass(frozen=True)
class MeasuredBlock:
    """One measurement.

    Attributes:
        name: one of the constants above.
        rows: samples or responses.
        prompt, response: tokens of each; for `decode`, `prompt` is all that a token attends to.
        size: bytes copied or exchanged.
    """

    name: str
    layers: int = 0
    rows: int = 0
    prompt: int = 0
    response: int = 0
    size: int = 0
    ranks: int = 0

    def __str__(self) -> str:
        values = {key: value for key, value in asdict(self).items() if value and key != "name"}
        return f"{self.name:14} " + " ".join(f"{key} {value}" for key, value in values.items())


@dataclass(frozen=True)
class Profile:
    """Measured durations, and the conditions under which they hold.

    Attributes:
        settings: the configuration's keys that decide how the model computes.
        device: name, kind, cores, memory in GB, PyTorch version.
        group_size: samples that share a prompt.
        seconds: block -> duration (s); None: not measured yet.
    """

    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    device: Mapping[str, Any]
    group_size: int
    seconds: Mapping[MeasuredBlock, float | None]

    @staticmethod
    def from_config(config: RunConfig, model: ModelSizes, device: Mapping[str, Any], *, ranks: int) -> "Profile":
        """Return a profile with all blocks to measure; `ranks` can exchange tensors on the device."""
        size = config.schedule.n_samples_per_prompt
        blocks = dict.fromkeys(_blocks(config, model, float(device["memory_gb"]), ranks))
        return Profile(asdict(model), _settings(config), device, size, blocks)

    @staticmethod
    def read(path: Path, option: str) -> "Profile":
        """Read a file; `option` names it in errors.

        Raises:
            ConfigError: the file cannot be read, or is not a profile of this format.
        """
        try:
            values = json.loads(path.read_text())
            if values["format"] != FORMAT:
                raise ConfigError(
                    f"{option} {path}: has format {values['format']}, not {FORMAT}; measure again into another file"
                )
            blocks = values["blocks"]
            seconds = {
                MeasuredBlock(**{key: each[key] for key in each if key != "seconds"}): each["seconds"]
                for each in blocks
            }
            found = Profile(values["model"], values["settings"], values["device"], int(values["group_size"]), seconds)
            found._check_types()
            return found
        except OSError as error:
            raise ConfigError(f"{option} {path}: {error.strerror}; `asyncflow profile CONFIG` makes one") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{option} {path}: is not a file of `asyncflow profile` ({error!r}); name one") from error

    def write(self, path: Path) -> None:
        """Replace the file atomically.

        Raises:
            ConfigError: it cannot be written.
        """
        blocks = [
            {key: value for key, value in asdict(block).items() if value} | {"seconds": seconds}
            for block, seconds in self.seconds.items()
        ]
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "seconds"}
        parts = [f'"{key}": {json.dumps(value)}' for key, value in {"format": FORMAT, **values}.items()]
        lines = ",\n  ".join(map(json.dumps, blocks))
        try:
            replace_text(path, "{" + ",\n ".join(parts) + f',\n "blocks": [\n  {lines}\n ]}}\n')
        except OSError as error:
            raise ConfigError(f"--out {path}: {error.strerror}; name a file that can be written") from error

    def joined_with(self, older: "Profile", what: str) -> "Profile":
        """Return this profile with the durations that an older one already has; `what` names its file.

        Raises:
            ConfigError: the older one is of another model, device or way to compute.
        """
        older._check_model(self.model, what)
        for part in ("settings", "device", "group_size"):
            older._check_same(part, getattr(self, part), what)
        return replace(self, seconds={**self.seconds, **older.seconds})

    def check(self, config: RunConfig, model: ModelSizes, what: str) -> None:
        """Refuse to plan a run that the profile does not describe; `what` names its file.

        Raises:
            ConfigError: the profile is of another model or way to compute, or unfinished.
        """
        self._check_model(asdict(model), what)
        self._check_same("settings", _settings(config), what)
        if self._layers > 1 and len({block.layers for block in self.seconds if block.layers}) < 2:
            raise ConfigError(f"{what}: has one depth of the model, but a layer's cost needs two; measure again "
                              f"into another file")  # fmt: skip
        kinds = {block.name for block in self.seconds}
        for kind in (TRAIN, FORWARD, OPTIMIZER, PREFILL, DECODE):
            if kind not in kinds:
                raise ConfigError(f"{what}: has no block {kind!r}; measure again into another file")
        missing = [block for block, seconds in self.seconds.items() if seconds is None]
        if missing:
            raise ConfigError(f"{what}: {len(missing)} of {len(self.seconds)} blocks are not measured; "
                              f"`asyncflow profile` with this file as --out continues")  # fmt: skip

    def _check_types(self) -> None:
        ModelSizes(**self.model)
        str(self.device["name"]), int(self.device["cores"]), float(self.device["memory_gb"]), dict(self.settings)
        if not all(each is None or 0 <= float(each) < math.inf for each in self.seconds.values()):
            raise ValueError("seconds of a block")

    def _check_model(self, now: Mapping[str, Any], what: str) -> None:
        # Without weights, the number of parameters comes from config.json, which leaves out biases and head norms.
        found, size = self.model.get("num_parameters", 0), now["num_parameters"]
        if abs(found - size) <= _OTHER_PARAMETERS * size:
            now = {**now, "num_parameters": found}
        self._check_same("model", now, what)

    def _check_same(self, part: str, now: Any, what: str) -> None:
        found = getattr(self, part)
        if found == now:
            return
        keys = [key for key in now if found.get(key) != now[key]] if isinstance(now, Mapping) else []
        where = keys[0] if part == "settings" and keys else ".".join([part, *keys[:1]])
        was, is_now = (found.get(keys[0]), now[keys[0]]) if keys else (found, now)
        raise ConfigError(f"{what}: was measured with {where} {was}, here it is {is_now}; name another file")

    @cached_property
    def _layers(self) -> int:
        return int(self.model["num_layers"])

    def whole_model_times(self, name: str) -> dict[MeasuredBlock, float]:
        """Return shape (a block with `layers` 0) -> duration for the whole model (s), extrapolated in depth."""
        by_depth: dict[int, dict[MeasuredBlock, float]] = {}
        for block, seconds in self.seconds.items():
            if block.name == name and seconds is not None:
                by_depth.setdefault(block.layers, {})[replace(block, layers=0)] = seconds
        if not by_depth:
            return {}
        low, high = min(by_depth), max(by_depth)
        assert high == self._layers or low < high, "`check` refuses a file of one depth"
        found = {}
        for shape, most in by_depth[high].items():
            least = by_depth[low].get(shape, most)
            layer = max(0.0, most - least) / max(1, high - low)
            found[shape] = most + layer * (self._layers - high)
        return found

    def whole_model_work(self, name: str, *, shared_prompt: bool) -> Work:
        """Return the work of `TRAIN` or `FORWARD` for the whole model on one device.

        `shared_prompt` counts a prompt's tokens once for all samples of a group.
        """
        if (name, shared_prompt) not in self._works:
            points = []
            for shape, seconds in self.whole_model_times(name).items():
                prompts = -(-shape.rows // self.group_size) if shared_prompt else shape.rows
                tokens = shape.prompt * prompts + shape.response * shape.rows
                points.append((tokens, shape.rows * (shape.prompt + shape.response) ** 2, seconds))
            self._works[name, shared_prompt] = fit(points)
        return self._works[name, shared_prompt]

    @cached_property
    def _works(self) -> dict[tuple[str, bool], Work]:
        """Results of `whole_model_work`: a search asks for them for each of its candidates."""
        return {}

    def decode_s(self, responses: int, context: float) -> float:
        """Return the duration of a decode step (s): one token for each response, which attends to `context` tokens."""
        table, per_token_s, measured = self._decoding
        numbers = sorted(table)
        above = min(max(1, bisect_left(numbers, responses)), len(numbers) - 1)
        low, high = numbers[above - 1], numbers[above]
        slope = 0.0 if low == high else (table[high] - table[low]) / (high - low)
        # Interpolated in the number of responses, and beyond the largest one extrapolated.
        seconds = table[low] + slope * (responses - low)
        return max(1e-9, seconds + per_token_s * responses * (context - measured))

    @cached_property
    def _decoding(self) -> tuple[dict[int, float], float, int]:
        """(responses -> seconds at the shortest context, seconds per further token and response, that context)."""
        shapes = self.whole_model_times(DECODE)
        context = min(shape.prompt for shape in shapes)
        table = {shape.rows: seconds for shape, seconds in shapes.items() if shape.prompt == context}
        longer = [(shape, seconds) for shape, seconds in shapes.items() if shape.prompt > context]
        slopes = [(s - table[shape.rows]) / shape.rows / (shape.prompt - context) for shape, s in longer]
        return table, max(0.0, *slopes, 0.0), context

    @cached_property
    def prefill(self) -> Work:
        """Time that prompts add to the step of the engine which they enter."""
        points = []
        # With prefix caching, the samples of a group compute their prompt once.
        shared = self.group_size if self.settings.get("vllm.prefix_caching", True) else 1
        for name, size in ((PREFILL, shared), (LATER_TURN, 1)):
            for shape, seconds in self.whole_model_times(name).items():
                tokens, rows = -(-shape.rows // size) * shape.prompt, shape.rows
                # The measured step also decoded a token per row, which is not part of prefill.
                points.append((tokens, rows, seconds - self.decode_s(rows, shape.prompt), seconds))
        call_s, token_s, row_s = _least_squares(points)
        return Work(call_s=call_s, token_s=token_s, row_s=row_s)

    def update_s(self, parameters: float) -> float:
        """Return the duration of an optimizer update of `parameters` on one rank (s)."""
        layer = ModelSizes(**self.model).layer_parameters
        deepest = self._layers
        points = [
            (self.model["num_parameters"] - (deepest - block.layers) * layer, 0.0, seconds)
            for block, seconds in self.seconds.items()
            if block.name == OPTIMIZER and seconds is not None
        ]
        return fit(points).call_duration_s(round(parameters), 0.0)

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the measured collectives."""
        return max((block.ranks for block in self.seconds), default=0)

    def exchange_s(self, name: str, size: float) -> float | None:
        """Return the time to copy or exchange `size` bytes (s); None: not measured."""
        if name not in self._exchanges:
            points = [(b.size, 0.0, s) for b, s in self.seconds.items() if b.name == name and s is not None]
            self._exchanges[name] = fit(points) if points else None
        found = self._exchanges[name]
        return None if found is None else found.call_duration_s(round(size), 0.0)

    @cached_property
    def _exchanges(self) -> dict[str, Work | None]:
        """Results of `exchange_s`."""
        return {}


def fit(points: Sequence[tuple[float, float, float]]) -> Work:
    """Return the work that best explains measurements of (tokens, sum of squares, seconds)."""
    call_s, token_s, squared_s = _least_squares([(*point, point[2]) for point in points])
    return Work(call_s=call_s, token_s=token_s, squared_s=squared_s)


def _least_squares(points: Sequence[tuple[float, float, float, float]]) -> tuple[float, float, float]:
    """Return non-negative (a, b, c) that fit a + b x + c y to points (x, y, seconds, scale of the error)."""
    import numpy as np

    table = np.array([(1.0, x, y) for x, y, _, _ in points])
    scales = np.array([max(1e-12, point[3]) for point in points])
    seconds = np.array([point[2] for point in points]) / scales
    largest = table.max(axis=0) + (table.max(axis=0) == 0)
    table = table / largest / scales[:, None]
    # Non-negative least squares by trying every subset of columns: there are only seven.
    best, least = np.zeros(3), np.inf
    for columns in (list(each) for number in (1, 2, 3) for each in combinations((1, 0, 2), number)):
        found, *_ = np.linalg.lstsq(table[:, columns], seconds, rcond=None)
        error = float(((table[:, columns] @ found - seconds) ** 2).sum())
        if (found >= 0).all() and error < least - 1e-9:
            best, least = np.zeros(3), error
            best[columns] = found
    constant, of_x, of_y = (best / largest).tolist()
    return constant, of_x, of_y


def _blocks(config: RunConfig, model: ModelSizes, memory_gb: float, ranks: int) -> Iterable[MeasuredBlock]:
    """Yield what to measure. Blocks that need the same engine are adjacent."""
    actor = config.actor
    prompt = max(1, prompt_tokens_of(config))
    response = min(config.rollout.max_response_tokens, config.sim.mean_tokens)
    budget = actor.max_tokens_per_micro_batch
    trained = max(1, budget // (prompt + response)) if budget else actor.micro_batch_size
    slots = config.rollout.batch_size
    # The deeper model may take half of the device's memory.
    fitting = (memory_gb * 1e9 / 2 / _STATE_BYTES - model.outside_parameters) // max(1, model.layer_parameters)
    for layers in sorted({1, min(model.num_layers, max(2, int(fitting)))}):
        middle = prompt + response // 2
        for rows in sorted({*(2**k for k in range(slots.bit_length())), slots}):
            yield MeasuredBlock(DECODE, layers, rows, middle)
        yield MeasuredBlock(DECODE, layers, slots, middle + prompt + response)
        for rows in sorted({1, slots}):
            yield MeasuredBlock(PREFILL, layers, rows, prompt)
        for rows in sorted({1, -(-slots // 4)}):
            yield MeasuredBlock(LATER_TURN, layers, rows, middle + prompt + response)
        for name, rows in ((TRAIN, trained), (FORWARD, config.ref.micro_batch_size)):
            for shape in sorted(
                {(1, response), (-(-rows // 4), response), (rows, response), (rows, -(-response // 2))}
            ):
                yield MeasuredBlock(name, layers, shape[0], prompt, shape[1])
            if name == TRAIN:
                yield MeasuredBlock(OPTIMIZER, layers, 1, prompt, response)
    yield MeasuredBlock(COPY_OUT, size=_COPIED)
    yield MeasuredBlock(COPY_IN, size=_COPIED)
    if ranks > 1:
        for moved in EXCHANGED:
            yield from (MeasuredBlock(name, size=moved, ranks=ranks) for name in COLLECTIVES)


def _settings(config: RunConfig) -> dict[str, Any]:
    actor = config.actor
    of_vllm = {"vllm.prefix_caching": config.vllm.prefix_caching} if config.rollout.engine == "vllm" else {}
    return {
        **of_vllm,
        "rollout.engine": config.rollout.engine,
        "actor.engine": actor.engine,
        "ref.engine": config.ref.engine,
        "model.dtype": config.model.dtype,
        "vllm.dtype": config.vllm.dtype,
        "actor.autocast": actor.autocast,
        "actor.gradient_checkpointing": actor.gradient_checkpointing,
        "actor.shared_prompt": actor.shared_prompt,
        "launcher.threads_per_worker": config.launcher.threads_per_worker,
    }
