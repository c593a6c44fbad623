# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns which units a model chunk sends before their update, and how many backward has room for."""

from collections.abc import Hashable
from typing import NamedTuple

from megatron_asynchzp.engine.sharding.layout import FP32_NBYTES
from megatron_asynchzp.engine.sharding.topology import ShardSizes


class EarlyUnits[Unit: Hashable]:
    """Units that were sent early, and whether a step may send more.

    Until the update their parameter shards already hold the values of the next step.
    """

    def __init__(self) -> None:
        # In the order in which they were sent.
        self.units: dict[Unit, None] = {}
        # False for the rest of the run as soon as a unit is used between its early send and the
        # update.
        self.is_allowed = True

    def pop_all(self) -> list[Unit]:
        units = list(self.units)
        self.units.clear()
        return units


class OuterTraffic(NamedTuple):
    """Bytes that a rank sends for one unit in a step outside its parameter shard."""

    params: float
    grads: float

    @classmethod
    def of(
        cls, numel: int, param_itemsize: int, grad_itemsize: int, sizes: ShardSizes, ranks: int
    ) -> "OuterTraffic":
        param, optim = numel / sizes.param, numel / sizes.optim
        replicas = ranks / sizes.optim
        grads = param - optim + 2 * optim * (1 - 1 / replicas)
        return cls(param_itemsize * (param - optim), grad_itemsize * grads)

    def may_have_room(self, is_forced: bool) -> bool:
        """Return whether at least one of many such units is sent early."""
        return self.params > 0 and (is_forced or 2 * self.params > self.grads)


class BackwardRoom:
    """Counts the time that backward leaves on the links outside a parameter shard.

    Backward takes two thirds of the computation and sends all gradients there; forward takes one
    third and sends all parameters. If the traffic of both takes as long as the computation,
    backward has room for two thirds of the sum less the gradients: a third of the parameters if
    both have the same dtype, nothing for bf16 parameters with fp32 gradients. Early sends are
    spread evenly over backward, so that the rest arrives evenly during the next forward.
    """

    def __init__(self) -> None:
        self._left = 0.0

    def should_send(self, traffic: OuterTraffic, may_send: bool, is_forced: bool) -> bool:
        """Return whether to send a unit whose gradient is complete; ask for every unit, in order.

        `may_send` is whether the unit can be sent early; `is_forced` sends it even without room.
        """
        self._left += 2 * traffic.params - traffic.grads
        has_room = 3 * traffic.params <= self._left
        if not (may_send and traffic.params and (is_forced or has_room)):
            return False
        self._left -= 3 * traffic.params
        return True


def preview_nbytes(
    numel: float,  # of the optimizer shard
    moments_nbytes: float,  # per element
    is_scaled: bool = False,  # by a loss scale, as in fp16
    shard_numel: float = 0,  # of the parameter shard, if it holds the main parameters (fp32)
) -> float:
    copies_nbytes = (FP32_NBYTES * is_scaled + moments_nbytes) * numel
    return copies_nbytes + FP32_NBYTES * max(numel, shard_numel)
