# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Norms and dumps of whole parameters and gradients, made from the shards."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_asynchzp.engine.comm.collectives import all_gather_steps, run_steps
from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.mcore.step.differences import is_counted_once


@torch.no_grad()
def norm_of_params(runtimes: Sequence[HZPRuntime], in_model_dtype: bool) -> float:
    """Return the 2-norm of all parameters, without a gather. Collective over the world.

    in_model_dtype chooses model parameters over fp32 main parameters. As in Megatron, copies of
    tied and of tensor-parallel parameters count once.
    """
    tp_group = parallel_state.get_tensor_model_parallel_group()
    expert_tp_group = parallel_state.get_expert_tensor_parallel_group()
    squares: list[torch.Tensor] = []
    for runtime in runtimes:
        if runtime.host_states is not None:
            runtime.host_states.settle()
    for unit in (unit for runtime in runtimes for unit in runtime.units):
        if unit.groups.topology.replica_index:
            continue
        for param, values in zip(unit.params, _owned_values(unit, in_model_dtype), strict=True):
            if values.numel() and is_counted_once(param, tp_group, expert_tp_group):
                squares.append(values.float().norm().square())
    device = runtimes[0].units[0].device
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
    dist.all_reduce(total)
    return total.item() ** 0.5


def _owned_values(unit: HZPUnit, in_model_dtype: bool) -> list[torch.Tensor]:
    if not unit.is_trained:
        return unit.model_param.sub_buffer(unit.optim_range).fragment_views()
    # Not from model_param, which the lanes may be rebuilding: rounding gives the same numbers.
    fragments = [values.to(unit.device) for values in unit.main_param_fragments()]
    return [values.to(unit.dtype) for values in fragments] if in_model_dtype else fragments


@torch.no_grad()
def whole_params(runtime: HZPRuntime) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each whole parameter with its name, a unit at a time, between steps. Collective."""
    runtime.settle()
    for unit in runtime.units:
        yield from _named(unit, whole_unit(unit))


@torch.no_grad()
def whole_unit(unit: HZPUnit) -> torch.Tensor:
    """Return a unit's parameters (1-D, padded_numel) in new memory.

    Collective over the ranks that share a copy of them; between two steps, with nothing in flight.
    """
    full = torch.empty(unit.layout.padded_numel, dtype=unit.dtype, device=unit.device)
    run_steps(unit.unshard_steps(full))
    return full


@torch.no_grad()
def whole_marks(unit: HZPUnit, mark: str) -> torch.Tensor | None:
    """Return packed bits of the elements changed since `mark` (1-D, see Marks), None for all.

    Collective over the ranks that share a copy of the optimizer state.
    """
    bits = unit.marks.bits.get(mark)
    if bits is None:
        return None
    full = bits.new_empty(unit.layout.padded_numel * bits.numel() // unit.optim_range.numel)
    run_steps(all_gather_steps(bits, full, unit.groups.optim_gather_axes))
    return full


@torch.no_grad()
def whole_grads(runtime: HZPRuntime) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each gradient of a chunk after its last reduction, as `whole_params`."""
    runtime.settle()
    for unit in runtime.units:
        if unit.is_trained:
            own, axes = unit.main_grad.view(unit.optim_range), unit.groups.optim_gather_axes
            full = own.new_empty(unit.layout.padded_numel)
            run_steps(all_gather_steps(own, full, axes))
            yield from _named(unit, full)


def _named(unit: HZPUnit, full: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    return zip(unit.param_names, unit.views_of(full), strict=True)
