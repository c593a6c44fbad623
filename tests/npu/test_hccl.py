# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""HCCL's collectives through torch_npu's own process group, and what both refuse."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from scripts.testbed.device.delays import LAWS, Delays
from scripts.testbed.device.npu import build
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.train import on_ascend
from tests.device.programs import device_of_rank
from tests.device.test_nccl import check_collectives, check_groups, check_messages
from tests.support.selection import slow_unless


def check_all(dtypes: list[torch.dtype], laws: list[Delays]) -> None:
    from scripts.testbed.device import inside

    for law in laws:
        inside.set_delays(law, dist.get_rank(), dist.get_world_size())
        for dtype in dtypes:
            check_collectives(1000, dtype)
        check_messages(1000)
        check_groups()
    objects: list = [None] * dist.get_world_size()
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    assert [one["rank"] for one in objects] == list(range(dist.get_world_size()))


@pytest.mark.parametrize(
    ("world_size", "dtypes", "laws"),
    [
        slow_unless(True, 2, [torch.float32, torch.bfloat16], [Delays("uniform", 1)]),
        slow_unless(
            False,
            4,
            [torch.float16, torch.float32, torch.int32, torch.int64],
            [Delays(law, 2) for law in LAWS],
        ),
    ],
)
def test_hccls_collectives_and_messages_are_exact_under_delays(
    npu_worlds: DeviceWorlds, world_size: int, dtypes: list[torch.dtype], laws: list[Delays]
):
    npu_worlds.run(check_all, world_size, dtypes, laws)


_STARTS = [1764110000.125, 1764109990.5]  # fp32 is 128 s apart here


def reduced_doubles() -> list[float]:
    """First as HCCL has it, which has no fp64; then as the start script mends it."""
    mine = torch.tensor([_STARTS[dist.get_rank()]], dtype=torch.float64)
    bits = mine.view(torch.int64).to(device_of_rank())
    on_device = bits.view(torch.float64)
    try:
        dist.all_reduce(on_device.clone(), dist.ReduceOp.MIN)
    except RuntimeError as error:
        assert "Unsupported data type at::kDouble" in str(error)
    else:
        raise AssertionError("HCCL reduced fp64")
    reduce = on_ascend.exact_doubles(dist.all_reduce, "npu")
    found = []
    for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        tensor = on_device.clone()
        reduce(tensor, op)
        found.append(tensor.view(torch.int64).cpu().view(torch.float64).item())
    return found


def test_doubles_that_torch_npu_refuses_to_reduce_are_reduced_to_the_bit(npu_worlds: DeviceWorlds):
    assert npu_worlds.run(reduced_doubles, 2) == [[min(_STARTS), max(_STARTS)]] * 2


def asked_for_capability() -> tuple[str, int | None, int]:
    """Of a broadcast, and of the properties of a device without and with the start script."""
    import torch_npu.contrib.transfer_to_npu  # noqa: F401  # pyright: ignore

    tensor = torch.ones(3, device=device_of_rank())
    try:
        dist.broadcast(tensor, 0)
        said = "broadcast"
    except TypeError as error:
        said = str(error)
    major = torch.cuda.get_device_properties(0).major
    on_ascend.install()
    return said, major, torch.cuda.get_device_properties(torch.device("cuda:0")).major


def said_without_capability() -> str:
    os.environ.pop(on_ascend.CAPABILITY[0], None)
    return asked_for_capability()[0]


@pytest.mark.slow  # every other test on NPUs needs what the start script sets
def test_without_the_capability_that_the_start_script_sets_every_broadcast_fails(
    npu_worlds: DeviceWorlds,
):
    """Megatron compares the major number with 10 where tensors or contexts are cut."""
    name, value = on_ascend.CAPABILITY
    assert "NoneType" in npu_worlds.run(said_without_capability, 1)[0]
    with_it = npu_worlds.run(asked_for_capability, 1, env={name: value})
    assert with_it == [("broadcast", None, 8)]


def test_torch_npu_aborts_beside_torchs_build_for_cuda_as_the_start_script_says(
    npu_worlds: DeviceWorlds,
):
    """The emulated device takes the abort away where it is preloaded; here it is not."""
    env = os.environ | build.environment() | {"LD_PRELOAD": ""}
    ended = subprocess.run(
        [sys.executable, "-c", "import torch"], env=env, capture_output=True, text=True
    )
    assert ended.returncode and "Duplicated key" in ended.stderr + ended.stdout
