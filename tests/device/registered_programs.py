# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What ranks run in the tests of registered memory."""

import ctypes
import os
import signal
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.cuda import nccl

from megatron_asynchzp import ScheduleConfig, ShardedModel, ShardSizes, shard
from megatron_asynchzp.engine.device import device_of
from scripts.testbed.device.delays import Delays
from scripts.testbed.log_lines import log_lines
from tests.device import programs
from tests.device.programs import CLIP, Case, Seen, device_of_rank, new_adamw, new_toy
from tests.support.toy_models import toy_batch, toy_loss
from tests.zero.test_saved_views import hide_weights

DOMAIN = 8


class Trained(NamedTuple):
    """num_windows: while it trained, and after the end; collectives: of inside.in_windows."""

    seen: Seen
    num_windows: tuple[int, int]
    collectives: dict[str, int]


def new_sharded(case: Case, domain: int, dtype: torch.dtype, **more: Any) -> ShardedModel:
    model = new_toy(case.recomputes).to(dtype)
    schedule = ScheduleConfig(case.schedule, registers_memory=domain, **more)
    return shard(model, model.blocks, ShardSizes(*case.sizes), new_adamw, schedule=schedule)


def train(case: Case, domain: int, dtype: torch.dtype, keep_nbytes: int) -> Trained:
    from scripts.testbed.device import inside

    sharded = new_sharded(case, domain, dtype, keep_params_nbytes=keep_nbytes)
    inside.in_windows()
    seen = programs.steps_of(
        sharded.model,
        case.num_micro_batches,
        sharded.zero_grad,
        sharded.set_is_last_micro_batch,
        lambda: (sharded.clip_grad_norm_(CLIP), sharded.step())[0],
        case.num_idle,
    )
    during = inside.num_registered()
    sharded.close()
    return Trained(seen, (during, inside.num_registered()), inside.in_windows())


def train_with_and_without(
    cases: Sequence[Case],
    laws: Sequence[Delays],
    dtype: torch.dtype = torch.float32,
    keep_nbytes: int = 0,
) -> list[tuple[Case, Trained, Trained]]:
    """Each case under each law: without registered memory (once, under the first law), and with."""
    from scripts.testbed.device import inside

    results, plain = [], {}
    for delays in laws:
        inside.set_delays(delays, dist.get_rank(), dist.get_world_size())
        for case in cases:
            if case not in plain:
                plain[case] = train(case, 0, dtype, keep_nbytes)
            results.append((case, plain[case], train(case, DOMAIN, dtype, keep_nbytes)))
    return results


class Slept(NamedTuple):
    """In each turn: windows awake and asleep, bytes that torch has reserved asleep."""

    seen: Seen
    awake: list[int]
    asleep: list[int]
    reserved: list[int]
    at_end: int


def train_and_sleep(sizes: tuple[int, ...], domain: int, num_turns: int) -> Slept:
    from scripts.testbed.device import inside

    sharded = new_sharded(Case(sizes), domain, torch.bfloat16)  # pyright: ignore[reportArgumentType]
    slept = Slept([], [], [], [], 0)
    for step in range(num_turns):
        sharded.zero_grad()
        loss = toy_loss(sharded.model, toy_batch(step, 0, dist.get_rank()).to(device_of_rank()))
        loss.backward()
        norm = sharded.clip_grad_norm_(CLIP)
        sharded.step()
        slept.seen.append((loss.item(), norm.item()))
        del loss, norm
        slept.awake.append(inside.num_registered())
        sharded.sleep(2)
        slept.asleep.append(inside.num_registered())
        slept.reserved.append(torch.cuda.memory_reserved())
        sharded.wake()
    sharded.close()
    return slept._replace(at_end=inside.num_registered())


# ---- a region by itself


def new_registered(domain: int = DOMAIN, is_symmetric: bool = True, backend: Any = None) -> Any:
    """Registered memory, a new group of all ranks, and a tensor that it registers if it can."""
    from megatron_asynchzp.engine.comm.registered import RegisteredMemory

    device = device_of_rank()
    group: Any = dist.new_group(None, backend=backend, group_desc="ALL")
    registered = RegisteredMemory(device_of(torch.empty(0, device=device)), domain, is_symmetric)
    for _ in range(2):  # as two chunks of a model ask
        new_registered = registered.allocator([group, group])
    return registered, group, new_registered and new_registered(1 << 20)


def deregister_what_a_collective_uses() -> int:
    """The device has not begun the collective, whose end the current stream waits for."""
    from scripts.testbed.device import inside

    registered, group, memory = new_registered()
    dist.all_reduce(memory.view(torch.float32), group=group)
    registered.deregister(60.0)
    return inside.num_registered()


def kinds_of_registration(domain: int, has_windows: bool) -> tuple[int, int, list[str]]:
    """Windows, plain registrations, and the lines of the log."""
    from scripts.testbed.device import inside

    with log_lines() as lines:
        registered, _, memory = new_registered(domain, has_windows)
    counts = inside.num_registered(), inside.num_registered(is_plain=True)
    registered.deregister(60.0)
    del memory
    return *counts, lines


def calibrated(registers: bool) -> dict[str, int]:
    """Return the collectives of a calibration whose buffers were in windows."""
    from megatron_asynchzp.commands import calibration
    from megatron_asynchzp.planner.cluster import Cluster, Device, Link
    from scripts.testbed.device import inside

    calibration._MATRIX = 64
    cluster = Cluster("here", 1, 2, Device(0.1, 8), Link(1.0), Link(1.0, cards=1))
    inside.in_windows()
    calibration.calibrate(cluster, (2**10, 2**18, 2**20), repetitions=1, registers=registers)
    return inside.in_windows()


# ---- faults, each of which the real NCCL would not survive


class _Region:
    """Memory of NCCL's allocator in a pool of its own, and a communicator without it."""

    def __init__(self, *nbytes: int):
        device = device_of_rank()
        self.group: Any = dist.new_group([*range(dist.get_world_size())])
        dist.all_reduce(torch.zeros(1, device=device), group=self.group)
        self.backend: Any = self.group._get_backend(device)
        self.pool = torch.cuda.MemPool(self.backend.mem_allocator)
        with torch.cuda.use_mem_pool(self.pool):
            self.all = [
                torch.empty(n, dtype=torch.uint8, device=device) for n in nbytes or (32 << 20,)
            ]
        self.memory = self.all[0]
        self.nccl, self.comm = ctypes.CDLL(None), ctypes.c_void_p(self.backend._comm_ptr())

    def register(self) -> None:
        self.backend.register_mem_pool(self.pool, symm=True)

    def deregister(self) -> None:
        self.backend.deregister_mem_pool(self.pool)

    def new_window(self, first: int = 0, memory: torch.Tensor | None = None) -> ctypes.c_void_p:
        """Make a window of 4 KiB behind torch's back."""
        start = (self.memory if memory is None else memory).data_ptr() + first
        window, size = ctypes.c_void_p(), ctypes.c_size_t(4096)
        register = self.nccl.ncclCommWindowRegister
        register(self.comm, ctypes.c_void_p(start), size, ctypes.byref(window), 1)
        return window

    def all_reduce(self, numel: int = 4096) -> None:
        dist.all_reduce(self.memory[:numel], group=self.group)

    def capture(self, within: Any, before_replay: Any = lambda: None) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            within()
        before_replay()
        graph.replay()
        torch.cuda.synchronize()


def other_offset() -> None:
    region = _Region()
    region.register()
    first = 4096 * dist.get_rank()
    part = region.memory[first : first + 4096]
    dist.all_gather_into_tensor(part, part[:2048].clone(), group=region.group)
    torch.cuda.synchronize()


def other_size() -> None:
    _Region((32 + 2 * dist.get_rank()) << 20).register()


def other_order() -> None:
    sizes = [32 << 20, 48 << 20]
    _Region(*(sizes if dist.get_rank() else sizes[::-1])).register()


def one_rank_does_not_register() -> None:
    region = _Region()
    if dist.get_rank() != 1:
        region.register()
    region.all_reduce()
    torch.cuda.synchronize()


def registered_twice() -> None:
    region = _Region()
    region.register()
    region.new_window(4096)


def deregistered_twice() -> None:
    region = _Region()
    window = region.new_window()
    for _ in range(2):
        region.nccl.ncclCommWindowDeregister(region.comm, window)


def window_given_to_the_other_deregistration() -> None:
    region = _Region()
    region.nccl.ncclCommDeregister(region.comm, region.new_window())


def deregistered_under_way() -> None:
    region = _Region()
    region.register()
    region.all_reduce()
    region.deregister()


def registered_in_a_capture() -> None:
    region = _Region()
    region.capture(region.register)


def replayed_after_deregistration() -> None:
    region = _Region()
    region.register()
    region.capture(region.all_reduce, region.deregister)


def aborted_with_a_window() -> None:
    region = _Region()
    region.new_window()
    region.backend.abort()


def window_of_torchs_own_memory() -> None:
    _Region().new_window(memory=torch.empty(1 << 20, dtype=torch.uint8, device=device_of_rank()))


def beyond_the_end() -> None:
    region = _Region()
    region.new_window()
    region.all_reduce(8192)


# ---- what the engine refuses


def message_of(kind: str) -> str:
    """Return what the engine says of memory that it cannot register, or of its use."""
    from megatron_asynchzp.errors import ConfigurationError

    model = hide_weights(new_toy()) if kind == "views" else new_toy()
    if kind == "settings":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:native,expandable_segments:True"
    if kind == "version":
        nccl.version = lambda: (2, 26, 5)
    schedule = ScheduleConfig(registers_memory=DOMAIN)
    try:
        if kind == "backend":
            new_registered(backend="gloo")
        sharded = shard(model, model.blocks, ShardSizes(2, 2, 2), new_adamw, schedule=schedule)
        if kind == "growth":
            sharded.runtime.gathers.arena.extend(1 << 20)
        sharded.zero_grad()
        toy_loss(model, toy_batch(0, 0, dist.get_rank()).to(device_of_rank())).backward()
    except ConfigurationError as error:
        return str(error)
    return "nothing"


def close_after_a_failure() -> tuple[str, int]:
    """Return the error of a close after a failure, and how many windows are left."""
    from scripts.testbed.device import inside

    sharded = new_sharded(Case((2, 2, 2)), DOMAIN, torch.float32)
    sharded.zero_grad()
    toy_loss(sharded.model, toy_batch(0, 0, dist.get_rank()).to(device_of_rank())).backward()
    sharded.runtime.driver.fail(RuntimeError("it failed"))
    try:
        sharded.close()
    except RuntimeError as error:
        return str(error), inside.num_registered()
    return "", -1


# ---- Megatron

FLAG = "--use-nccl-ub"


def _pretrain(line: list[str], uses_te: bool = False, prepare: Any = None) -> Any:
    from megatron_asynchzp.mcore.step.communication import Communication
    from scripts.testbed.megatron_runs import on_device, run_pretrain

    with on_device(uses_te=uses_te):
        seen = run_pretrain(line, prepare=prepare).losses_and_norms
    Communication.close_all()
    return seen


def pretrain_with_and_without(line: list[str], law: Delays, uses_te: bool = False) -> tuple:
    """Steps without registered memory, and with it; its collectives; windows that are left."""
    from scripts.testbed.device import inside

    inside.set_delays(law, dist.get_rank(), dist.get_world_size())
    plain = _pretrain(line, uses_te)
    inside.in_windows()
    with log_lines() as lines:
        registered = _pretrain([*line, FLAG], uses_te)
    asked = [line for line in lines if "window" in line]
    assert len(set(asked)) == len(asked)  # once for each group, with any number of chunks
    return plain, registered, inside.in_windows(), inside.num_registered()


def trained(line: list[str], law: Delays, last_forward: int = 0) -> Any:
    """Return steps of a run; rank 1 is killed in the forward of that number."""
    from scripts.testbed.device import inside
    from scripts.testbed.tiny_gpt import seed_parameters

    forwards = count(1)

    def end_process(*_: object) -> None:
        if next(forwards) == last_forward and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def prepare(chunks: list) -> list:
        chunks[0].register_forward_pre_hook(end_process)
        return seed_parameters(chunks)

    inside.set_delays(law, dist.get_rank(), dist.get_world_size())
    return _pretrain(line, prepare=prepare)
