# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of Megatron that `--use-asynchzp` sets or translates. Loads no torch."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

from megatron_asynchzp.mcore.flags.megatron_settings import (
    can_fuse_grads,
    can_gather_in_codes,
    captures_layers,
    gathers_bf16_of_mxfp8,
    has_experts_alone,
    is_fp32,
)
from megatron_asynchzp.mcore.flags.refusals import LATE_GRADS
from megatron_asynchzp.mcore.flags.rules import Rule, Verdict
from megatron_asynchzp.mcore.flags.shard_sizes import WEIGHT_SHARDS, weight_shards

# A step that no run reaches. To Megatron no --eval-interval means "never", but it divides by it.
_NEVER = 10**9

OWN_SETTINGS: dict[str, object] = {
    "asynchzp_moment_dtypes": ("fp32", "fp32"),  # of Adam
    "asynchzp_main_grads_dtype": "fp32",
    "asynchzp_offload": 0.0,  # part of the optimizer states on the host between two updates
    "asynchzp_sends_codes": False,  # weights of FP8 and FP4 layers are gathered as codes
    "asynchzp_registers_windows": None,  # with NCCL; False: registers plainly, None: not at all
}
"""What translated settings become, and the values without them."""


def _rule(
    verdict: Verdict,
    setting: str,
    reason: str,
    when: Callable[[Any], Any] = lambda s: True,
    value: object = False,
    **more: Any,
) -> Rule:
    flag = more.pop("flag", f"--{setting.replace('_', '-')}")
    return Rule(setting, when, verdict, reason, flag=flag, value=value, **more)


_set, _translate = partial(_rule, Verdict.SET), partial(_rule, Verdict.TRANSLATE)
_needs = partial(_set, may_change_again=True)
# Without these a run has the same values, and is slower or larger.
_lose = partial(_set, is_lost=True)


# ---- in which dtypes the optimizer's states are, and where


def _moments_are(settings: Any) -> str:
    words = settings.exp_avg_dtype, settings.exp_avg_sq_dtype
    return "the sharded Adam stores its moments in {} and {}, and computes in fp32".format(*words)


def _offloaded(settings: Any) -> str:
    return (
        f"{settings.optimizer_offload_fraction:.0%} of the optimizer states, in whole units, are "
        "in pinned memory of the host between two updates, and are updated on the device"
    )


_MOMENTS = (
    "the sharded Adam stores its moments in the dtypes that are asked for, and computes in fp32"
)
_STATES = (
    _translate(
        "main_grads_dtype",
        "the engine keeps main gradients in bf16 by itself, sums what travels, in bf16, in fp32, "
        "and Adam reads bf16",
        lambda s: not is_fp32(s.main_grads_dtype),
        "fp32",
        becomes=lambda s: {"asynchzp_main_grads_dtype": s.main_grads_dtype},
    ),
    _translate(
        "use_precision_aware_optimizer",
        _MOMENTS,
        told=_moments_are,
        becomes=lambda s: {"asynchzp_moment_dtypes": (s.exp_avg_dtype, s.exp_avg_sq_dtype)},
    ),
    *(
        _translate(
            name, _MOMENTS, lambda s: s.use_precision_aware_optimizer, "fp32", is_silent=True
        )
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype")
    ),
    _translate(
        "optimizer_cpu_offload",
        "a part of the optimizer states, in whole units, is in pinned memory of the host between "
        "two updates, and is updated on the device",
        told=_offloaded,
        becomes=lambda s: {"asynchzp_offload": s.optimizer_offload_fraction},
    ),
    _set(
        "use_torch_optimizer_for_cpu_offload",
        "updates are on the device, by the optimizer of a run without offloading",
        lambda s: s.optimizer_cpu_offload,
    ),
    _set(
        "overlap_cpu_optimizer_d2h_h2d",
        "copies always run beside the updates of other units",
        lambda s: s.optimizer_cpu_offload,
    ),
    *(
        _set(
            "asynchzp_early_update",
            f"with {example} {reason}",
            lambda s, asks=asks: s.asynchzp_early_update != "on" and asks(s),
            "off",
            flag=example.split()[0],
            is_silent=True,
        )
        for example, asks, reason in LATE_GRADS
    ),
)

# ---- what other wrappers do


_UNITS = "the engine has units, not buckets"
_BUFFERS = (
    "values and bytes on the link are the same; the buffers of Megatron's wrapper are not used, so "
    "collectives take the GPU's cores and memory that registered ones would spare"
)
_REGISTERED = (
    "gathered parameters and gradients that are reduced lie in memory that is registered with NCCL "
    "once, before the first step, for groups within a node"
)
_WRAPPERS = (
    _set(
        "use_distributed_optimizer", "the optimizer state is sharded by --asynchzp-optim-shard-size"
    ),
    _set("overlap_grad_reduce", "gradients are reduced by the engine after each micro-batch"),
    _set("overlap_param_gather", "parameters are gathered by the engine, unit by unit"),
    _set(
        "overlap_param_gather_with_optimizer_step",
        "the engine does it by itself: updated parameters travel while the next forward runs",
    ),
    _translate(
        "num_distributed_optimizer_instances",
        "an instance is one optimizer shard group (--asynchzp-optim-shard-size)",
        value=1,
    ),
    _translate(
        "use_megatron_fsdp",
        "its sharding strategy is given as shard sizes (--asynchzp-*-shard-size)",
    ),
    _translate("use_torch_fsdp2", "its sharding is given as shard sizes (--asynchzp-*-shard-size)"),
    *(
        _translate(
            name,
            "its shards are given as shard sizes (--asynchzp-*-shard-size)",
            lambda s, name=name: name in weight_shards(s),
            None,
            is_silent=True,  # the line about the sizes names it
        )
        for name in WEIGHT_SHARDS
    ),
    _set("gtp_remat_opt_in_modules", "all parameters of a unit are sharded", value=[]),
    _translate(
        "nccl_ub",
        _REGISTERED,
        flag="--use-nccl-ub",
        becomes=lambda s: {"asynchzp_registers_windows": not s.disable_symmetric_registration},
    ),
    _set("fsdp_manual_registration", _REGISTERED),
    _lose("gtp_remat_nccl_ub", _BUFFERS),
    _lose("gtp_expert_remat_nccl_ub", _BUFFERS),
    _set(
        "ckpt_format",
        "only that format can hold sharded states of any sizes; one in another format is not "
        "loaded",
        value="torch_dist",
    ),
    _set(
        "gradient_accumulation_fusion",
        "layers add gradients up themselves only with Transformer Engine 2.15 and apex's "
        "fused_weight_gradient_mlp_cuda; without them the engine does, in fp32",
        lambda s: not can_fuse_grads(),
        flag="--no-gradient-accumulation-fusion",
    ),
    _set(
        "gradient_accumulation_fusion",
        "the engine adds up, in fp32, what captured graphs, parts of layers and fused operations "
        "leave of gradients",
        lambda s: captures_layers(s) or overlaps_experts(s) or s.use_transformer_engine_op_fuser,
        flag="--no-gradient-accumulation-fusion",
    ),
    _lose(
        "defer_embedding_wgrad_compute",
        "the gradient of the output layer is reduced in each micro-batch, like the others",
    ),
    _lose(
        "overlap_dispatch_backward_with_experts_wgrad",
        "the gradients of the experts are reduced where their backward ends",
    ),
    _lose(
        "use_transformer_engine_op_fuser",
        "fused operations keep a quantised copy of each weight from forward to backward, which is "
        "counted for experts and one micro-batch alone; a layer runs more kernels",
        lambda s: (s.fp8 or s.fp4) and not has_experts_alone(s),
    ),
)

# ---- gathers in FP8

_BF16 = (
    "the values are the same; parameters are held and gathered in bf16, 2 bytes each instead of 1"
)
_AS_MXFP8 = (
    "as in stock Megatron 2 bytes a parameter travel, in bf16, to be quantised where they arrive; "
    "layers do it in each call, and no quantised copy stays"
)
_CODES = (
    "weights of FP8 and FP4 layers are gathered as codes, 1 or 1/2 byte each, with the same bits; "
    "shards and their exchange once per step stay in bf16"
)
_in_codes = partial(_translate, reason=_CODES, becomes=lambda s: {"asynchzp_sends_codes": True})
_FP8_GATHERS = (
    _in_codes("fp8_param_gather", when=can_gather_in_codes),
    _set("fp8_param_gather", _AS_MXFP8, gathers_bf16_of_mxfp8),
    _lose("fp8_param_gather", _BF16),
    _in_codes("fp4_param_gather", when=can_gather_in_codes),
    _lose(
        "fp4_param_gather",
        "parameters are held and gathered in bf16, and layers quantise what arrives",
    ),
    _in_codes(
        "reuse_grad_buf_for_mxfp8_param_ag",
        when=lambda s: s.fp8_param_gather and can_gather_in_codes(s),
    ),
    _set("reuse_grad_buf_for_mxfp8_param_ag", _AS_MXFP8, gathers_bf16_of_mxfp8),
    _lose("reuse_grad_buf_for_mxfp8_param_ag", _BF16),
    _lose(
        "keep_fp8_transpose_cache",
        "the values are the same; a layer transposes its weight anew, and no copy outlives it",
    ),
)

# ---- Megatron's own buffers, and how its model is built

_BUCKETS = (
    _set("ddp_num_buckets", _UNITS, value=None),
    _set("ddp_bucket_size", _UNITS, value=None),
    _set("ddp_pad_buckets_for_high_nccl_busbw", _UNITS),
    _set("ddp_average_in_collective", "the engine sums gradients and scales the sum"),
    *(
        _set(f"{axis}_reduce_scatter_with_fp32_accumulation", "gradients are always summed in fp32")
        for axis in ("ddp", "gtp_remat")
    ),
    _set(
        "ddp_param_name_patterns_for_fp32_local_accumulation",
        "gradients are always accumulated in fp32",
        value=[],
    ),
    _set("create_all_gather_group", "the engine has process groups of its own for gathering"),
    _set(
        "init_model_with_meta_device",
        "each layer is sharded as soon as it is built, with its initial values",
    ),
)

# ---- layers in parts

_PLANS = "megatron.core.models.common.fine_grained_callables"
BESIDE_OVERLAP: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("--cuda-graph-impl local", lambda s: s.cuda_graph_impl == "local"),
    (
        "--delay-wgrad-compute of layers with biases, which keeps gathered ones",
        lambda s: s.delay_wgrad_compute and (s.add_bias_linear or s.add_qkv_bias),
    ),
    ("captured layers and --mtp-num-layers", lambda s: captures_layers(s) and s.mtp_num_layers),
    ("--fp16", lambda s: s.fp16),
    ("--context-parallel-size", lambda s: s.context_parallel_size > 1),
    ("--hybrid-context-parallel", lambda s: s.hybrid_context_parallel),
    ("--moe-token-dispatcher-type flex", lambda s: s.moe_token_dispatcher_type == "flex"),
    ("--moe-latent-size", lambda s: s.moe_latent_size),
    ("--hybrid-layer-pattern", lambda s: s.hybrid_layer_pattern),
    ("--recompute-granularity full", lambda s: s.recompute_granularity == "full"),
    ("--optimizer muon", lambda s: "muon" in (s.optimizer or "")),
    ("megatron-core before 0.19", lambda s: not find_spec(_PLANS)),
)
"""Settings with which a layer is computed as a whole: untested with layers in parts."""


def _beside_overlap(settings: Any) -> str | None:
    return next((name for name, is_asked in BESIDE_OVERLAP if is_asked(settings)), None)


def overlaps_experts(settings: Any) -> bool:
    """Whether layers are run in parts."""
    return bool(settings.overlap_moe_expert_parallel_comm) and _beside_overlap(settings) is None


_UNTESTED = "it has not been tested beside {}"
_OVERLAP = tuple(
    _lose(
        name,
        _UNTESTED.format(", ".join(name for name, _ in BESIDE_OVERLAP)),
        lambda s: s.overlap_moe_expert_parallel_comm and not overlaps_experts(s),
        told=lambda s: _UNTESTED.format(_beside_overlap(s)),
    )
    for name in ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute")
)

# ---- what a run needs


def _lone_copies(settings: Any) -> str:
    group = settings.replication_jump * settings.replication_factor
    return (
        f"{settings.world_size} ranks are no groups of {group}, so local checkpoints are kept once"
    )


_NEEDED = (
    _needs(
        "optimizer",
        "its state is sharded by --asynchzp-optim-shard-size",
        lambda s: s.optimizer == "dist_muon",
        "muon",
        flag="--optimizer dist_muon",
    ),
    _needs(
        "accumulate_allreduce_grads_in_fp32", "gradients are summed in fp32", lambda s: s.fp16, True
    ),
    _needs(
        "accumulate_allreduce_grads_in_fp32",
        "gradients are summed in fp32",
        lambda s: s.bf16,
        True,
        is_silent=True,  # Megatron does the same for bf16 by itself
    ),
    _needs(
        "exit_signal_handler",
        "SIGTERM lets the step end, saves and ends the run with status 0",
        lambda s: s.save,
        True,
    ),
    _needs(
        "replication",
        "ranks that are no groups of --replication-jump x --replication-factor keep local "
        "checkpoints once",
        lambda s: s.replication_jump and s.world_size % (s.replication_jump * s.replication_factor),
        told=_lone_copies,
        flag="--replication-jump x --replication-factor",
    ),
    _needs(
        "eval_interval",
        "without --eval-interval nothing is evaluated before the last step, and Megatron needs a "
        "number",
        lambda s: not s.eval_interval,
        _NEVER,
    ),
)

CHANGES: tuple[Rule, ...] = (
    *_STATES, *_WRAPPERS, *_FP8_GATHERS, *_BUCKETS, *_OVERLAP, *_NEEDED,
)  # fmt: skip
