# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how other systems shard and when they send, as their sources have it in November 2026.

Their buckets, graphs and symmetric memory are not known here.

    distributed optimizer   sums of gradients once a step, during the last backward
    FSDP2                   gathers in each forward and backward, reduces in each backward
    FSDP2's HSDP            the same within a node, and sums over nodes in each backward too
    Megatron-FSDP           as FSDP2 within a node, over nodes once a step, during the last backward
    GTP                     the same; the optimizer over all
"""

from dataclasses import dataclass, replace

from megatron_asynchzp.planner.plan import Plan


@dataclass(frozen=True)
class Contender:
    """A system to compare a plan with."""

    name: str
    # of parameters, gradients and optimizer: 1, "node" or "all" ranks
    sizes: tuple[int | str, int | str, int | str]
    sums_each: bool = False  # see Plan

    @property
    def needs_nodes(self) -> bool:
        return "node" in self.sizes

    def numbers(self, ranks: int, in_node: int) -> tuple[int, int, int]:
        """Return its sizes in a sharding group of `ranks` with `in_node` ranks on a node."""
        number = {"node": in_node, "all": ranks}
        param, grad, optim = (number.get(str(size), size) for size in self.sizes)
        return int(param), int(grad), int(optim)

    def plan(self, like: Plan) -> Plan:
        """Plan its schedule for the sizes, batch and recomputation of `like`, along whole axes."""
        return replace(
            like,
            sizes=replace(like.sizes, cuts=()),
            schedule=replace(like.schedule, early_update="off"),
            sums_each=self.sums_each,
        )


DISTRIBUTED_OPTIMIZER = Contender("distributed optimizer", (1, 1, "all"))
FSDP2 = Contender("FSDP2", ("all", "all", "all"), sums_each=True)
FSDP2_HSDP = replace(FSDP2, name="FSDP2's HSDP", sizes=("node", "node", "node"))
MEGATRON_HSDP = Contender("Megatron-FSDP's HSDP", ("node", "node", "node"))
MEGATRON_HFSDP = Contender("Megatron-FSDP's HFSDP", ("node", "node", "all"))
GTP = Contender("GTP", ("node", "node", "all"))
# Of any sizes, for what flags ask for.
PLAIN_DATA_PARALLELISM = Contender("plain data parallelism", (1, 1, 1))
MEGATRON_FSDP = replace(MEGATRON_HFSDP, name="Megatron-FSDP")
CONTENDERS = (DISTRIBUTED_OPTIMIZER, FSDP2, FSDP2_HSDP, MEGATRON_HSDP, MEGATRON_HFSDP, GTP)
