# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Send tensors for a CUDA device to the CPU, and give gloo the collectives that only NCCL has.

The wrappers are functions, as a TorchFunctionMode doubles the time of a step.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_CPU = torch.device("cpu")

# fmt: off
FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full",
    "full_like", "linspace", "logspace", "normal", "ones", "ones_like", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "randperm", "scalar_tensor", "tensor",
    "tril_indices", "triu_indices", "zeros", "zeros_like",
)
# fmt: on
NEW_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
REDUCTIONS = ("all_reduce", "reduce_scatter_tensor")


def asks_for_cuda(device: Any) -> bool:
    """Return whether a `device` argument means CUDA; torch reads a bare number as CUDA."""
    if device is None:
        return False
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return type(device) is int


def on_cpu(function: Callable, place: int | None = None) -> Callable:
    """Wrap a function whose `device`, a keyword or argument number `place`, may mean CUDA."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if asks_for_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        if place is not None and len(args) > place and asks_for_cuda(args[place]):
            args = (*args[:place], _CPU, *args[place + 1 :])
        return function(*args, **kwargs)

    return called


def stay(self: Any, *_: Any, **__: Any) -> Any:
    return self


def nothing(self: Any, *_: Any, **__: Any):
    """Replace `record_stream()`: the CPU's allocator ignores streams."""


def type_as_on_cuda(read_type: Callable) -> Callable:
    """Wrap `Tensor.type()`: Megatron compares it with "torch.cuda.FloatTensor"."""

    @functools.wraps(read_type)
    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            if args and isinstance(args[0], str):
                args = (args[0].replace("torch.cuda.", "torch."), *args[1:])
            return read_type(self, *args, **kwargs)
        return read_type(self).replace("torch.", "torch.cuda.", 1)

    return type_name


def load_on_cpu(load: Callable) -> Callable:
    @functools.wraps(load)
    def on_cpu(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is None or asks_for_cuda(map_location):
            map_location = _CPU
        return load(file, map_location, *args, **kwargs)

    return on_cpu


def compile_nothing(model: Callable | None = None, **_: Any) -> Callable:
    return model if model is not None else compile_nothing


class PreMultipliedSum(NamedTuple):
    """NCCL's PREMUL_SUM, which scales each rank's input: Megatron-FSDP needs it."""

    factor: Any


def reduction_with_factor(collective: Callable) -> Callable:
    """Wrap a reduction of torch.distributed to apply `PreMultipliedSum`."""
    # An all-reduce scales its tensor in place. A reduce-scatter keeps its input, as NCCL's does,
    # and reduces a scaled copy.
    is_in_place = collective.__name__ == "all_reduce"
    names = ("tensor",) if is_in_place else ("output", "input")
    names += ("op", "group", "async_op")

    @functools.wraps(collective)
    def reduced(*args: Any, **kwargs: Any) -> Any:
        kwargs |= zip(names, args, strict=False)
        op = kwargs.get("op")
        if isinstance(op, PreMultipliedSum):
            kwargs["op"] = dist.ReduceOp.SUM
            if is_in_place:
                kwargs["tensor"].mul_(op.factor)
            else:
                kwargs["input"] = kwargs["input"].mul(op.factor)
        return collective(**kwargs)

    return reduced


def _are_equal(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether gloo supports these sizes; all ranks see the same sizes and decide alike."""
    return len({tensor.shape for tensor in tensors}) == 1


class _AllOf(NamedTuple):
    works: list[Any]

    def wait(self, *timeout: Any) -> bool:
        for work in self.works:
            work.wait(*timeout)
        return True


def gather_of_any_sizes(all_gather: Callable) -> Callable:
    @functools.wraps(all_gather)
    def gathered(tensor_list: list, tensor: torch.Tensor, group: Any = None, async_op=False) -> Any:
        if _are_equal(tensor_list):
            return all_gather(tensor_list, tensor, group, async_op)
        tensor_list[dist.get_rank(group)].copy_(tensor)
        broadcasts = [
            dist.broadcast(piece, group=group, async_op=async_op, group_src=rank)
            for rank, piece in enumerate(tensor_list)
            if piece.numel()
        ]
        return _AllOf(broadcasts) if async_op else None

    return gathered


def scatter_of_any_sizes(reduce_scatter: Callable) -> Callable:
    @functools.wraps(reduce_scatter)
    def scattered(
        output: torch.Tensor,
        input_list: list,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op=False,
    ) -> Any:
        if _are_equal(input_list):
            return reduce_scatter(output, input_list, op, group, async_op)
        if async_op:
            raise NotImplementedError("sizes that differ on the CPU platform: async_op=False")
        own = dist.get_rank(group)
        for rank, piece in enumerate(input_list):
            if piece.numel():
                total = piece.clone(memory_format=torch.contiguous_format)
                dist.reduce(total, group=group, group_dst=rank, op=op)
                if rank == own:
                    output.copy_(total)
        return None

    return scattered
