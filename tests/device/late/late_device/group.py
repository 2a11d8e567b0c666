"""`lccl`, the process group of `late`: collectives over Gloo. Results appear in a stream of the group, as NCCL's do.

`wait` orders the current stream behind that one, and not the host.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Tensors = list[Tensor]


class LateWork(dist.Work):
    """The end of a collective, on the device."""

    def __init__(self, end: torch.Event, staged: Tensors, outputs: Tensors) -> None:
        super().__init__()
        self._end, self._staged, self._outputs = end, staged, outputs  # the copies read `staged` later

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.accelerator.current_stream(self._outputs[0].device).wait_event(self._end)
        return True

    def is_completed(self) -> bool:
        return self._end.query()

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class LateGroup(dist.ProcessGroup):
    """A group over the tensors of one device; those of the host go over Gloo at once.

    (PyTorch takes a group that Python defines for all of `cpu:gloo,late:lccl`.)
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        self._timeout = timeout
        self._stream: torch.Stream | None = None
        self._sent: list[Any] = []  # what Gloo may still read
        self._names = {"name": "default_pg", "desc": ""}

    def name(self) -> str:
        return "lccl"

    def getBackendName(self) -> str:
        return "lccl"

    def _set_group_name(self, name: str) -> None:
        self._names["name"] = name

    def setGroupName(self, name: str) -> None:
        self._names["name"] = name

    def getGroupName(self) -> str:
        return self._names["name"]

    def _set_group_desc(self, text: str) -> None:
        self._names["desc"] = text

    @property
    def group_name(self) -> str:
        return self._names["name"]

    @property
    def group_desc(self) -> str:
        return self._names["desc"]

    def abort(self) -> None:
        from asyncflow.transport.channel import abort_gloo

        abort_gloo(self._gloo)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        if tensors[0].device.type == "cpu":
            return self._gloo.allreduce(tensors, _all_reduce(opts))

        def call(sent: Tensors, got: Tensors) -> None:
            sums = [each.clone() for each in sent]
            self._gloo.allreduce(sums, _all_reduce(opts)).wait(self._timeout)
            for to, each in zip(got, sums, strict=True):
                to.copy_(each)

        return self._run(tensors, tensors, call)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Any:
        if tensors[0].device.type == "cpu":
            return self._gloo.broadcast(tensors, opts or dist.BroadcastOptions())

        def call(sent: Tensors, got: Tensors) -> None:
            values = [each.clone() for each in sent]
            self._gloo.broadcast(values, opts or dist.BroadcastOptions()).wait(self._timeout)
            for to, each in zip(got, values, strict=True):
                to.copy_(each)

        return self._run(tensors, tensors, call)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        if inputs[0].device.type == "cpu":
            return self._gloo.allgather(outputs, inputs)
        return self._run(inputs, outputs[0], lambda sent, got: self._gather(got, sent))

    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> LateWork:
        def call(sent: Tensors, got: Tensors) -> None:
            self._gather(list(got[0].view(self.size(), -1).unbind(0)), [sent[0].reshape(-1)])

        return self._run([source], [output], call)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any = None) -> LateWork:
        def call(sent: Tensors, got: Tensors) -> None:
            sums = sent[0].reshape(self.size(), -1).clone()
            self._gloo.allreduce([sums], _all_reduce(None)).wait(self._timeout)
            mine = sums[self.rank()].view(got[0].shape)
            mean = opts is not None and opts.reduceOp == dist.ReduceOp.AVG
            got[0].copy_(mine / self.size() if mean else mine)

        return self._run([source], [output], call)

    def alltoall_base(
        self, output: Tensor, source: Tensor, output_sizes: list[int], source_sizes: list[int], opts: Any = None
    ) -> LateWork:
        def call(sent: Tensors, got: Tensors) -> None:
            self._gloo.alltoall_base(got[0], sent[0], output_sizes, source_sizes).wait(self._timeout)

        return self._run([source], [output], call)

    def send(self, tensors: Tensors, target: int, tag: int) -> Any:
        host = [tensors[0].detach().cpu().contiguous()]
        work = self._gloo.send(host, target, tag)
        self._sent.append((work, host))
        return work

    def recv(self, tensors: Tensors, source: int, tag: int) -> LateWork:
        return self._run([], tensors, lambda _, got: self._gloo.recv(got, source, tag).wait(self._timeout))

    all_to_all_single = alltoall_base
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> LateWork:
        return _joined([self._allgather_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> LateWork:
        return _joined([self._reduce_scatter_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    # PyTorch's names before 2.13.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()

    def _gather(self, outputs: Tensors, inputs: Tensors) -> None:
        self._gloo.allgather([outputs], inputs).wait(self._timeout)

    def _run(self, inputs: Tensors, outputs: Tensors, call: Callable[[Tensors, Tensors], None]) -> LateWork:
        stream = self._stream = self._stream or torch.Stream(device=outputs[0].device)
        stream.wait_stream(torch.accelerator.current_stream(stream.device))
        with stream:
            sent = [each.detach().cpu() for each in inputs]  # forces what this stream waits for
        staged = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in outputs]
        call(sent, staged)
        with stream:
            for host, each in zip(staged, outputs, strict=True):
                each.detach().copy_(host, non_blocking=True)
            end = stream.record_event()
        return LateWork(end, staged, outputs)


def _joined(works: list[LateWork]) -> LateWork:
    """Return the end of collectives that were begun one after the other: the group's stream keeps their order."""
    staged, outputs = ([each for work in works for each in getattr(work, name)] for name in ("_staged", "_outputs"))
    return LateWork(works[-1]._end, staged, outputs)


def _all_reduce(given: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.SUM if given is None else given.reduceOp
    return options


dist.Backend.register_backend(
    "lccl", lambda store, rank, size, timeout: LateGroup(store, rank, size, timeout), devices=["late"]
)
