# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the decision how many units are sent while backward goes on, before the update."""

from typing import NamedTuple

from megatron_asynchzp.sharding.topology import ShardTopology


class OuterTraffic(NamedTuple):
    """Bytes that a rank sends in a step outside its parameter shard, for one unit."""

    params: float
    grads: float

    @classmethod
    def of(
        cls, numel: int, param_itemsize: int, grad_itemsize: int, topology: ShardTopology
    ) -> "OuterTraffic":
        """Of a unit of `numel` elements, padding included."""
        param, optim = numel / topology.sizes.param, numel / topology.sizes.optim
        replicas = topology.world_size / topology.sizes.optim
        grads = param - optim + 2 * optim * (1 - 1 / replicas)
        return cls(param_itemsize * (param - optim), grad_itemsize * grads)


class BackwardRoom:
    """What is left for parameters on the links outside a parameter shard, in one backward.

    Backward takes two thirds of the computation, and sees all gradients on these links; forward a
    third, and all parameters. So where both take as long as the computation, backward has room for
    two thirds of the sum less the gradients: a third of the parameters in fp32, or with parameters
    and gradients in bf16; nothing with parameters in bf16 and gradients in fp32, which are twice as
    long. Spread over backward: what is left then comes as evenly through the next forward as its
    computation.
    """

    def __init__(self) -> None:
        self._left = 0.0

    def add(self, traffic: OuterTraffic) -> None:
        """The gradient of a unit is complete."""
        self._left += 2 * traffic.params - traffic.grads

    def takes(self, traffic: OuterTraffic) -> bool:
        """Whether the unit's parameters find room; then they have it."""
        if not 0 < 3 * traffic.params <= self._left:
            return False
        self._left -= 3 * traffic.params
        return True
