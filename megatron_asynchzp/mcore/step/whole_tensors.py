# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What Megatron asks of whole parameters and gradients, answered from the shards: the norm of all
parameters, and dumps of whole tensors.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_asynchzp.comm.collectives import all_gather_steps, run_steps
from megatron_asynchzp.mcore.step.differences import is_counted_once
from megatron_asynchzp.zero.autograd import HZPRuntime
from megatron_asynchzp.zero.unit import HZPUnit

# ---- the norm of all parameters


@torch.no_grad()
def norm_of_params(runtimes: Sequence[HZPRuntime], in_model_dtype: bool) -> float:
    """The 2-norm of all parameters of the model, each element counted once. Collective over the
    world; nothing is gathered.

    in_model_dtype: of the parameters as they compute, and not of the fp32 main parameters. Left
    out is what Megatron leaves out: copies of tied weights and of tensor-parallel parameters.
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
    """Return this rank's O range of each parameter: 1-D."""
    if not unit.is_trained:
        return unit.model_param.sub_buffer(unit.optim_range).fragment_views()
    # Not from model_param, which the lanes may be rebuilding: rounding gives the same numbers.
    fragments = [values.to(unit.device) for values in unit.main_param_fragments()]
    return [values.to(unit.dtype) for values in fragments] if in_model_dtype else fragments


# ---- dumps


@torch.no_grad()
def whole_params(runtime: HZPRuntime) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter of a model chunk, whole, with its name; one unit in memory at a time.

    Collective over every sharding group; between two steps.
    """
    runtime.settle()
    for unit in runtime.units:
        yield from _named(unit, whole_unit(unit))


@torch.no_grad()
def whole_unit(unit: HZPUnit) -> torch.Tensor:
    """The parameters of a unit (1-D, padded_numel), in memory of their own. Collective over the
    ranks that share one copy of its parameters; between two steps, while nothing is in flight."""
    full = torch.empty(unit.layout.padded_numel, dtype=unit.dtype, device=unit.device)
    run_steps(unit.gather_steps(full))
    return full


@torch.no_grad()
def whole_marks(unit: HZPUnit, mark: str) -> torch.Tensor | None:
    """Which elements of a unit may have changed since `mark`: packed bits (1-D, see Marks), None
    where all count. Collective over the ranks that share one copy of its optimizer state."""
    bits = unit.marks.bits.get(mark)
    if bits is None:
        return None
    full = bits.new_empty(unit.layout.padded_numel * bits.numel() // unit.optim_range.numel)
    run_steps(all_gather_steps(bits, full, unit.groups.optim_gather_axes))
    return full


@torch.no_grad()
def whole_grads(runtime: HZPRuntime) -> Iterator[tuple[str, torch.Tensor]]:
    """Each gradient of a model chunk after its last reduction, as `whole_params`."""
    runtime.settle()
    for unit in runtime.units:
        if unit.is_trained:
            own, axes = unit.main_grad.view(unit.optim_range), unit.groups.optim_gather_axes
            full = own.new_empty(unit.layout.padded_numel)
            run_steps(all_gather_steps(own, full, axes))
            yield from _named(unit, full)


def _named(unit: HZPUnit, full: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    return zip(unit.param_names, unit.views_of(full), strict=True)
