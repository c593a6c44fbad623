# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the decision how many units are sent while backward goes on, before the update."""

from typing import NamedTuple

from megatron_asynchzp.sharding.layout import FP32_NBYTES
from megatron_asynchzp.sharding.topology import ShardSizes


class OuterTraffic(NamedTuple):
    """Bytes that a rank sends in a step outside its parameter shard, for one unit."""

    params: float
    grads: float

    @classmethod
    def of(
        cls, numel: int, param_itemsize: int, grad_itemsize: int, sizes: ShardSizes, ranks: int
    ) -> "OuterTraffic":
        """Count the bytes of `numel` padded elements, of a unit in a sharding group of `ranks`."""
        param, optim = numel / sizes.param, numel / sizes.optim
        replicas = ranks / sizes.optim
        grads = param - optim + 2 * optim * (1 - 1 / replicas)
        return cls(param_itemsize * (param - optim), grad_itemsize * grads)

    def may_have_room(self, is_forced: bool) -> bool:
        """Whether among many such units one is sent. is_forced: see BackwardRoom.sends."""
        return self.params > 0 and (is_forced or 2 * self.params > self.grads)


class BackwardRoom:
    """Room left for parameters on the links outside a parameter shard, in one backward.

    Backward takes two thirds of the computation, and sees all gradients on these links; forward a
    third, and all parameters. So where both take as long as the computation, backward has room for
    two thirds of the sum less the gradients: a third of the parameters in fp32, or with parameters
    and gradients in bf16; nothing with parameters in bf16 and gradients in fp32, which are twice as
    long. Spread over backward: what is left then comes as evenly through the next forward as its
    computation.
    """

    def __init__(self) -> None:
        self._left = 0.0

    def sends(self, traffic: OuterTraffic, may_send: bool, is_forced: bool) -> bool:
        """Whether a unit, whose gradient is complete, is sent now; called for every unit.

        may_send: whether it can be. is_forced: even where there is no room.
        """
        self._left += 2 * traffic.params - traffic.grads
        has_room = 3 * traffic.params <= self._left
        if not (may_send and traffic.params and (is_forced or has_room)):
            return False
        self._left -= 3 * traffic.params
        return True


def preview_nbytes(
    numel: float, moments_nbytes: float, is_scaled: bool = False, shard_numel: float = 0
) -> float:
    """Bytes of the copies with which an update of `numel` elements of an optimizer shard is
    computed ahead. moments_nbytes: of an element; is_scaled: by a loss scale, as in fp16;
    shard_numel: of the parameter shard, where it holds the main parameters (an fp32 model)."""
    copies_nbytes = (FP32_NBYTES * is_scaled + moments_nbytes) * numel
    return copies_nbytes + FP32_NBYTES * max(numel, shard_numel)
