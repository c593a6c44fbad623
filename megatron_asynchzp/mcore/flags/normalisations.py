# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The Megatron arguments to which `--use-asynchzp` gives one fixed value."""

import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import starmap
from typing import Any, NamedTuple

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.refusals import captures_layers


def can_fuse_grads() -> bool:
    """Whether layers can add weight gradients to main_grad themselves: Megatron asks for apex's
    extension. Transformer Engine before 2.15 looks for main_grad at the saved weight, which comes
    back from saved-tensor hooks without it."""
    if not all(map(find_spec, ("transformer_engine", "fused_weight_gradient_mlp_cuda"))):
        return False
    from megatron.core.utils import is_te_min_version

    return is_te_min_version("2.15.0")


def can_send_codes(args: Namespace) -> bool:
    """Whether gathers in FP8 leave every bit as it is: each weight, or each block of 128 x 128,
    has one scale, which follows from it, and backward computes with the same codes as forward."""
    is_exact = args.fp8 and args.bf16 and args.fp8_recipe in ("tensorwise", "blockwise")
    is_tested = not (args.te_precision_config_file or args.use_transformer_engine_op_fuser)
    return bool(is_exact and is_tested) and not os.getenv("NVTE_BACKWARD_OVERRIDE")


def gathers_bf16_of_mxfp8(args: Namespace) -> bool:
    """Whether stock Megatron gathers parameters in bf16, into its gradient buffer, and quantises
    what has arrived (_ParamAndGradBuffer._post_param_sync)."""
    is_asked = args.fp8_param_gather and args.reuse_grad_buf_for_mxfp8_param_ag
    has_buffers = not (args.use_megatron_fsdp or args.use_torch_fsdp2)
    return bool(is_asked and args.fp8 and args.fp8_recipe == "mxfp8" and has_buffers)


def _has_experts_alone(args: Namespace) -> bool:
    """Whether no layer has a dense MLP, and one micro-batch at a time is between forward and
    backward."""
    frequency = args.moe_layer_freq
    is_each = frequency == 1 if isinstance(frequency, int) else all(frequency)
    return bool(args.num_experts and is_each) and args.pipeline_model_parallel_size == 1


# A step that no run reaches. To Megatron no --eval-interval means "never", but it divides by it.
_NEVER = 10**9


class Normalisation(NamedTuple):
    """A Megatron argument that gets one fixed value, because asynchzp does its job.

    is_spared: whether the arguments, as the user gave them, keep it, in this installation. Of
        rows for one argument the first that does not spare it decides.
    is_lost: whether a run goes without what the flag gives it, instead of having it otherwise.
    told: what the log says in place of the reason.
    """

    flag: str
    name: str
    value: object
    reason: str
    is_spared: Callable[[Namespace], bool] = lambda args: False
    is_lost: bool = False
    told: Callable[[Namespace], str] | None = None

    def line(self, args: Namespace) -> str:
        """Return the line of the log about it."""
        why = self.reason if self.told is None else self.told(args)
        return f"{self.name} = {self.value}: {why} ({self.flag})"

    def is_in(self, log: Sequence[str]) -> bool:
        """Whether one of the lines is its own."""
        told = (line for line in log if line.startswith(f"{self.name} = {self.value}: "))
        return any(self.told is not None or self.reason in line for line in told)


# The ends of a row: without it a run has the same values, and is slower or larger.
_LOST = (lambda args: False, True)

_UNITS = "the engine has units, not buckets"
_BUFFERS = (
    "values and bytes on the link are the same; the buffers of Megatron's wrapper are not used, so "
    "collectives take the GPU's cores and memory that registered ones would spare"
)

_BF16 = (
    "the values are the same; parameters are held and gathered in bf16, 2 bytes each instead of 1"
)

_AS_MXFP8 = (
    "as in stock Megatron 2 bytes a parameter travel, in bf16, to be quantised where they arrive; "
    "layers do it in each call, and no quantised copy stays"
)

_CODES = (
    "weights of FP8 layers are gathered as codes, 1 byte each, with the same bits; shards and "
    "their exchange once per step stay in bf16"
)

_BF16_OF_FP4 = "parameters are held and gathered in bf16, and layers quantise what arrives"

# fmt: off
_ROWS: tuple[tuple[Any, ...], ...] = (
    ("--use-distributed-optimizer", "use_distributed_optimizer", False,
     "the optimizer state is sharded by --asynchzp-optim-shard-size"),
    ("--overlap-grad-reduce", "overlap_grad_reduce", False,
     "gradients are reduced by the engine after each micro-batch"),
    ("--overlap-param-gather", "overlap_param_gather", False,
     "parameters are gathered by the engine, unit by unit"),
    ("--overlap-param-gather-with-optimizer-step", "overlap_param_gather_with_optimizer_step",
     False, "the engine does it by itself: updated parameters travel while the next forward runs"),
    ("--num-distributed-optimizer-instances", "num_distributed_optimizer_instances", 1,
     "an instance is one optimizer shard group (--asynchzp-optim-shard-size)"),
    ("--use-megatron-fsdp", "use_megatron_fsdp", False,
     "its sharding strategy is given as shard sizes (--asynchzp-*-shard-size)"),
    ("--use-torch-fsdp2", "use_torch_fsdp2", False,
     "its sharding is given as shard sizes (--asynchzp-*-shard-size)"),
    ("--use-nccl-ub", "nccl_ub", False, _BUFFERS, *_LOST),
    ("--fsdp-manual-registration", "fsdp_manual_registration", False,
     _BUFFERS, *_LOST),
    ("--ckpt-format", "ckpt_format", "torch_dist",
     "only that format can hold sharded states of any sizes; one in another format is not loaded"),
    ("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", False,
     "layers add gradients up themselves only with Transformer Engine 2.15 and apex's "
     "fused_weight_gradient_mlp_cuda; without them the engine does, in fp32",
     lambda args: can_fuse_grads()),
    ("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", False,
     "the engine adds up, in fp32, what captured graphs, parts of layers and fused operations "
     "leave of gradients",
     lambda args: not (captures_layers(args) or overlaps_experts(args)
                       or args.use_transformer_engine_op_fuser)),
    ("--defer-embedding-wgrad-compute", "defer_embedding_wgrad_compute", False,
     "the gradient of the output layer is reduced in each micro-batch, like the others", *_LOST),
    ("--overlap-dispatch-backward-with-experts-wgrad",
     "overlap_dispatch_backward_with_experts_wgrad", False,
     "the gradients of the experts are reduced where their backward ends", *_LOST),
    ("--use-transformer-engine-op-fuser", "use_transformer_engine_op_fuser", False,
     "fused operations keep a quantised copy of each weight from forward to backward, which is "
     "counted for experts and one micro-batch alone; a layer runs more kernels",
     lambda args: not (args.fp8 or args.fp4) or _has_experts_alone(args), True),
    ("--fp8-param-gather", "fp8_param_gather", False, _CODES,
     lambda args: not can_send_codes(args)),
    ("--fp8-param-gather", "fp8_param_gather", False, _AS_MXFP8,
     lambda args: not gathers_bf16_of_mxfp8(args)),
    ("--fp8-param-gather", "fp8_param_gather", False, _BF16, *_LOST),
    ("--fp4-param-gather", "fp4_param_gather", False, _BF16_OF_FP4, *_LOST),
    ("--reuse-grad-buf-for-mxfp8-param-ag", "reuse_grad_buf_for_mxfp8_param_ag", False, _CODES,
     lambda args: not (args.fp8_param_gather and can_send_codes(args))),
    ("--reuse-grad-buf-for-mxfp8-param-ag", "reuse_grad_buf_for_mxfp8_param_ag", False, _AS_MXFP8,
     lambda args: not gathers_bf16_of_mxfp8(args)),
    ("--reuse-grad-buf-for-mxfp8-param-ag", "reuse_grad_buf_for_mxfp8_param_ag", False, _BF16,
     *_LOST),
    ("--keep-fp8-transpose-cache", "keep_fp8_transpose_cache", False,
     "the values are the same; a layer transposes its weight anew, and no copy outlives it",
     *_LOST),
    ("--ddp-num-buckets", "ddp_num_buckets", None, _UNITS),
    ("--ddp-bucket-size", "ddp_bucket_size", None, _UNITS),
    ("--ddp-pad-buckets-for-high-nccl-busbw", "ddp_pad_buckets_for_high_nccl_busbw", False, _UNITS),
    ("--ddp-average-in-collective", "ddp_average_in_collective", False,
     "the engine sums gradients and scales the sum"),
    ("--ddp-reduce-scatter-with-fp32-accumulation", "ddp_reduce_scatter_with_fp32_accumulation",
     False, "gradients are always summed in fp32"),
    ("--ddp-param-name-patterns-for-fp32-local-accumulation",
     "ddp_param_name_patterns_for_fp32_local_accumulation", [],
     "gradients are always accumulated in fp32"),
    ("--create-all-gather-group", "create_all_gather_group", False,
     "the engine has process groups of its own for gathering"),
    ("--init-model-with-meta-device", "init_model_with_meta_device", False,
     "each layer is sharded as soon as it is built, with its initial values"),
)
# fmt: on
NORMALISATIONS = tuple(starmap(Normalisation, _ROWS))


_PLANS = "megatron.core.models.common.fine_grained_callables"
BESIDE_OVERLAP: tuple[tuple[str, Callable[[Namespace], Any]], ...] = (
    ("--cuda-graph-impl local", lambda args: args.cuda_graph_impl == "local"),
    (
        "--delay-wgrad-compute of layers with biases, which keeps gathered ones",
        lambda args: args.delay_wgrad_compute and (args.add_bias_linear or args.add_qkv_bias),
    ),
    (
        "captured layers and --mtp-num-layers",
        lambda args: captures_layers(args) and args.mtp_num_layers,
    ),
    ("--fp16", lambda args: args.fp16),
    ("--context-parallel-size", lambda args: args.context_parallel_size > 1),
    ("--moe-token-dispatcher-type flex", lambda args: args.moe_token_dispatcher_type == "flex"),
    ("--moe-latent-size", lambda args: getattr(args, "moe_latent_size", None)),
    ("--hybrid-layer-pattern", lambda args: getattr(args, "hybrid_layer_pattern", None)),
    ("--recompute-granularity full", lambda args: args.recompute_granularity == "full"),
    ("--optimizer muon", lambda args: "muon" in args.optimizer),
    ("megatron-core before 0.19", lambda args: not find_spec(_PLANS)),
)
"""Flags with which the overlapped schedule has not been tested on sharded parameters."""


def _beside_overlap(args: Namespace) -> str | None:
    return next((what for what, is_asked in BESIDE_OVERLAP if is_asked(args)), None)


def overlaps_experts(args: Namespace) -> bool:
    """Whether layers are run in parts."""
    return args.overlap_moe_expert_parallel_comm and _beside_overlap(args) is None


_UNTESTED = "it has not been tested beside {}"
_OVERLAP_ROW = (
    False,
    _UNTESTED.format(", ".join(what for what, _ in BESIDE_OVERLAP)),
    lambda args: not args.overlap_moe_expert_parallel_comm or overlaps_experts(args),
    True,
    lambda args: _UNTESTED.format(_beside_overlap(args)),
)
OVERLAP = (
    Normalisation(
        "--overlap-moe-expert-parallel-comm", "overlap_moe_expert_parallel_comm", *_OVERLAP_ROW
    ),
    Normalisation("--delay-wgrad-compute", "delay_wgrad_compute", *_OVERLAP_ROW),
)
"""Get their values beside what BESIDE_OVERLAP has: a layer is computed as one there."""


def early_update_of(args: Namespace) -> str:
    """--asynchzp-early-update, or off where Megatron changes all gradients after backward. Raises
    ConfigurationError for on there."""
    asked, reason = args.asynchzp_early_update, None
    if args.calculate_per_token_loss:
        reason = "--calculate-per-token-loss scales the gradients when backward is over"
    elif args.sequence_parallel and args.tensor_model_parallel_size > 1:
        reason = (
            "with --sequence-parallel the gradients of every layer's norms are summed over the "
            "tensor-parallel ranks when backward is over"
        )
    elif args.qk_layernorm and args.tensor_model_parallel_size > 1:
        reason = (
            "with --qk-layernorm the gradients of these norms are summed over the tensor-parallel "
            "ranks when backward is over"
        )
    elif "muon" in args.optimizer:
        reason = f"--optimizer {args.optimizer} needs whole matrices"
    if reason is not None and asked == "on":
        raise ConfigurationError(f"--asynchzp-early-update on: {reason}; leave the flag out")
    return asked if reason is None else "off"


def normalize_args(args: Namespace) -> list[str]:
    """Give each argument of NORMALISATIONS and OVERLAP its value; return one line for each that
    changed."""
    broken: dict[str, Normalisation] = {}
    for rule in (*NORMALISATIONS, *OVERLAP):  # all by the arguments as they were given
        if _breaks(args, rule):
            broken.setdefault(rule.name, rule)
    lines = [rule.line(args) for rule in broken.values()]
    args.asynchzp_sends_codes = getattr(args, "asynchzp_sends_codes", False) or any(
        rule.reason is _CODES for rule in broken.values()
    )
    vars(args).update({rule.name: rule.value for rule in broken.values()})
    if args.optimizer == "dist_muon":
        args.optimizer = "muon"
        lines.append(
            "optimizer = muon: its state is sharded by --asynchzp-optim-shard-size "
            "(--optimizer dist_muon)"
        )
    if (args.fp16 or args.bf16) and not args.accumulate_allreduce_grads_in_fp32:
        args.accumulate_allreduce_grads_in_fp32 = True
        if args.fp16:  # Megatron does the same for bf16 by itself
            lines.append("accumulate_allreduce_grads_in_fp32 = True: gradients are summed in fp32")
    if args.save and not args.exit_signal_handler:
        args.exit_signal_handler = True
        lines.append(
            "exit_signal_handler = True: SIGTERM lets the step end, saves and ends the run with "
            "status 0 (--exit-signal-handler)"
        )
    if args.replication and args.replication_jump:
        group = args.replication_jump * args.replication_factor
        if args.world_size % group:
            args.replication = False
            lines.append(
                f"replication = False: {args.world_size} ranks are no groups of {group}, so local "
                "checkpoints are kept once (--replication-jump x --replication-factor)"
            )
    if not args.eval_interval:
        args.eval_interval = _NEVER
        lines.append(
            f"eval_interval = {_NEVER}: without --eval-interval nothing is evaluated before the "
            "last step, and Megatron needs a number"
        )
    return lines


def _breaks(args: Namespace, rule: Normalisation) -> bool:
    return getattr(args, rule.name) != rule.value and not rule.is_spared(args)


def refuse_changes(args: Namespace) -> None:
    """Raise ConfigurationError for what Megatron's validation switched on again."""
    for rule in NORMALISATIONS:
        if _breaks(args, rule):
            raise ConfigurationError(
                f"Megatron set {rule.name} to {getattr(args, rule.name)}, which --use-asynchzp "
                f"needs to be {rule.value}: {rule.reason}"
            )
