# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a Megatron script on Ascend NPUs.

torch_npu's own mapping of torch.cuda to torch.npu comes first, then what that mapping and HCCL
leave out.

    torchrun ... scripts/train/on_ascend.py scripts/train/pretrain_gpt.py [Megatron's flags]

launch.sh --platform ascend does it. Not run by us on an NPU.
"""

import functools
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# torch.distributed asks for the capability of what says is_cuda (broadcast, torch 2.13), and
# torch_npu answers None without this. 8.0 promises no fp8 and nothing of Hopper. It can go when
# torch_npu answers by itself.
CAPABILITY = ("TORCH_NPU_DEVICE_CAPABILITY", "8.0")


def main(argv: list[str]) -> None:
    if not argv or not Path(argv[0]).is_file():
        sys.exit(f"on_ascend: {argv[0] if argv else 'no script'}: no such script")
    if importlib.util.find_spec("torch_npu") is None:
        sys.exit("on_ascend: torch_npu cannot be imported: it is not installed")
    if (spec := importlib.util.find_spec("torch")) and (folders := spec.submodule_search_locations):
        refuse_cuda_build(Path(folders[0]))
    try:
        install()
    except ImportError as error:
        sys.exit(f"on_ascend: torch_npu cannot be imported: {error}")
    from megatron_asynchzp.launch import run_script

    run_script(Path(argv[0]), argv[1:])


def install() -> None:
    """Install all that a start brings, in this process; Megatron is imported later."""
    os.environ.setdefault(*CAPABILITY)  # before torch, which loads torch_npu
    import torch
    import torch.distributed as dist
    import torch_npu.contrib.transfer_to_npu  # noqa: F401  # pyright: ignore[reportMissingImports]

    torch.Tensor.type = type_as_on_cuda(torch.Tensor.type)
    dist.all_reduce = exact_doubles(dist.all_reduce, "npu")
    torch.cuda.get_device_properties = numbered(torch.cuda.get_device_properties)


def refuse_cuda_build(torch_folder: Path) -> None:
    """End the process, in one line, if torch is a build for CUDA.

    torch_npu aborts with it, by a C++ error that Python cannot catch. It can go when torch_npu says
    so itself.
    """
    version = torch_folder / "version.py"
    found = version.is_file() and re.search(
        r"^cuda\b[^=\n]*= *['\"]([^'\"]+)", version.read_text(), re.MULTILINE
    )
    if found:
        sys.exit(
            f"on_ascend: this torch is the build for CUDA {found[1]}, with which torch_npu "
            "aborts; install torch's CPU build of the same version (pip install torch==VERSION "
            "--index-url https://download.pytorch.org/whl/cpu)"
        )


def type_as_on_cuda(read_type: Callable) -> Callable:
    """Let `Tensor.type()` answer as on CUDA.

    Megatron compares it with "torch.cuda.FloatTensor" where it clips (clip_grads.py) and builds
    optimizers. It can go when Megatron compares dtypes.
    """

    @functools.wraps(read_type)
    def type_name(self: Any, *args: Any, **options: Any) -> Any:
        found = read_type(self, *args, **options)
        return found.replace("torch.npu.", "torch.cuda.") if isinstance(found, str) else found

    return type_name


def numbered(read_properties: Callable) -> Callable:
    """Give `get_device_properties` the capability as major and minor, where torch_npu has None.

    Megatron compares it where tensors or contexts are cut (arguments.py). It can go when torch_npu
    answers by itself.
    """

    class Properties:
        def __init__(self, found: Any):
            self._found = found
            self.major, self.minor = map(int, os.environ[CAPABILITY[0]].split("."))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._found, name)

    @functools.wraps(read_properties)
    def properties(*args: Any, **options: Any) -> Any:
        found = read_properties(*args, **options)
        return Properties(found) if getattr(found, "major", None) is None else found

    return properties


def exact_doubles(all_reduce: Callable, device: str) -> Callable:
    """Give `dist.all_reduce` of fp64, which HCCL lacks on Atlas A2 and A3.

    Megatron takes the earliest start of all ranks so. fp32 would round a time to two minutes, so
    all ranks gather the bits as int64 and reduce them on the host. It can go when HCCL reduces
    fp64. Raises NotImplementedError for async_op and for an operation other than sum, product,
    minimum, maximum and mean.
    """
    import torch
    import torch.distributed as dist

    reductions = {
        dist.ReduceOp.SUM: lambda rows: rows.sum(0),
        dist.ReduceOp.AVG: lambda rows: rows.mean(0),
        dist.ReduceOp.PRODUCT: lambda rows: rows.prod(0),
        dist.ReduceOp.MIN: lambda rows: rows.amin(0),
        dist.ReduceOp.MAX: lambda rows: rows.amax(0),
    }

    @functools.wraps(all_reduce)
    def reduce(
        tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        world = dist.get_world_size(group)
        if tensor.dtype != torch.float64 or tensor.device.type != device or world < 1:
            return all_reduce(tensor, op, group, async_op)
        chosen = next((reductions[one] for one in reductions if one == op), None)
        if async_op or chosen is None:
            raise NotImplementedError(
                f"on_ascend: all_reduce of fp64 by {op}{' with async_op' if async_op else ''}: "
                "HCCL has no fp64; reduce fp32, or a tensor of the host over gloo"
            )
        if not tensor.numel():
            return None
        bits = tensor.detach().reshape(-1).contiguous().view(torch.int64)
        gathered = bits.new_empty(world * bits.numel())
        dist.all_gather_into_tensor(gathered, bits, group=group)
        rows = gathered.cpu().view(torch.float64).view(world, -1)
        tensor.detach().copy_(chosen(rows).view(tensor.shape))
        return None

    return reduce


if __name__ == "__main__":
    main(sys.argv[1:])
