"""Master weights and optimizer state of one rank, under Hugging Face's names.

With the distributed optimizer this rank has a run of every flattened parameter in float32, and AdamW's two moments of
it. Each is shown as boxes of Hugging Face tensors (`FlatBox`), views of the optimizer's memory, so loading in place and
saving need no gathering. Tensor-parallel ranks that hold the same norm, and the last stage's copy of a tied embedding,
read but do not save.

Source: megatron-core 0.16.1, `core/optimizer/distrib_optimizer.py`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workers.engines.boxed_tensor import BoxedTensor, BoxPart
from workers.engines.hf.weights import HfWeights
from workers.engines.megatron.model import MegatronParts
from workers.engines.megatron.names import FlatBox, flat_boxes

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Run:
    """This rank's run of one parameter.

    Attributes:
        main: float32 values, flat.
        boxes: of them.
        replica: others save them.
    """

    main: Tensor
    boxes: tuple[FlatBox, ...]
    replica: bool


class MegatronState:
    """Views into the optimizer of one rank."""

    def __init__(self, parts: MegatronParts) -> None:
        """Begin with zeros everywhere, so that the vocabulary's padding is defined."""
        self._parts = parts
        self._optimizer = parts.optimizer
        self._runs = tuple(self._find_runs())
        with torch.no_grad():
            for run in self._runs:
                run.main.zero_()
        self._begin_moments()

    def read_weights(self, weights: HfWeights) -> None:
        """Read this rank's boxes from safetensors; collective over replicas.

        Raises:
            ConfigError: a weight is missing or has another shape.
        """
        for run in self._runs:
            for flat in run.boxes:
                rows, *columns = flat.box.slices
                values = weights.read_rows(weights.find(flat.name), flat.shape, rows.start, rows.stop)
                flat.of(run.main.detach()).copy_(values[:, columns[0]] if columns else values)
        self._publish()

    def state_dict(self) -> dict[str, Any]:
        """Return `model`, `optimizer` (moments by weight) and the number of AdamW's updates."""
        states = self._optimizer.optimizer.state
        moments = {kind: self._boxed(partial(_moment, states, kind)) for kind in MOMENTS}
        model = self._boxed(lambda main: main.detach())
        return {"model": model, "optimizer": {**moments, "step": torch.tensor(self._adam_step())}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the count and publish the weights, which were loaded in place; collective over replicas."""
        self._set_adam_step(int(state["optimizer"]["step"]))
        self._publish()

    def _find_runs(self) -> Iterator[_Run]:
        """Yield this rank's run of every parameter of which it has one, in the model's order."""
        geometry, optimizer = self._parts.geometry, self._optimizer
        for name, parameter in self._parts.network.named_parameters():
            if parameter not in optimizer.model_param_group_index_map:
                continue
            group, order = optimizer.model_param_group_index_map[parameter]
            run = optimizer._get_model_param_range_map(parameter)["param"]
            boxes = tuple(flat_boxes(name, parameter, geometry, start=run.start, stop=run.end))
            is_cut = getattr(parameter, "tensor_model_parallel", False)
            tied_copy = geometry.tied and name == "output_layer.weight"
            main = optimizer.optimizer.param_groups[group]["params"][order]
            yield _Run(main, boxes, tied_copy or (geometry.tp_rank > 0 and not is_cut))

    def _boxed(self, values_of: Callable[[Tensor], Tensor]) -> dict[str, BoxedTensor]:
        parts: dict[str, list[BoxPart]] = defaultdict(list)
        shapes: dict[str, tuple[int, ...]] = {}
        for run in self._runs:
            for flat in run.boxes:
                parts[flat.name].append(BoxPart(flat.box, flat.of(values_of(run.main)), run.replica))
                shapes[flat.name] = flat.shape
        return {name: BoxedTensor(shapes[name], held) for name, held in parts.items()}

    @torch.no_grad()
    def _publish(self) -> None:
        """Bring the master weights of all replicas into the model."""
        self._optimizer._copy_main_params_to_model_params()
        self._parts.wrapped.start_param_sync(force_sync=True)

    def _begin_moments(self) -> None:
        """Make AdamW's state as its first update would, so that a saved state can be loaded in place."""
        self._optimizer.init_state_fn(self._optimizer.optimizer, self._optimizer.config)
        self._set_adam_step(0)

    def _adam_step(self) -> int:
        """Torch's AdamW counts per parameter; those of Apex, Transformer Engine and MindSpeed count per group."""
        inner = self._optimizer.optimizer
        if not isinstance(inner, torch.optim.AdamW):
            return int(inner.param_groups[0].get("step", 0))
        return max((int(state["step"]) for state in inner.state.values()), default=0)

    def _set_adam_step(self, step: int) -> None:
        inner = self._optimizer.optimizer
        for group in inner.param_groups:
            if not isinstance(inner, torch.optim.AdamW):
                group["step"] = step
                continue
            for parameter in group["params"]:
                inner.state[parameter]["step"] = torch.tensor(float(step))


def _moment(states: Any, kind: str, main: Tensor) -> Tensor:
    moment: Tensor = states[main][kind]
    return moment
