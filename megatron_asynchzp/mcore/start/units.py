# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Which modules of a Megatron model are units, and which of these have their gradients late."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch import nn

from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.zero.plan import UnitPlan, plan_units
from megatron_asynchzp.engine.zero.unit import HZPUnit

# Attributes of parameters whose gradients finalize_model_grads changes after their reduction.
_SUMMED_OVER_TP = ("sequence_parallel", "average_gradients_across_tp_domain")
_SUMMED_OVER_PP = ("is_embedding_or_output_parameter", "shared_embedding", "pipeline_parallel")
_QK_NORMS = ("q_layernorm", "k_layernorm")


def sharding_group_key(param: nn.Parameter) -> str:
    """Return the sharding group of a parameter: Megatron marks experts with allreduce=False."""
    return "dense" if getattr(param, "allreduce", True) else "expert"


EDGES = ("embedding", "output_layer")
"""What units besides layers are called in a language model."""


def is_layer(module: object) -> bool:
    return isinstance(module, (BaseTransformerLayer, MambaLayer))


def is_language_model(module: nn.Module) -> bool:
    """Return whether it has an embedding or an output layer: such models share no class."""
    return hasattr(module, "shared_embedding_or_output_weight")


def _language_models(root: nn.Module) -> list[Any]:
    return [module for module in root.modules() if is_language_model(module)]


def _tied_weights(root: nn.Module) -> dict[nn.Parameter, tuple[nn.Module, ...]]:
    """Map each tied embedding weight to the other modules of this stage that use it."""
    # A copy on another pipeline stage counts: both copies need the same layout.
    tied: dict[nn.Parameter, tuple[nn.Module, ...]] = {}
    for model in _language_models(root):
        weight = model.shared_embedding_or_output_weight()
        if weight is None:
            continue
        output_layer = getattr(model, "output_layer", None)
        is_passed_on = model.share_embeddings_and_output_weights
        # A last stage with multi-token prediction has an embedding whose weight is passed on, and a
        # weight of the output layer that is never used.
        if output_layer is not None and is_passed_on and output_layer.weight is not weight:
            tied[weight] = (output_layer,)
        elif getattr(weight, "shared_embedding", False):
            tied[weight] = ()
    return tied


def plan_megatron_units(root: nn.Module, chunk: int = 0) -> list[UnitPlan]:
    """Plan the units of a model chunk: layers, experts, embedding, output layer, and the rest."""
    # chunk is its index on this rank. It is part of all names but the first chunk's, because each
    # chunk of an interleaved pipeline counts its layers from 0.
    layers = [module for module in root.modules() if is_layer(module)]
    edges: list[nn.Module] = []
    for model in _language_models(root):
        for name in EDGES:
            module = getattr(model, name, None)
            if isinstance(module, nn.Module) and any(True for _ in module.parameters()):
                edges.append(module)
    plans = plan_units(root, [*layers, *edges], sharding_group_key, _tied_weights(root))
    plans = [_with_owners(plan, root) if root in plan.modules else plan for plan in plans]
    return [replace(plan, name=f"chunk{chunk}.{plan.name}") for plan in plans] if chunk else plans


def _with_owners(plan: UnitPlan, root: nn.Module) -> UnitPlan:
    """Gather a unit of the rest for its modules too: a script may call the model without wrappers.

    Or it takes its loss from a layer, as a distillation does, and backward meets no output of root.
    """
    owners = (root.get_submodule(name.rpartition(".")[0]) for name, _ in plan.params)
    return replace(plan, modules=(*dict.fromkeys((*plan.modules, *owners)),))


def seat_captured(root: nn.Module, plans: Sequence[UnitPlan]) -> list[UnitPlan]:
    """Give a seat to plans that a captured layer reads, and gather them around its call."""
    layer_of: dict[nn.Parameter, nn.Module] = {}
    for layer in root.modules():
        if is_layer(layer):
            for part in _captured_parts(layer):
                layer_of |= dict.fromkeys(part.parameters(), layer)
    seated: list[UnitPlan] = []
    for plan in plans:
        layers = {layer_of[param]: None for _, param in plan.params if param in layer_of}
        seated.append(replace(plan, modules=(*layers,), is_seated=True) if layers else plan)
    return seated


def _captured_parts(layer: Any) -> list[nn.Module]:
    from megatron.core.transformer.cuda_graphs import _layer_is_graphable

    impl = layer.config.cuda_graph_impl
    if impl == "transformer_engine" and _layer_is_graphable(layer, layer.config):
        return layer._get_submodules_under_cudagraphs()
    if impl == "local" and hasattr(layer, "cudagraph_manager"):
        return [layer]
    return []


def units_by_groups(units: Iterable[HZPUnit]) -> dict[ShardGroups, list[HZPUnit]]:
    by_groups: dict[ShardGroups, list[HZPUnit]] = {}
    for unit in units:
        by_groups.setdefault(unit.groups, []).append(unit)
    return by_groups


def mark_softmax_offsets(root: nn.Module) -> None:
    """Mark learnable softmax offsets as tensor-parallel: unmarked, only the first rank's count."""
    for module in root.modules():
        offset: Any = getattr(module, "softmax_offset", None)
        if isinstance(offset, nn.Parameter):
            vars(offset).update(tensor_model_parallel=True, partition_dim=0)


def has_late_grads(unit: HZPUnit, tp: int, pp: int, has_qk_norms: bool) -> bool:
    """Return whether finalize_model_grads changes its gradients late, with `tp` and `pp` ranks."""
    marks = (_SUMMED_OVER_TP if tp > 1 else ()) + (_SUMMED_OVER_PP if pp > 1 else ())
    norms = _QK_NORMS if tp > 1 and has_qk_norms else ()
    return any(
        any(getattr(param, mark, False) for mark in marks) or any(norm in name for norm in norms)
        for name, param in zip(unit.param_names, unit.params, strict=True)
    )
