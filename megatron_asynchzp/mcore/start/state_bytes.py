# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the bytes that units hold at rest, the optimizer's states included."""

from collections.abc import Iterable, Sequence

import torch
from megatron.core.optimizer.emerging_optimizers import _is_nonlinear_or_embedding

from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.planner.memory import MomentBytes, state_nbytes, total_nbytes


def matrix_numel(params: Iterable[torch.nn.Parameter]) -> int:
    """Count the elements of those that Muon treats as matrices."""
    return sum(param.numel() for param in params if not _is_nonlinear_or_embedding(param))


def mean_moment_nbytes(unit: HZPUnit, moments: MomentBytes) -> float:
    """Return the bytes per element of `unit`, over the ranks that share its optimizer states."""
    return moments.mean(unit.layout.numel, matrix_numel(unit.params))


def state_nbytes_by_formula(
    units: Sequence[HZPUnit], moments: MomentBytes = MomentBytes(), with_padding: bool = False
) -> dict[str, float]:
    """Return bytes by state, of AsyncHZP section 3.

    N counts each unit with the sizes of its own sharding group; a frozen unit has parameters alone.
    with_padding takes the flat buffer's N, which is larger.
    """
    of_units: list[tuple[dict[str, float], bool]] = []
    for unit in units:
        sizes, layout = unit.groups.topology.sizes, unit.layout
        numel = layout.padded_numel if with_padding else layout.numel
        mean, main_grad = mean_moment_nbytes(unit, moments), unit.groups.main_grad_dtype.itemsize
        itemsize = unit.dtype.itemsize
        nbytes = state_nbytes(numel, itemsize, sizes, mean, main_grad, unit.is_trained)
        of_units.append((nbytes, unit.is_on_host))
    return total_nbytes(of_units)


def state_nbytes_allocated(
    units: Sequence[HZPUnit], moments: MomentBytes = MomentBytes()
) -> dict[str, int]:
    of_units: list[tuple[dict[str, float], bool]] = []
    for unit in units:
        allocated = {**unit.state_nbytes(), "optimizer_moments": 0}
        if unit.is_on_host:
            # In the room for their update there is a place for each element, padding included.
            numel = unit.optim_range.numel
            allocated["main_param"] = unit.main_param.nbytes if unit.is_main_param_away else 0
            allocated["optimizer_moments"] = round(mean_moment_nbytes(unit, moments) * numel)
        elif unit.is_trained:
            for param, fragment in zip(unit.params, unit.main_param_fragments(), strict=True):
                of_param = moments.mean(1, matrix_numel([param]) > 0)
                allocated["optimizer_moments"] += round(of_param) * fragment.numel()
        of_units.append(({state: float(n) for state, n in allocated.items()}, unit.is_on_host))
    return {state: round(nbytes) for state, nbytes in total_nbytes(of_units).items()}
