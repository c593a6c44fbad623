# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the table of Megatron flags that `--use-asynchzp` refuses, and the one line each refusal
prints. Must not know how the engine works, nor change any argument.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass


class ConfigurationError(ValueError):
    """A run that cannot start as asked. The message is one line, for the user."""


class UnsupportedConfiguration(ConfigurationError):
    """A Megatron feature that does not work beside `--use-asynchzp`."""


@dataclass(frozen=True)
class Refusal:
    """One flag that is refused.

    example: a command line that is refused; its first word is the flag.
    is_asked: whether the arguments ask for it, before and after Megatron's own validation.
    reason, remedy: parts of the one line that the user reads.
    """

    example: str
    is_asked: Callable[[Namespace], bool]
    reason: str
    remedy: str

    @property
    def flag(self) -> str:
        return self.example.split()[0]

    def __str__(self) -> str:
        return f"{self.flag} is not supported with --use-asynchzp: {self.reason}; {self.remedy}"


def _is_given(name: str) -> Callable[[Namespace], bool]:
    """The argument holds anything but None, False, 0 and the empty list."""
    return lambda args: bool(getattr(args, name, None))


def _is_not(name: str, *allowed: object) -> Callable[[Namespace], bool]:
    return lambda args: getattr(args, name, allowed[0]) not in allowed


def _is_not_fp32(name: str) -> Callable[[Namespace], bool]:
    # A word before Megatron's validation, a torch.dtype after it.
    return lambda args: str(getattr(args, name)) not in ("fp32", "torch.float32")


def _has_more_shards(name: str, tensor_size: str) -> Callable[[Namespace], bool]:
    # Megatron's validation fills in the tensor parallel size itself: that is no extra shard.
    return lambda args: (
        getattr(args, name) is not None
        and getattr(args, name) > (getattr(args, tensor_size) or args.tensor_model_parallel_size)
    )


_DROP = "drop the flag"
_DROP_BOTH = "drop the flag, or train without --use-asynchzp"
_OTHER_WRAPPER = "it is another data-parallel wrapper"
_ONE_WRAPPER = "choose one of the two"
_GRAPH = "a captured CUDA graph cannot gather and drop parameters"
_FULL_TENSORS = "it reads whole parameters or gradients, of which a rank holds only a shard"
_LOW_PRECISION = "quantised weights have not been tested with sharded parameters"
_ADAM_ONLY = "the sharded optimizer is Adam or SGD on fp32 main parameters"
_LATE_WGRAD = "it computes weight gradients after their parameters were dropped"
_SAVED_TENSORS = "its hooks on saved tensors would copy gathered parameters"
_UNTESTED_BESIDE = "what it writes beside a checkpoint has not been tested"
_FP32_STATE = "main parameters, gradients and optimizer states are kept in fp32"
_EXTRA_AXIS = "it shards the weights by itself along one more axis"


def _rows(flags: dict[str, Callable[[Namespace], bool]], reason: str, remedy: str):
    return tuple(Refusal(example, asked, reason, remedy) for example, asked in flags.items())


REFUSALS: tuple[Refusal, ...] = (
    *_rows(
        {
            "--use-megatron-fsdp": _is_given("use_megatron_fsdp"),
            "--use-torch-fsdp2": _is_given("use_torch_fsdp2"),
        },
        _OTHER_WRAPPER,
        _ONE_WRAPPER,
    ),
    *_rows(
        {
            "--cuda-graph-impl full_iteration": _is_not("cuda_graph_impl", "none"),
            "--enable-cuda-graph": _is_given("enable_cuda_graph"),
            "--external-cuda-graph": _is_given("external_cuda_graph"),
            "--optimizer-cuda-graph": _is_given("optimizer_cuda_graph"),
        },
        _GRAPH,
        _DROP,
    ),
    *_rows(
        {
            "--fp8-param-gather": _is_given("fp8_param_gather"),
            "--fp4-param-gather": _is_given("fp4_param_gather"),
            "--fp8-format hybrid": _is_given("fp8"),
            "--fp4-format e2m1": _is_given("fp4"),
            "--te-precision-config-file precision.yaml": _is_given("te_precision_config_file"),
            "--reuse-grad-buf-for-mxfp8-param-ag": _is_given("reuse_grad_buf_for_mxfp8_param_ag"),
        },
        _LOW_PRECISION,
        "use --bf16",
    ),
    *_rows(
        {
            "--optimizer muon": _is_not("optimizer", "adam", "sgd"),
            "--optimizer-cpu-offload": _is_given("optimizer_cpu_offload"),
            "--use-precision-aware-optimizer": _is_given("use_precision_aware_optimizer"),
        },
        _ADAM_ONLY,
        "use --optimizer adam or sgd alone",
    ),
    *_rows(
        {
            "--main-params-dtype fp16": _is_not_fp32("main_params_dtype"),
            "--main-grads-dtype bf16": _is_not_fp32("main_grads_dtype"),
            "--exp-avg-dtype bf16": _is_not_fp32("exp_avg_dtype"),
            "--exp-avg-sq-dtype bf16": _is_not_fp32("exp_avg_sq_dtype"),
        },
        _FP32_STATE,
        _DROP,
    ),
    Refusal(
        "--grad-reduce-in-bf16",
        _is_given("grad_reduce_in_bf16"),
        "gradients are reduced in fp32",
        _DROP,
    ),
    Refusal(
        "--num-distributed-optimizer-instances 2",
        _is_not("num_distributed_optimizer_instances", 1),
        "replicas of the optimizer state follow from its shard size",
        "use --asynchzp-optim-shard-size instead",
    ),
    Refusal(
        "--overlap-param-gather-with-optimizer-step",
        _is_given("overlap_param_gather_with_optimizer_step"),
        "it belongs to the distributed optimizer, which is not used",
        _DROP,
    ),
    Refusal(
        "--ckpt-format torch --save checkpoints",
        lambda args: args.ckpt_format != "torch_dist" and bool(args.save or args.load),
        "only that format can hold sharded states of any sizes",
        "use --ckpt-format torch_dist",
    ),
    Refusal(
        "--non-persistent-ckpt-type local",
        lambda args: args.non_persistent_ckpt_type == "local",
        "it is tied to the number of ranks",
        "use --non-persistent-ckpt-type global",
    ),
    *_rows(
        {
            "--ckpt-convert-format torch_dist": _is_given("ckpt_convert_format"),
            "--load-main-params-from-ckpt": _is_given("load_main_params_from_ckpt"),
            "--moe-use-upcycling": _is_given("moe_use_upcycling"),
        },
        _FULL_TENSORS,
        _DROP_BOTH,
    ),
    *_rows(
        {
            "--save-activations-interval 10": _is_given("save_activations_interval"),
            "--save-dgrads-interval 10": _is_given("save_dgrads_interval"),
            "--save-tokens-per-expert-interval 10": _is_given("save_tokens_per_expert_interval"),
            "--logits-save-dir logits": _is_given("logits_save_dir"),
        },
        _UNTESTED_BESIDE,
        _DROP,
    ),
    *_rows(
        {
            "--save-params-interval 10": _is_given("save_params_interval"),
            "--save-wgrads-interval 10": _is_given("save_wgrads_interval"),
            "--log-params-norm": _is_given("log_params_norm"),
            "--check-weight-hash-across-dp-replicas-interval 10": _is_given(
                "check_weight_hash_across_dp_replicas_interval"
            ),
            "--check-for-large-grads": _is_given("check_for_large_grads"),
            "--qk-clip": _is_given("qk_clip"),
        },
        _FULL_TENSORS,
        _DROP,
    ),
    *_rows(
        {
            "--perform-rl-step": _is_given("perform_rl_step"),
            "--transformer-impl inference_optimized": (
                lambda args: args.transformer_impl == "inference_optimized"
            ),
        },
        "inference reads whole parameters, of which a rank holds only a shard",
        _DROP_BOTH,
    ),
    Refusal(
        "--use-transformer-engine-op-fuser",
        _is_given("use_transformer_engine_op_fuser"),
        "its fused operations hold references to parameters outside their modules",
        _DROP,
    ),
    *_rows(
        {
            "--moe-single-grouped-weight": _is_given("moe_single_grouped_weight"),
            "--moe-single-grouped-bias": _is_given("moe_single_grouped_bias"),
        },
        "grouped tensors cannot be views of a flat buffer",
        _DROP,
    ),
    Refusal(
        "--mtp-num-layers 1",
        _is_given("mtp_num_layers"),
        "multi-token prediction uses the embedding and output weights outside their modules, "
        "which has not been tested",
        _DROP_BOTH,
    ),
    Refusal(
        "--hybrid-context-parallel",
        _is_given("hybrid_context_parallel"),
        "ranks of one sharding group would run different numbers of micro-batches, and each of "
        "them gathers and reduces",
        _DROP_BOTH,
    ),
    Refusal(
        "--num-experts 4 --tensor-model-parallel-size 2",
        lambda args: bool(
            args.num_experts and args.add_bias_linear and args.tensor_model_parallel_size > 1
        ),
        "Megatron sums the bias gradients of experts over tensor-parallel ranks, whose shards of "
        "experts differ",
        "add --disable-bias-linear",
    ),
    Refusal(
        "--init-model-with-meta-device",
        _is_given("init_model_with_meta_device"),
        "parameters are sharded from their initial values",
        _DROP,
    ),
    Refusal(
        "--freeze-all-layers",
        _is_given("freeze_all_layers"),
        "there is no gradient and no optimizer state left to shard",
        _DROP_BOTH,
    ),
    Refusal(
        "--skip-train",
        _is_given("skip_train"),
        "Megatron then evaluates a model that is not wrapped, so nothing is sharded",
        _DROP_BOTH,
    ),
    *_rows(
        {
            "--overlap-moe-expert-parallel-comm": _is_given("overlap_moe_expert_parallel_comm"),
            "--delay-wgrad-compute": _is_given("delay_wgrad_compute"),
            "--overlap-dispatch-backward-with-experts-wgrad": _is_given(
                "overlap_dispatch_backward_with_experts_wgrad"
            ),
            "--defer-embedding-wgrad-compute": _is_given("defer_embedding_wgrad_compute"),
        },
        _LATE_WGRAD,
        _DROP,
    ),
    *_rows(
        {
            "--cpu-offloading-num-layers 1": _is_given("cpu_offloading_num_layers"),
            "--fine-grained-activation-offloading": _is_given("fine_grained_activation_offloading"),
            "--moe-paged-stash": _is_given("moe_paged_stash"),
        },
        _SAVED_TENSORS,
        "use --recompute-granularity instead",
    ),
    *_rows(
        {
            "--tensor-parallel-num-weight-shards 4": _has_more_shards(
                "tensor_parallel_num_weight_shards", "tensor_model_parallel_size"
            ),
            "--expert-tensor-parallel-num-weight-shards 4": _has_more_shards(
                "expert_tensor_parallel_num_weight_shards", "expert_tensor_parallel_size"
            ),
        },
        _EXTRA_AXIS,
        "use --asynchzp-param-shard-size instead",
    ),
    Refusal(
        "--use-nccl-ub",
        _is_given("nccl_ub"),
        "it registers buffers of Megatron's own wrapper, which is not used",
        _DROP,
    ),
    Refusal(
        "--dump-param-to-param-group-map map.json",
        _is_given("dump_param_to_param_group_map"),
        "the map is written by Megatron's own optimizer, which is not used",
        _DROP,
    ),
    Refusal(
        "--inprocess-restart",
        _is_given("inprocess_restart"),
        "the engine's process groups do not survive a restart within the process",
        "restart the job with torchrun --max-restarts",
    ),
    Refusal(
        "--exit-signal-handler-for-training",
        _is_given("exit_signal_handler_for_training"),
        "it destroys process groups in the middle of a step, while the engine uses them",
        "drop the flag: Ctrl-C ends a run in one line without it",
    ),
)


def refuse_unsupported(args: Namespace) -> None:
    """Raise UnsupportedConfiguration, one line, for the first flag that is not supported."""
    for refusal in REFUSALS:
        if refusal.is_asked(args):
            raise UnsupportedConfiguration(str(refusal))
