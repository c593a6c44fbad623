# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The fp32 main parameters: updates that bf16 cannot see add up in them, and they are, bit for bit,
those of a plain fp32 optimizer.
"""

import torch
from torch import nn

from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.plan import plan_units
from scripts.testbed.contenders.adam import owned_params
from scripts.testbed.ranks import run_ranks
from tests.support.engine import nested_sizes, own_fragments, shard_groups, unshard

# A bf16 number between 1 and 2 has neighbours 2^-7 away, and keeps what changes by less than half
# of that. Adam moves a parameter by about its learning rate: 16 steps from one to the next.
ULP = 2**-7
LEARNING_RATE = ULP / 16
NUM_STEPS = 24
SHAPES = [(5, 7), (13,), (3, 2, 2)]


class Weighted(nn.Module):
    """Its loss is linear in the parameters, with factors that bf16 holds: the gradients are the
    factors, and their mean over ranks is exact."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        values = [1.25 + 0.5 * torch.rand(shape, generator=generator) for shape in SHAPES]
        self.weights = nn.ParameterList(value.bfloat16() for value in values)

    def forward(self, factors: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.weights, factors, strict=True)
        return sum((weight * factor).sum(dtype=torch.float32) for weight, factor in pairs)


def factors_of(step: int) -> list[torch.Tensor]:
    """Positive, so that every parameter moves one way."""
    generator = torch.Generator().manual_seed(step)
    return [(0.5 + torch.rand(shape, generator=generator)).bfloat16() for shape in SHAPES]


def adam(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LEARNING_RATE, weight_decay=0.01)


def plain_main_params() -> list[list[torch.Tensor]]:
    """Of fp32 parameters that start as the model, after every step."""
    params = [nn.Parameter(weight.detach().float()) for weight in Weighted().weights]
    optimizer, seen = adam(params), []
    for step in range(NUM_STEPS):
        for param, factor in zip(params, factors_of(step), strict=True):
            param.grad = factor.float()
        optimizer.step()
        seen.append([param.detach().clone() for param in params])
    return seen


def compare_main_params(sizes_list: list[tuple]) -> None:
    expected = plain_main_params()
    start = [weight.detach().clone() for weight in Weighted().weights]
    for sizes in sizes_list:
        model, groups = Weighted(), shard_groups(sizes)
        runtime = HZPRuntime(
            model,
            plan_units(model, [model]),
            {"dense": groups},
            grad_scale=1 / groups.topology.world_size,
        )
        (unit,) = runtime.units
        optimizer = adam(owned_params(unit)) if owned_params(unit) else None
        for step in range(NUM_STEPS):
            runtime.zero_grads()
            model(factors_of(step)).backward()
            runtime.sync_grads()
            if optimizer is not None:
                optimizer.step()
            runtime.sync_params()
            runtime.settle()
            own = own_fragments(unit, expected[step])
            for found, true in zip(unit.main_param_fragments(), own, strict=True):
                assert found.dtype == torch.float32 and torch.equal(found, true), (sizes, step)
            unshard(unit)
            for weight, true, first in zip(unit.params, expected[step], start, strict=True):
                assert torch.equal(weight, true.bfloat16()), (sizes, step)
                if step < 4:
                    assert torch.equal(weight, first), (sizes, step)
            unit.reshard()
        assert all((first - true).min() > ULP for first, true in zip(start, expected[-1]))
        runtime.close()


def test_updates_smaller_than_bf16_can_see_add_up_as_in_a_plain_fp32_adam():
    run_ranks(compare_main_params, 2, nested_sizes(2))
