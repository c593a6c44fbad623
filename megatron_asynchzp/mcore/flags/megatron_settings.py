# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A read-only view of Megatron's settings, and questions that several rules ask. Loads no torch."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from typing import Any

# Fields of Megatron's dataclasses that have another name than the argument.
_FIELDS = {
    "num_experts": "num_moe_experts",
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "hybrid_layer_pattern": "is_hybrid_model",
    "te_precision_config_file": "quant_recipe",
    "ddp_bucket_size": "bucket_size",
    "ddp_num_buckets": "num_buckets",
    "ddp_average_in_collective": "average_in_collective",
    "ddp_pad_buckets_for_high_nccl_busbw": "pad_buckets_for_high_nccl_busbw",
    "ddp_reduce_scatter_with_fp32_accumulation": "reduce_scatter_with_fp32_accumulation",
    "ddp_param_name_patterns_for_fp32_local_accumulation": (
        "param_name_patterns_for_fp32_local_accumulation"
    ),
}


class MegatronSettings:
    """Settings by Megatron's argument names, of the first source that has them, else None."""

    def __init__(self, *sources: Any):
        self._sources = sources

    def has(self, name: str) -> bool:
        """Whether a source has the setting; a version of megatron-core may lack it."""
        return any(hasattr(source, known) for source, known in self.places(name))

    def __getattr__(self, name: str) -> Any:
        found = (getattr(*place) for place in self.places(name) if hasattr(*place))
        return next(found, None)

    def places(self, name: str) -> Iterator[tuple[Any, str]]:
        """Yield each source with each name under which it may have the setting."""
        return product(self._sources, dict.fromkeys((name, _FIELDS.get(name, name))))


def is_fp32(dtype: object) -> bool:
    """Whether a dtype is fp32: a word before Megatron's validation, a torch.dtype after it."""
    return str(dtype) in ("fp32", "torch.float32", "None")


def has_own_graphs(settings: Any) -> bool:
    """Whether Megatron captures layers by itself."""
    return settings.cuda_graph_impl == "local"


def offloads(settings: Any) -> bool:
    """Whether optimizer states are on the host, before and after the flag is translated."""
    return bool(settings.optimizer_cpu_offload or getattr(settings, "asynchzp_offload", 0))


def captures_layers(settings: Any) -> bool:
    is_old_name = getattr(settings, "external_cuda_graph", False)
    return bool(is_old_name) or settings.cuda_graph_impl in ("transformer_engine", "local")


def captures_iteration(settings: Any) -> bool:
    """Whether all micro-batches of a step are captured together."""
    return settings.cuda_graph_impl == "full_iteration"


def captures(settings: Any, *parts: str) -> bool:
    """Whether one of `parts` of a layer is captured: all are where no part is named."""
    named = named_parts(settings)
    return not named or any(part in named for part in (*parts, "full"))


def named_parts(settings: Any) -> list[str]:
    # By versions of megatron-core, and before and after Megatron's own validation.
    names = ("cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated")
    named = next(filter(None, (getattr(settings, name, None) for name in names)), ())
    return [getattr(part, "name", part) for part in named]


def pads_experts(settings: Any) -> bool:
    """Whether each expert gets as many tokens in every step, so that the host need not ask."""
    has_capacity = settings.moe_pad_expert_input_to_capacity and settings.moe_expert_capacity_factor
    return bool(has_capacity) and settings.moe_token_dispatcher_type == "alltoall"


def balances_experts(settings: Any) -> bool:
    """Whether the router learns from the tokens of each expert: by a loss, a bias or a quantile."""
    kinds, weight = settings.moe_router_load_balancing_type, settings.moe_aux_loss_coeff
    kinds = kinds if isinstance(kinds, list) else [kinds]
    has_weight = any(weight) if isinstance(weight, list) else weight
    by_loss = has_weight and any("aux_loss" in kind for kind in kinds)
    has_bias = settings.moe_router_enable_expert_bias or "quantile_balancing" in kinds
    return bool(by_loss or settings.moe_z_loss_coeff or has_bias)


def exchanges_equal_counts(settings: Any) -> bool:
    """Whether ranks that share experts must have equally many tokens."""
    tensor = settings.tensor_model_parallel_size
    expert_tensor = settings.expert_tensor_parallel_size or tensor
    is_shared = settings.expert_model_parallel_size > 1 or expert_tensor > tensor
    is_exact = settings.moe_token_dispatcher_type == "alltoall"
    return is_shared and not (is_exact and not settings.moe_pad_expert_input_to_capacity)


def has_experts_alone(settings: Any) -> bool:
    """Whether each layer has experts, and one micro-batch at a time is before its backward."""
    frequency = settings.moe_layer_freq
    is_each = frequency == 1 if isinstance(frequency, int) else all(frequency)
    is_alone = settings.pipeline_model_parallel_size == 1
    return bool(settings.num_experts and is_each) and is_alone


def can_fuse_grads() -> bool:
    """Whether layers can add weight gradients to main_grad themselves."""
    # Megatron asks for apex's extension. Transformer Engine before 2.15 looks for main_grad at the
    # saved weight, which comes back from saved-tensor hooks without it.
    if not all(map(find_spec, ("transformer_engine", "fused_weight_gradient_mlp_cuda"))):
        return False
    from megatron.core.utils import is_te_min_version

    return is_te_min_version("2.15.0")


def can_gather_in_codes(settings: Any) -> bool:
    """Whether gathers in FP8 or FP4 leave every bit as it is.

    The scales of a weight follow from it alone, and backward computes with the same codes as
    forward, or quantises the weight again, which its gather brings.
    """
    is_fp8 = settings.fp8 and settings.fp8_recipe in ("tensorwise", "blockwise", "mxfp8")
    is_usual = os.getenv("NVTE_NVFP4_4OVER6", "none") == "none"
    is_fp4 = settings.fp4 and settings.fp4_recipe == "nvfp4" and is_usual
    is_exact = settings.bf16 and (is_fp8 or is_fp4) and not os.getenv("NVTE_BACKWARD_OVERRIDE")
    is_tested = not (settings.te_precision_config_file or settings.use_transformer_engine_op_fuser)
    return bool(is_exact and is_tested)


def gathers_bf16_of_mxfp8(settings: Any) -> bool:
    """Whether stock quantises gathered bf16 (_ParamAndGradBuffer._post_param_sync)."""
    is_asked = settings.fp8_param_gather and settings.reuse_grad_buf_for_mxfp8_param_ag
    has_buffers = not (settings.use_megatron_fsdp or settings.use_torch_fsdp2)
    return bool(is_asked and settings.fp8 and settings.fp8_recipe == "mxfp8" and has_buffers)
