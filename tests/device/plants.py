"""Mistakes planted in the project, each of which passes on the CPU, and what shows that a device is used wrongly.

mode of `ranks.py` on the CPU  -> expected      the same with PLANT=NAME on `late` -> said      mistakes(expected, said)
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import asyncflow.device
from asyncflow.device import CopiesDone, CopyStream

TOLERANCE = 1e-4
CASES = "gspo tri_model"
"""Of `steps`, in which all its mistakes show."""
MOST_MODELS = 3
"""Policy, old policy and reference: each asks once, in its first micro-batch, what its model does with logits.

Otherwise no micro-batch waits for the device. An update waits for the figures of its micro-batches, and for the norm of
each model's gradients."""


def mistakes(expected: Any, said: Any, path: str = "") -> list[str]:
    """Return what a rank on `late` said that is not as it should be; `expected` is what one on the CPU said."""
    if isinstance(expected, Mapping):
        return [found for name in expected for found in mistakes(expected[name], said[name], f"{path}/{name}")]
    name = path.rpartition("/")[2]
    if name == "contexts":
        return [] if said == expected or (len(said) == 1 and 0 not in said) else [f"{path}: {said}"]
    if name == "micro_batches":
        waits = sum((Counter(one) for one in said), Counter())
        asked = waits.pop("item", 0)
        return [f"{path}: {dict(waits)}, {asked} asked"] if waits or asked > MOST_MODELS else []
    if name == "updates":
        return [f"{path}: {waits}" for waits in said if sum(waits.values()) > (3 if "/ppo/" in path else 2)]
    if isinstance(expected, list):
        if len(expected) != len(said):
            return [f"{path}: {len(said)} values"]
        return [found for one, other in zip(expected, said, strict=True) for found in mistakes(one, other, path)]
    if isinstance(expected, int | float):
        return [] if math.isclose(expected, said, rel_tol=TOLERANCE, abs_tol=TOLERANCE) else [f"{path}: {said}"]
    return [] if bool(expected) == bool(said) else [f"{path}: {said}"]


@dataclass(frozen=True)
class Plant:
    """A mistake.

    Attributes:
        mode: of `ranks.py`, in which it shows.
        schedule: of `late`, in which it shows.
        make: plants it, before the project runs.
        num_ranks: of the mode.
    """

    mode: str
    schedule: str
    make: Callable[[], None]
    num_ranks: int = 1


def _stream_of_its_own(device: torch.device) -> Any:
    """Return a stream that waits for none, and for which none waits."""
    return nullcontext() if device.type == "cpu" else torch.Stream(device=device)


def _copies_said_to_have_ended() -> None:
    def run(self: CopyStream, copies: Any) -> list[CopiesDone]:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            for copy in copies:
                copy()
        return [CopiesDone(lambda: None) for _ in copies]

    _on_devices(run)


def _copies_that_do_not_wait() -> None:
    def stage(self: CopyStream, copies: Any) -> list[CopiesDone]:
        ends: list[Future[None]] = [Future() for _ in copies]
        self._thread.submit(self._copy_staged, copies, ends).result()  # before what comes next makes the kernels end
        return [CopiesDone(end.result) for end in ends]

    CopyStream.start_staged_copies = stage  # type: ignore


def _on_devices(run: Any) -> None:
    """Let streams of devices copy by `run`."""
    right = CopyStream.start_copies
    CopyStream.start_copies = lambda self, copies: (right if self._stream is None else run)(self, copies)  # type: ignore


def _threads_of_the_first_device() -> None:
    asyncflow.device.on_device = lambda _: nullcontext()


def _locking_on_the_first_device() -> None:
    import weightsync.slot_memory as memory

    def pin(address: int, num_bytes: int, device: torch.device, *, writable: bool) -> Any:
        from asyncflow.vendors import vendor_of

        return vendor_of(device.type).pin(address, num_bytes, writable=writable)

    memory.pin = pin


def _copies_used_before_they_arrive() -> None:
    right = asyncflow.device._begin_copy
    asyncflow.device._begin_copy = lambda *arguments: (right(*arguments)[0], None)


def _buckets_unpacked_before_they_arrive() -> None:
    def unpack(self: CopyStream, arrived: Any, copy: Any, host: Tensor, end: Any) -> None:
        copy.unpack(host)
        end.set_result(None)

    CopyStream._unpack_arrived = unpack  # type: ignore


def _state_written_before_it_is_copied() -> None:
    from workers.checkpoint.saved_shards import HostCopy

    right = HostCopy.wait
    HostCopy.wait = lambda self: None if self._pinned else right(self)  # type: ignore


def _one_host_buffer_for_all() -> None:
    kept: list[Tensor] = []

    def empty(*size: Any, **options: Any) -> Tensor:
        if not kept:
            kept.append(torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True))
        return kept[0][: size[0]]

    _replace_to_device(empty=empty)


def _inputs_on_another_stream() -> None:
    right = asyncflow.device.to_device

    def to_device(tensors: Any, device: torch.device) -> list[Tensor]:
        with _stream_of_its_own(device):
            return right(tensors, device)

    _use_to_device(to_device)


def _inputs_by_copies_that_wait() -> None:
    _use_to_device(lambda tensors, device: [tensor.to(device) for tensor in tensors])


def _replace_to_device(**torch_names: Any) -> None:
    """Run `to_device` with other functions of torch."""
    right = asyncflow.device.to_device

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return torch_names.get(name, getattr(torch, name))

    def to_device(tensors: Any, device: torch.device) -> list[Tensor]:
        asyncflow.device.torch = Torch()  # type: ignore
        try:
            return right(tensors, device)
        finally:
            asyncflow.device.torch = torch

    _use_to_device(to_device)


def _use_to_device(to_device: Any) -> None:
    import workers.algorithms.algorithm
    import workers.engines.packed_forward
    import workers.records.log_prob_gap
    import workers.trainer.tri_model

    for module in (
        workers.algorithms.algorithm, workers.engines.packed_forward, workers.records.log_prob_gap,
        workers.trainer.tri_model,
    ):  # fmt: skip
        assert module.to_device is asyncflow.device.to_device
        module.to_device = to_device


def _figures_one_by_one() -> None:
    from workers.records.step_record import StepRecord

    right = StepRecord.add_loss

    def add_loss(self: StepRecord, *given: Any) -> None:
        right(self, *given)
        self.fetch()

    StepRecord.add_loss = add_loss  # type: ignore


def _figures_read_early() -> None:
    import workers.records.step_record as record

    def numbers(each: Any) -> list[dict[str, float]]:
        scalars = [value for stats in each for value in stats.values()]
        values = torch.stack([value.double() for value in scalars])
        host = torch.zeros(values.shape, dtype=values.dtype, pin_memory=values.device.type != "cpu")
        found = iter(host.copy_(values, non_blocking=True).tolist())
        return [{name: next(found) for name in stats} for stats in each]

    record.numbers = numbers


def _asking_how_many() -> None:
    import workers.algorithms.parts as parts

    parts._of_tokens = lambda value_N, tokens: value_N.repeat_interleave(tokens.length_N)


def _beside(owner: Callable[[], Any], name: str) -> None:
    """Run a method on a stream of its own, which waits for none, and for which none waits."""
    kind = owner()
    right = getattr(kind, name)

    def beside(self: Any, *given: Any) -> Any:
        with _stream_of_its_own(next(iter(self._model.parameters())).device):
            return right(self, *given)

    setattr(kind, name, beside)


def _policy_copy() -> Any:
    from workers.engines.fsdp.sharding import FsdpCopy

    return FsdpCopy


def _sharded_model() -> Any:
    from workers.engines.fsdp.sharding import ShardedModel

    return ShardedModel


def _responses_read_early() -> None:
    import workers.engines.hf.engine as engine

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, size: int, dtype: torch.dtype) -> Any:
            host = torch.zeros(size, dtype=dtype, pin_memory=torch.accelerator.is_available())

            class Early:
                def copy_(self, source: Tensor) -> Tensor:
                    return host.copy_(source, non_blocking=True).clone()

            return Early()

    engine.torch = Torch()  # type: ignore


def _weights_given_back_early() -> None:
    import workers.engines.hf.engine as engine

    right = engine.replace_weights

    def replace(parameters: Any, weights: Any, *, adopt: bool) -> None:
        if adopt:
            right(parameters, weights, adopt=True)
        else:
            for name, parameter in parameters.items():
                parameter.copy_(weights[name], non_blocking=True)

    engine.replace_weights = torch.no_grad()(replace)


def _broadcasts_that_wait_for_no_update() -> None:
    import weightsync.broadcast_group as broadcast_group

    broadcast_group.side_stream = lambda device, stream: nullcontext() if device.type == "cpu" else stream


def _broadcasts_said_to_have_ended() -> None:
    from weightsync.broadcast_group import BroadcastGroup

    class Careless(torch.Stream):
        def synchronize(self) -> None:
            """Return at once."""

    begin = BroadcastGroup.__init__

    def careless(self: BroadcastGroup, store: Any, me: str, device: torch.device) -> None:
        begin(self, store, me, device)
        if device.type != "cpu":
            self._stream = Careless(device=device)

    BroadcastGroup.__init__ = careless  # type: ignore


PLANTS = {
    "no-event": Plant("train", "copies", _copies_said_to_have_ended),
    "no-wait": Plant("train", "kernels", _copies_that_do_not_wait),
    "no-device": Plant("train", "copies", _threads_of_the_first_device),
    "locked-elsewhere": Plant("train", "copies", _locking_on_the_first_device),
    "unpacked-early": Plant("train", "copies", _buckets_unpacked_before_they_arrive),
    "state-early": Plant("train", "copies", _state_written_before_it_is_copied),
    "one-buffer": Plant("steps", "copies", _one_host_buffer_for_all),
    "inputs-elsewhere": Plant("steps", "copies", _inputs_on_another_stream),
    "inputs-waited-for": Plant("steps", "copies", _inputs_by_copies_that_wait),
    "figures-one-by-one": Plant("steps", "copies", _figures_one_by_one),
    "figures-early": Plant("steps", "copies", _figures_read_early),
    "how-many": Plant("steps", "copies", _asking_how_many),
    "policy-copy-beside": Plant("steps", "kernels", partial(_beside, _policy_copy, "take")),
    "update-beside": Plant("steps", "kernels", partial(_beside, _sharded_model, "step")),
    "responses-early": Plant("generate", "copies", _responses_read_early),
    "given-back-early": Plant("generate", "copies", _weights_given_back_early),
    "used-early": Plant("ahead", "copies", _copies_used_before_they_arrive),
    "no-order": Plant("broadcast", "kernels", _broadcasts_that_wait_for_no_update, 3),
    "no-end": Plant("broadcast", "kernels", _broadcasts_said_to_have_ended, 3),
}
