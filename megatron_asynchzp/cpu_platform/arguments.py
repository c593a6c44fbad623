# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The command line of a Megatron run on the CPU.

A flag without a CPU form is switched off and logged; one that only a user sets is refused.
"""

import argparse
from typing import Any

# Attribute of Megatron's parsed arguments -> the only value that runs without a GPU. Most are
# Megatron's defaults for a GPU; the rest choose an implementation, never a number.
CPU_VALUES: dict[str, Any] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",  # Transformer Engine is CUDA only
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_grouped_gemm": False,  # SequentialMLP instead
    "no_persist_layer_norm": True,
    "use_fused_weighted_squared_relu": False,
    "use_flash_attn": False,
    "mla_down_proj_fusion": False,
    "tp_comm_overlap": False,
    "nccl_ub": False,
    "te_rng_tracker": False,
    "use_cpu_initialization": True,
    "num_workers": 0,  # worker processes would run without the platform
}

# Layers of Transformer Engine, and the same of local ones.
_HYBRID_SPEC = ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]
_LOCAL_HYBRID_SPEC = ["megatron_asynchzp.cpu_platform.local_hybrid", "local_hybrid_stack_spec"]

# Switched on only by hand, and without a CPU form: running on without them would not be the run
# that was asked for.
_IMPOSSIBLE = {
    "fp8": "FP8 needs Transformer Engine",
    "fp4": "FP4 needs Transformer Engine",
    "optimizer_cuda_graph": "CUDA graphs need a GPU",
    "use_torch_fsdp2": "Megatron hard-codes a CUDA device mesh for it",
}


def apply_cpu_defaults(args: argparse.Namespace) -> list[str]:
    """Set what a CPU needs before validation; return a line each. Raises ValueError."""
    asked = [name for name in _IMPOSSIBLE if getattr(args, name, None)]
    refused = [f"--{name.replace('_', '-')}: {_IMPOSSIBLE[name]}" for name in asked]
    if getattr(args, "cuda_graph_impl", "none") != "none":
        refused.append("--cuda-graph-impl: CUDA graphs need a GPU")
    brings_attention = getattr(args, "use_pasa_attention", False)
    if getattr(args, "context_parallel_size", 1) > 1 and not brings_attention:
        refused.append("--context-parallel-size: Megatron's local attention does not support it")
    if refused:
        raise ValueError("not possible on the CPU platform:\n  " + "\n  ".join(refused))
    changed = []
    for name, value in (CPU_VALUES | _values_for(args)).items():
        if hasattr(args, name) and getattr(args, name) != value:
            changed.append(f"{name}: {getattr(args, name)!r} -> {value!r}")
            setattr(args, name, value)
    return changed


def _values_for(args: argparse.Namespace) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if getattr(args, "moe_token_dispatcher_type", None) == "flex":  # DeepEP, HybridEP
        values["moe_token_dispatcher_type"] = "alltoall"
    if getattr(args, "spec", None) == _HYBRID_SPEC or (
        getattr(args, "hybrid_layer_pattern", None) and not getattr(args, "spec", None)
    ):
        values["spec"] = _LOCAL_HYBRID_SPEC
    return values
