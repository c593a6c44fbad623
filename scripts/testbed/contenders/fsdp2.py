# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how every benchmark gives a model to torch's FSDP2.

The ranks over which it is sharded and the parameters that it keeps for backward are at the settings
that its documentation and torchtitan recommend, and those that they offer.

- Units: the embedding, every layer, norm and output together; nothing is left to the root.
- The next unit is gathered ahead by explicit lists. torch's implicit prefetch relies on a host that
  runs ahead of its device; here the host computes.
- What backward needs first is not resharded after forward: the last layer and the output.
- Gradients are reduced in a group of their own (set_separate_reduce_scatter_group), so that they
  do not queue behind gathers, two at a time (set_reduce_scatter_max_input_buffers).
- The embedding is not gathered again for backward, which does not read it
  (set_unshard_in_backward).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

REDUCTIONS_IN_FLIGHT = 2

Unit = Sequence[nn.Module]  # modules that are gathered together, in the order of their calls


class Sharding(NamedTuple):
    """How FSDP2 shards.

    `is_hybrid`: over the ranks of a node and replicated over nodes, not over all ranks;
    `keeps_params`: gathered once a step, all parameters stay for backward.
    """

    is_hybrid: bool
    keeps_params: bool

    def new_mesh(self, nodes: int, ranks_per_node: int, device_type: str) -> DeviceMesh:
        if not self.is_hybrid or nodes == 1:
            return init_device_mesh(device_type, (nodes * ranks_per_node,))
        return init_device_mesh(
            device_type, (nodes, ranks_per_node), mesh_dim_names=("replicate", "shard")
        )


SHARDINGS = {
    "hsdp": Sharding(is_hybrid=True, keeps_params=False),
    "hsdp-kept": Sharding(is_hybrid=True, keeps_params=True),
    "fsdp2": Sharding(is_hybrid=False, keeps_params=False),  # ZeRO-3
    "fsdp2-kept": Sharding(is_hybrid=False, keeps_params=True),  # ZeRO-2
}


def shard_fully(
    model: nn.Module,
    units: Sequence[Unit],
    sharding: Sharding,
    cluster: tuple[int, int],
    num_last: int,
    backward: Sequence[Unit] | None = None,
    unread_in_backward: Sequence[nn.Module] = (),
) -> None:
    """Shard `model` in place.

    units: in the order of forward, a unit before those inside it; cluster: nodes and ranks of each;
    num_last: units at the end that keep their parameters from forward to backward in any case;
    backward: units in the order of backward, where that is not the reverse; unread_in_backward:
    units' first modules that backward can do without.
    """
    device_type = next(model.parameters()).device.type
    mesh = sharding.new_mesh(*cluster, device_type)
    num_kept = len(units) if sharding.keeps_params else num_last
    first_kept = len(units) - num_kept
    for index, unit in reversed([*enumerate(units)]):  # inner ones first
        modules: Any = list(unit) if len(unit) > 1 else unit[0]
        fully_shard(modules, mesh=mesh, reshard_after_forward=index < first_kept)
    root: Any = fully_shard(model, mesh=mesh)
    root.set_separate_reduce_scatter_group(True)
    root.set_reduce_scatter_max_input_buffers(REDUCTIONS_IN_FLIGHT)
    for heads, prefetch in (
        (_heads(units), "set_modules_to_forward_prefetch"),
        (_heads(backward or units[::-1]), "set_modules_to_backward_prefetch"),
    ):
        for head, following in zip(heads, heads[1:]):
            getattr(head, prefetch)([following])
    for module in unread_in_backward:
        module.set_unshard_in_backward(False)  # pyright: ignore[reportCallIssue]


def _heads(units: Sequence[Unit]) -> list[Any]:
    """The module by which torch knows each unit."""
    return [unit[0] for unit in units]


def gpt_units(model: nn.Module) -> list[Unit]:
    """Of Megatron's GPT, whose embedding and output have weights of their own."""
    layers = list(model.get_submodule("decoder.layers").children())
    head = [model.get_submodule(name) for name in ("decoder.final_layernorm", "output_layer")]
    return [[model.get_submodule("embedding")], *([layer] for layer in layers), head]
