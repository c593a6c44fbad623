# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The Megatron flags that `--use-asynchzp` refuses, and the line that each refusal prints."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_asynchzp.errors import ConfigurationError


@dataclass(frozen=True)
class Refusal:
    """One Megatron flag that does not work beside a flag of ours.

    example: a command line that is refused; its first word is the flag.
    is_asked: whether the arguments ask for it, before and after Megatron's own validation.
    condition: which values are refused, for the documentation; "" means all of them.
    reason, remedy: parts of the line that the user reads.
    beside: our flag.
    is_decided_by_flag: whether is_asked reads the flag's own argument alone.
    """

    example: str
    is_asked: Callable[[Namespace], Any]
    condition: str = ""
    reason: str = ""
    remedy: str = ""
    beside: str = "--use-asynchzp"
    is_decided_by_flag: bool = False

    @property
    def flag(self) -> str:
        return self.example.split()[0]

    def __str__(self) -> str:
        return f"{self.flag} is not supported with {self.beside}: {self.reason}; {self.remedy}"


class Refused(ConfigurationError):
    """Its line is that of the first of `rows`, which are all that the arguments ask for."""

    def __init__(self, rows: Sequence[Refusal]):
        super().__init__(str(rows[0]))
        self.rows = rows


def refuse(table: Sequence[Refusal], args: Namespace) -> None:
    """Raise Refused for what `args` ask for of `table`."""
    if rows := [refusal for refusal in table if refusal.is_asked(args)]:
        raise Refused(rows)


def refuse_unsupported(args: Namespace) -> None:
    """Raise ConfigurationError for the first flag that `--use-asynchzp` does not support."""
    refuse(REFUSALS, args)


# --- how the tables are written ----------------------------------------------------------------


def given(example: str) -> Refusal:
    """Refused where the argument holds anything but None, False, 0 and the empty list."""
    name = argument_of(example)
    return Refusal(example, lambda args: bool(getattr(args, name, None)), is_decided_by_flag=True)


def other_than(example: str, *allowed: object) -> Refusal:
    """Refused with all values but `allowed`."""
    name = argument_of(example)
    *others, last = map(str, allowed)
    condition = f"other than {', '.join(others)} and {last}" if others else f"other than {last}"
    return Refusal(
        example,
        lambda args: getattr(args, name, allowed[0]) not in allowed,
        condition,
        is_decided_by_flag=True,
    )


def equal_to(example: str) -> Refusal:
    """Refused with the value of the example alone."""
    name, value = argument_of(example), example.split()[1]
    return Refusal(
        example, lambda args: getattr(args, name, None) == value, value, is_decided_by_flag=True
    )


def because(
    reason: str, remedy: str, *rows: str | Refusal, beside: str = "--use-asynchzp"
) -> tuple[Refusal, ...]:
    """Rows with one reason and one remedy. A string stands for `given` with that example."""
    made = (given(row) if isinstance(row, str) else row for row in rows)
    return tuple(replace(row, reason=reason, remedy=remedy, beside=beside) for row in made)


def argument_of(example: str) -> str:
    """The name of the argument of the flag that `example` begins with."""
    return example.split()[0].removeprefix("--").replace("-", "_")


def _is_fp32(dtype: object) -> bool:
    """dtype: a word before Megatron's validation, a torch.dtype after it."""
    return str(dtype) in ("fp32", "torch.float32")


def _has_own_graphs(args: Namespace) -> bool:
    """Whether Megatron captures layers by itself."""
    return args.cuda_graph_impl == "local"


def _offloads(args: Namespace) -> bool:
    """Whether optimizer states are on the host, before and after `take_offload`."""
    return bool(args.optimizer_cpu_offload or getattr(args, "asynchzp_offload", 0))


def captures_layers(args: Namespace) -> bool:
    """Whether single layers are captured."""
    is_old_name = getattr(args, "external_cuda_graph", False)
    return is_old_name or args.cuda_graph_impl in ("transformer_engine", "local")


def captures(args: Namespace, *parts: str) -> bool:
    """Whether one of `parts` of a layer is captured: all are where no part is named."""
    named = _named_parts(args)
    return not named or any(part in named for part in (*parts, "full"))


def _named_parts(args: Namespace) -> list[str]:
    # By versions of megatron-core, and before and after Megatron's own validation.
    names = ("cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated")
    named = next(filter(None, (getattr(args, name, None) for name in names)), ())
    return [getattr(part, "name", part) for part in named]


def _pads_experts(args: Namespace) -> bool:
    """Whether each expert gets as many tokens in every step, so that the host need not ask."""
    has_capacity = args.moe_pad_expert_input_to_capacity and args.moe_expert_capacity_factor
    return bool(has_capacity) and args.moe_token_dispatcher_type == "alltoall"


# --- the table ---------------------------------------------------------------------------------

_DROP = "drop the flag"
_CAPTURING = "--cuda-graph-impl transformer_engine"
_DROP_BOTH = "drop the flag, or train without --use-asynchzp"
_FULL_TENSORS = "it reads whole parameters or gradients, of which a rank holds only a shard"

REFUSALS: tuple[Refusal, ...] = (
    *because(
        "only graphs of layers work: a whole step in one graph has run with the engine alone",
        "use --cuda-graph-impl transformer_engine or local",
        other_than("--cuda-graph-impl full_iteration", "none", "transformer_engine", "local"),
        Refusal(
            "--cuda-graph-impl local --cuda-graph-scope full_iteration",
            lambda args: _has_own_graphs(args) and "full_iteration" in _named_parts(args),
            "local with --cuda-graph-scope full_iteration",
        ),
        "--enable-cuda-graph",
        "--optimizer-cuda-graph",
    ),
    *because(
        "Megatron's own graphs around experts read indices that have been written over, with "
        "--use-asynchzp and without",
        "use --cuda-graph-impl transformer_engine with --cuda-graph-modules attn moe_router "
        "moe_preprocess",
        Refusal(
            "--cuda-graph-impl local --num-experts 4",
            lambda args: (
                _has_own_graphs(args)
                and args.num_experts
                and (_named_parts(args) or not _pads_experts(args))
            ),
            "local with experts that are not padded to a capacity, or with parts of layers",
        ),
    ),
    *because(
        "Megatron's own graphs have been tested with layers of Transformer Engine alone",
        "use --transformer-impl transformer_engine",
        Refusal(
            "--cuda-graph-impl local --transformer-impl local",
            lambda args: _has_own_graphs(args) and args.transformer_impl == "local",
            "local with --transformer-impl local",
        ),
    ),
    *because(
        "Megatron's own graphs change scales while they are captured, so that losses are others "
        "than without graphs, with --use-asynchzp and without",
        "use --cuda-graph-impl transformer_engine, or another --fp8-recipe",
        Refusal(
            "--cuda-graph-impl local --fp8-format hybrid --fp8-recipe delayed",
            lambda args: _has_own_graphs(args) and args.fp8 and args.fp8_recipe == "delayed",
            "local with --fp8-recipe delayed",
        ),
    ),
    *because(
        "experts that take any number of tokens cannot be captured",
        "name --cuda-graph-modules attn moe_router moe_preprocess, or add "
        "--moe-expert-capacity-factor and --moe-pad-expert-input-to-capacity with "
        "--moe-token-dispatcher-type alltoall",
        Refusal(
            f"{_CAPTURING} --num-experts 4",
            lambda args: (
                captures_layers(args)
                and not _has_own_graphs(args)
                and args.num_experts
                and captures(args, "moe")
                and not _pads_experts(args)
            ),
            "transformer_engine with experts within that are not padded to a capacity",
        ),
    ),
    *because(
        "a pipeline's graphs are captured for one number of micro-batches",
        "use one --global-batch-size",
        Refusal(
            f"{_CAPTURING} --pipeline-model-parallel-size 2 --step-batch-size-schedule 0:8,10:16",
            lambda args: (
                captures_layers(args)
                and args.pipeline_model_parallel_size > 1
                and args.step_batch_size_schedule
            ),
            "other than none with pipelines and --step-batch-size-schedule",
        ),
    ),
    *because(
        "beside sharded parameters that has not been tested in a captured layer",
        "name other parts of a layer with --cuda-graph-modules, or drop --cuda-graph-impl",
        Refusal(
            f"{_CAPTURING} --fp16",
            lambda args: captures_layers(args) and (args.fp16 or not args.bf16),
            "other than none without --bf16",
        ),
    ),
    *because(
        "layers with precisions of their own have not been tested with sharded parameters",
        "use --bf16, with or without --fp8-format or --fp4-format",
        "--te-precision-config-file precision.yaml",
    ),
    *because(
        "it has not been tested with sharded parameters",
        "use --fp8-recipe tensorwise, delayed, blockwise or mxfp8",
        equal_to("--fp8-recipe custom"),
    ),
    *because(
        "it has not been tested with sharded parameters",
        "use --fp4-recipe nvfp4",
        equal_to("--fp4-recipe custom"),
    ),
    *because(
        "layers quantise what is gathered, which has not been tested in fp16",
        "use --bf16",
        Refusal("--fp8-format hybrid --fp16", lambda args: args.fp8 and args.fp16, "with --fp16"),
        Refusal("--fp4-format e2m1 --fp16", lambda args: args.fp4 and args.fp16, "with --fp16"),
    ),
    *because(
        "Megatron's own layers compute in bf16 whatever it says",
        "use --transformer-impl transformer_engine",
        Refusal(
            "--fp8-format hybrid --transformer-impl local",
            lambda args: args.fp8 and args.transformer_impl == "local",
            "with local layers",
        ),
    ),
    *because(
        "a recomputed MLP returns its bias, which autograd then takes for a result of it: backward "
        "does not end, with --use-asynchzp and without",
        "use --disable-bias-linear, or leave mlp out",
        Refusal(
            "--recompute-modules mlp --recompute-granularity selective",
            lambda args: (
                args.recompute_granularity == "selective"
                and "mlp" in (args.recompute_modules or ())
                and args.add_bias_linear
            ),
            "mlp with biases",
        ),
    ),
    *because(
        "the sharded optimizer is Adam, SGD or Muon on fp32 main parameters",
        "use --optimizer adam, sgd or muon alone",
        other_than("--optimizer soap", "adam", "sgd", "muon", "dist_muon"),
    ),
    *because(
        "the states of Muon belong to whole matrices, and are not updated unit by unit",
        "use --optimizer adam or sgd, or drop --optimizer-cpu-offload",
        Refusal(
            "--optimizer-cpu-offload --optimizer muon",
            lambda args: _offloads(args) and "muon" in args.optimizer,
            "with muon",
        ),
    ),
    *because(
        "copies run beside updates, for which both ends have to be pinned",
        "drop the flag, or --optimizer-cpu-offload",
        Refusal(
            "--no-pin-cpu-params --optimizer-cpu-offload",
            lambda args: _offloads(args) and not args.pin_cpu_params,
            "with --optimizer-cpu-offload",
        ),
    ),
    *because(
        "Megatron has no gradient scaler for it",
        "use --bf16",
        Refusal(
            "--optimizer muon --fp16",
            lambda args: args.fp16 and args.optimizer in ("muon", "dist_muon"),
            "muon with --fp16",
        ),
    ),
    *because(
        "what is not a matrix has Adam",
        "use --muon-scalar-optimizer adam",
        equal_to("--muon-scalar-optimizer lion"),
    ),
    *because(
        "main parameters are kept in fp32",
        _DROP,
        Refusal(
            "--main-params-dtype fp16",
            lambda args: not _is_fp32(args.main_params_dtype),
            "other than fp32",
        ),
    ),
    *because(
        "gradients of a bf16 model are then added up in bf16, and Adam alone reads them",
        "use --bf16 and --optimizer adam, or drop the flag",
        Refusal(
            "--main-grads-dtype bf16 --loss-scale 8",
            lambda args: (
                not _is_fp32(args.main_grads_dtype)
                and (
                    not args.bf16
                    or args.optimizer != "adam"
                    or args.loss_scale
                    or args.accumulate_allreduce_grads_in_fp32
                )
            ),
            "bf16 without --bf16, without Adam, with --loss-scale or "
            "--accumulate-allreduce-grads-in-fp32",
        ),
    ),
    *because(
        "Megatron has a name for it and no code",
        "use --non-persistent-ckpt-type local or global",
        equal_to("--non-persistent-ckpt-type in_memory"),
    ),
    *because(
        _FULL_TENSORS,
        _DROP_BOTH,
        "--ckpt-convert-format torch_dist",
        "--load-main-params-from-ckpt",
        "--moe-use-upcycling",
    ),
    *because(
        "what it writes beside a checkpoint has not been tested",
        _DROP,
        "--save-activations-interval 10",
        "--save-dgrads-interval 10",
        "--save-tokens-per-expert-interval 10",
        "--logits-save-dir logits",
    ),
    *because(
        "Megatron has the largest scores from Transformer Engine's attention alone, and a replayed "
        "graph does not tell them; weights in FP8 or FP4 have not been tested beside it",
        _DROP_BOTH,
        Refusal(
            "--qk-clip --transformer-impl local",
            lambda args: (
                args.qk_clip
                and (
                    args.transformer_impl == "local"
                    or captures_layers(args)
                    or args.fp8
                    or args.fp4
                )
            ),
            "with local or captured layers, or with layers in FP8 or FP4",
        ),
    ),
    *because(
        "Megatron takes the weights of a layer for unsplit, and ends without --use-asynchzp too",
        "use --tensor-model-parallel-size 1, or --multi-latent-attention",
        Refusal(
            "--qk-clip --tensor-model-parallel-size 2",
            lambda args: (
                args.qk_clip
                and args.tensor_model_parallel_size > 1
                and not args.multi_latent_attention
            ),
            "with --tensor-model-parallel-size above 1, without --multi-latent-attention",
        ),
    ),
    *because(
        "inference reads whole parameters, of which a rank holds only a shard",
        _DROP_BOTH,
        "--perform-rl-step",
        equal_to("--transformer-impl inference_optimized"),
    ),
    *because(
        "grouped tensors cannot be views of a flat buffer",
        _DROP,
        "--moe-single-grouped-weight",
        "--moe-single-grouped-bias",
    ),
    *because(
        "the output weight is detached outside its module, where it is not gathered, and the heads "
        "are clipped by a norm of their own",
        _DROP,
        "--mtp-detach-heads",
    ),
    *because(
        "ranks of one sharding group would run different numbers of micro-batches, and each of "
        "them gathers and reduces",
        _DROP_BOTH,
        "--hybrid-context-parallel",
    ),
    *because(
        "Megatron sums the bias gradients of experts over tensor-parallel ranks, whose shards of "
        "experts differ",
        "add --disable-bias-linear",
        Refusal(
            "--num-experts 4 --tensor-model-parallel-size 2",
            lambda args: (
                args.num_experts and args.add_bias_linear and args.tensor_model_parallel_size > 1
            ),
            "with tensor parallelism and biases",
        ),
    ),
    *because(
        "there is no gradient and no optimizer state left to shard",
        _DROP_BOTH,
        "--freeze-all-layers",
    ),
    *because(
        "Megatron then evaluates a model that is not wrapped, so nothing is sharded",
        _DROP_BOTH,
        "--skip-train",
    ),
    *because(
        "what it keeps goes through dispatchers and kernels that run on a GPU alone (HybridEP, "
        "NCCL EP), where it has not been seen beside the engine",
        "use --fine-grained-activation-offloading or --recompute-granularity instead",
        "--moe-paged-stash",
    ),
    *because(
        "this Megatron ignores it and trains with the whole batch from the first step",
        "use --step-batch-size-schedule, without --global-batch-size",
        "--rampup-batch-size 2 2 100",
    ),
    *because(
        "the map is written by Megatron's own optimizer, which is not used",
        _DROP,
        "--dump-param-to-param-group-map map.json",
    ),
    *because(
        "a rank whose collective fails ends its process, and Megatron's list of what ends with an "
        "attempt has no place for the engine's threads and buffers",
        "restart the job with torchrun --max-restarts",
        "--inprocess-restart",
    ),
    *because(
        "it destroys process groups in the middle of a step, while the engine uses them",
        "drop the flag: Ctrl-C ends a run in one line without it",
        "--exit-signal-handler-for-training",
    ),
)
