# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of a model chunk under --overlap-moe-expert-parallel-comm.

Megatron runs the backward of a micro-batch together with the forward of the next. Owns the
parameters that each part needs, and weight gradients that come late.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from torch import nn

from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.calls import ManualRegion
from megatron_asynchzp.engine.zero.unit import HZPUnit


def tell_of_parts(module: nn.Module, runtime: HZPRuntime) -> None:
    """Let each schedule plan of the models in `module` tell `runtime` when its parts run."""
    for model in module.modules():
        if hasattr(model, "build_schedule_plan"):
            _wrap_plans(model, runtime)


def _wrap_plans(model: Any, runtime: HZPRuntime) -> None:
    build = model.build_schedule_plan
    unit_of = {param: unit for unit in runtime.units for param in unit.params}

    def units_of(params: _Params) -> list[HZPUnit]:
        return list(dict.fromkeys(unit_of[param] for param in params))

    @wraps(build)
    def build_schedule_plan(*args: Any, **kwargs: Any) -> Any:
        plan = build(*args, **kwargs)
        seen: dict[Any, None] = {}
        # In the order of forward, so in backward the first part with a unit is its last user.
        for node, params, late, again in _needs(plan, model):
            late_too = units_of([*params, *late])
            completes = [unit for unit in late_too if unit not in seen]
            _join(node, runtime.manual_region(units_of(params), completes, units_of(again)))
            seen |= dict.fromkeys(late_too)
        return plan

    model.build_schedule_plan = build_schedule_plan


_Params = list[nn.Parameter]


def _needs(plan: Any, model: Any) -> Iterator[tuple[Any, _Params, _Params, _Params]]:
    """Yield each node that computes with parameters, and three lists of parameters."""
    # First, the parameters that it computes with. Second, those with which another stream computes
    # later in its layer; autograd waits for their gradients, which are complete on the compute
    # stream. Third, those with which its backward recomputes the output of an earlier node.
    embedding = _params(getattr(model, "embedding", None))
    final_norm = _params(model.decoder.final_layernorm)
    if model.pre_process:
        yield plan.pre_process, embedding, [], []
    for index in range(plan.num_layers()):
        nodes = plan.get_layer(index)
        outer, combine = nodes.layer, nodes.moe_combine
        inner = getattr(outer, "mtp_model_layer", outer)  # of multi-token prediction
        is_predicting, has_experts = inner is not outer, inner.is_moe_layer
        experts = _params(inner.mlp.experts) if has_experts else []
        others = [param for param in outer.parameters() if param not in set(experts)]
        is_last = has_experts and combine.is_last_layer and not is_predicting
        combined = final_norm if is_last else []
        first = [*others, *embedding] if is_predicting else others
        yield nodes.pre_dispatch_computation, first, combined, []
        norm = _params(inner.pre_mlp_layernorm) if inner.recompute_pre_mlp_layernorm else []
        yield nodes.mlp, experts or others, [], norm
        if combined:
            yield combine, combined, [], []
        if is_predicting:
            yield nodes.mtp_post_process, others, [], []
    if model.post_process:
        tied = model.shared_embedding_or_output_weight()
        norm = [] if len(model.decoder.layers) else final_norm
        output = [*_params(model.output_layer), *norm]
        yield plan.post_process, output if tied is None else [*output, tied], [], []


def _params(module: nn.Module | None) -> _Params:
    return [] if module is None else list(module.parameters())


def _join(node: Any, part: ManualRegion) -> None:
    is_late = getattr(node, "delay_wgrad_compute", False)
    late = node.bwd_dw_callables if is_late else []
    if late:
        node.bwd_dw_callables = [*late, _Completion(part)]
    forward, backward = node.forward_func, node.backward_func

    def run_forward(*inputs: Any) -> Any:
        with part.forward():
            return forward(*inputs)

    def run_backward(*grads: Any) -> Any:
        with part.backward():
            made = backward(*grads)
        if not late:
            part.complete()
        return made

    node.forward_func, node.backward_func = run_forward, run_backward


class _Completion:
    def __init__(self, part: ManualRegion):
        self.backward_dw = part.complete

    def parameters(self) -> tuple[nn.Parameter, ...]:
        return ()


@contextmanager
def keeping_late_grads(modules: Iterable[Any], kept: set[nn.Parameter]) -> Iterator[None]:
    """Copy late gradients, which a replay gives to no parameter, to main_grad; note which."""
    late = [module for module in modules if getattr(module, "need_backward_dw", bool)()]
    for module in late:
        module.backward_dw = partial(_compute_and_keep, module, module.backward_dw, kept)
    try:
        yield
    finally:
        for module in late:
            del module.backward_dw


def _compute_and_keep(module: Any, compute: Callable[[], None], kept: set[nn.Parameter]) -> None:
    compute()
    for param in module.parameters(recurse=False):
        if param.grad is not None:
            param.main_grad.copy_(param.grad)
            param.grad = None
            kept.add(param)
