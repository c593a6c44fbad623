# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of Megatron that `--use-asynchzp` refuses."""

from collections.abc import Callable
from typing import Any

from megatron_asynchzp.mcore.flags.megatron_settings import (
    balances_experts,
    captures,
    captures_iteration,
    captures_layers,
    exchanges_equal_counts,
    has_own_graphs,
    is_fp32,
    named_parts,
    offloads,
    pads_experts,
)
from megatron_asynchzp.mcore.flags.rules import (
    Rule,
    argument_of,
    because,
    equal_to,
    other_than,
    refusal,
)

LATE_GRADS: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
    (
        "--calculate-per-token-loss",
        lambda s: s.calculate_per_token_loss,
        "it scales the gradients when backward is over",
    ),
    (
        "--sequence-parallel --tensor-model-parallel-size 2",
        lambda s: s.sequence_parallel and s.tensor_model_parallel_size > 1,
        "the gradients of every layer's norms are summed over the tensor-parallel ranks when "
        "backward is over",
    ),
    (
        "--qk-layernorm --tensor-model-parallel-size 2",
        lambda s: s.qk_layernorm and s.tensor_model_parallel_size > 1 and not s.sequence_parallel,
        "the gradients of these norms are summed over the tensor-parallel ranks when backward is "
        "over",
    ),
    ("--optimizer muon", lambda s: "muon" in (s.optimizer or ""), "it needs whole matrices"),
    (
        "--cuda-graph-impl full_iteration --bf16",
        captures_iteration,
        "a replay sends nothing before the update",
    ),
)
"""Where gradients change after backward, so that nothing is updated before: a command line, whether
settings ask for it, and why."""

BESIDE_WHOLE: dict[str, Callable[[Any], Any]] = {
    "--fp16": lambda s: s.fp16 or not s.bf16,
    "--transformer-impl local": lambda s: s.transformer_impl == "local",
    # Its sends wait for the device (batch_p2p_sync), which ends stock Megatron's capture, too.
    "--pipeline-model-parallel-size 2": lambda s: s.pipeline_model_parallel_size > 1,
    "--fp8-format hybrid --fp8-recipe delayed": lambda s: s.fp8 and s.fp8_recipe == "delayed",
    "--optimizer-cpu-offload": offloads,
    "--optimizer muon": lambda s: "muon" in (s.optimizer or ""),
    "--qk-clip": lambda s: s.qk_clip,
    "--mtp-num-layers 1": lambda s: s.mtp_num_layers,
    "--overlap-moe-expert-parallel-comm": lambda s: s.overlap_moe_expert_parallel_comm,
    "--fine-grained-activation-offloading": lambda s: s.fine_grained_activation_offloading,
    "--cpu-offloading-num-layers 1": lambda s: s.cpu_offloading_num_layers,
    "--check-for-large-grads": lambda s: s.check_for_large_grads,
    "--step-batch-size-schedule 0:8,10:16": lambda s: s.step_batch_size_schedule,
    "--cuda-graph-warmup-steps 0": lambda s: s.cuda_graph_warmup_steps == 0,
    "--asynchzp-keep-params-gb auto": lambda s: s.asynchzp_keep_params_gb == "auto",
    "--use-nccl-ub": lambda s: s.nccl_ub,
    "--asynchzp-trace trace.json": lambda s: s.asynchzp_trace,
}
"""A flag that a graph of a whole iteration is refused with, and whether settings ask for it."""

# Reason, remedy and example.
IGNORES_FLAGS = (
    "Megatron then ignores all other flags, this one included",
    "pass the settings as flags",
    "--yaml-cfg run.yaml",
)
_UNTESTED = "it has not been tested with sharded parameters"
_DROP = "drop the flag"
_CAPTURING = "--cuda-graph-impl transformer_engine"
_WHOLE = "--cuda-graph-impl full_iteration --bf16"
_DROP_BOTH = "drop the flag, or train without --use-asynchzp"
_FULL_TENSORS = "it reads whole parameters or gradients, of which a rank holds only a shard"


def _with_sub_samples(example: str, asks: Callable[[Any], Any], *words: str) -> Rule:
    example = f"--hybrid-context-parallel {example}"
    return refusal(example, lambda s: s.hybrid_context_parallel and asks(s), *words)


REFUSALS: tuple[Rule, ...] = (
    *because(
        "it is an old name",
        "use --cuda-graph-impl full_iteration",
        refusal(
            "--cuda-graph-impl local --cuda-graph-scope full_iteration",
            lambda s: has_own_graphs(s) and "full_iteration" in named_parts(s),
            "local with --cuda-graph-scope full_iteration",
        ),
        "--enable-cuda-graph",
    ),
    *because("the update is not captured", "drop the flag", "--optimizer-cuda-graph"),
    *because(
        "a whole iteration in one graph has not been tested, or cannot be captured, with it",
        "use --cuda-graph-impl transformer_engine, or leave out one of the two",
        *(
            refusal(
                f"{_WHOLE} {example}",
                lambda s, asks=asks: captures_iteration(s) and asks(s),
                f"full_iteration with {example}",
            )
            for example, asks in BESIDE_WHOLE.items()
        ),
    ),
    refusal(
        "--cuda-graph-impl local --num-experts 4",
        lambda s: has_own_graphs(s) and s.num_experts and (named_parts(s) or not pads_experts(s)),
        "local with experts that are not padded to a capacity, or with parts of layers",
        "Megatron's own graphs around experts read indices that have been written over, with "
        "--use-asynchzp and without",
        "use --cuda-graph-impl transformer_engine with --cuda-graph-modules attn moe_router "
        "moe_preprocess",
    ),
    refusal(
        "--cuda-graph-impl local --transformer-impl local",
        lambda s: has_own_graphs(s) and s.transformer_impl == "local",
        "local with --transformer-impl local",
        "Megatron's own graphs have been tested with layers of Transformer Engine alone",
        "use --transformer-impl transformer_engine",
    ),
    refusal(
        "--cuda-graph-impl local --fp8-format hybrid --fp8-recipe delayed",
        lambda s: has_own_graphs(s) and s.fp8 and s.fp8_recipe == "delayed",
        "local with --fp8-recipe delayed",
        "Megatron's own graphs change scales while they are captured, so that losses are others "
        "than without graphs, with --use-asynchzp and without",
        "use --cuda-graph-impl transformer_engine, or another --fp8-recipe",
    ),
    refusal(
        f"{_CAPTURING} --num-experts 4",
        lambda s: (
            (captures_iteration(s) or (captures_layers(s) and not has_own_graphs(s)))
            and s.num_experts
            and captures(s, "moe")
            and not pads_experts(s)
        ),
        "transformer_engine or full_iteration with experts that are not padded to a capacity",
        "experts that take any number of tokens cannot be captured",
        "name --cuda-graph-modules attn moe_router moe_preprocess, or add "
        "--moe-expert-capacity-factor and --moe-pad-expert-input-to-capacity with "
        "--moe-token-dispatcher-type alltoall",
    ),
    refusal(
        f"{_CAPTURING} --pipeline-model-parallel-size 2 --step-batch-size-schedule 0:8,10:16",
        lambda s: (
            captures_layers(s) and s.pipeline_model_parallel_size > 1 and s.step_batch_size_schedule
        ),
        "other than none with pipelines and --step-batch-size-schedule",
        "a pipeline's graphs are captured for one number of micro-batches",
        "use one --global-batch-size",
    ),
    refusal(
        f"{_CAPTURING} --fp16",
        lambda s: captures_layers(s) and (s.fp16 or not s.bf16),
        "other than none without --bf16",
        "beside sharded parameters that has not been tested in a captured layer",
        "name other parts of a layer with --cuda-graph-modules, or drop --cuda-graph-impl",
    ),
    *because(
        "layers with precisions of their own have not been tested with sharded parameters",
        "use --bf16, with or without --fp8-format or --fp4-format",
        "--te-precision-config-file precision.yaml",
    ),
    *because(
        _UNTESTED,
        "use --fp8-recipe tensorwise, delayed, blockwise or mxfp8",
        equal_to("--fp8-recipe custom"),
    ),
    *because(_UNTESTED, "use --fp4-recipe nvfp4", equal_to("--fp4-recipe custom")),
    *because(
        "layers quantise what is gathered, which has not been tested in fp16",
        "use --bf16",
        refusal(
            "--fp8-format hybrid --fp16", lambda s: s.fp8 and s.fp16, "with --fp16", setting="fp8"
        ),
        refusal(
            "--fp4-format e2m1 --fp16", lambda s: s.fp4 and s.fp16, "with --fp16", setting="fp4"
        ),
    ),
    refusal(
        "--fp8-format hybrid --transformer-impl local",
        lambda s: s.fp8 and s.transformer_impl == "local",
        "with local layers",
        "Megatron's own layers compute in bf16 whatever it says",
        "use --transformer-impl transformer_engine",
        setting="fp8",
    ),
    refusal(
        "--recompute-modules mlp --recompute-granularity selective",
        lambda s: (
            s.recompute_granularity == "selective"
            and "mlp" in (s.recompute_modules or ())
            and s.add_bias_linear
        ),
        "mlp with biases",
        "a recomputed MLP returns its bias, which autograd then takes for a result of it: backward "
        "does not end, with --use-asynchzp and without",
        "use --disable-bias-linear, or leave mlp out",
    ),
    *because(
        "the sharded optimizer is Adam, SGD or Muon on fp32 main parameters",
        "use --optimizer adam, sgd or muon alone",
        other_than("--optimizer soap", "adam", "sgd", "muon", "dist_muon"),
    ),
    refusal(
        "--optimizer-cpu-offload --optimizer muon",
        lambda s: offloads(s) and "muon" in (s.optimizer or ""),
        "with muon",
        "the states of Muon belong to whole matrices, and are not updated unit by unit",
        "use --optimizer adam or sgd, or drop --optimizer-cpu-offload",
    ),
    refusal(
        "--no-pin-cpu-params --optimizer-cpu-offload",
        lambda s: offloads(s) and not s.pin_cpu_params,
        "with --optimizer-cpu-offload",
        "copies run beside updates, for which both ends have to be pinned",
        "drop the flag, or --optimizer-cpu-offload",
        setting="pin_cpu_params",
    ),
    refusal(
        "--optimizer muon --fp16",
        lambda s: s.fp16 and s.optimizer in ("muon", "dist_muon"),
        "muon with --fp16",
        "Megatron has no gradient scaler for it",
        "use --bf16",
    ),
    *because(
        "what is not a matrix has Adam",
        "use --muon-scalar-optimizer adam",
        equal_to("--muon-scalar-optimizer lion"),
    ),
    refusal(
        "--main-params-dtype fp16",
        lambda s: not is_fp32(s.main_params_dtype),
        "other than fp32",
        "main parameters are kept in fp32",
        _DROP,
    ),
    refusal(
        "--main-grads-dtype bf16 --loss-scale 8",
        lambda s: (
            not is_fp32(s.main_grads_dtype)
            and (
                not s.bf16
                or s.optimizer != "adam"
                or s.loss_scale
                or s.accumulate_allreduce_grads_in_fp32
            )
        ),
        "bf16 without --bf16, without Adam, with --loss-scale or "
        "--accumulate-allreduce-grads-in-fp32",
        "gradients of a bf16 model are then added up in bf16, and Adam alone reads them",
        "use --bf16 and --optimizer adam, or drop the flag",
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
    refusal(
        "--qk-clip --transformer-impl local",
        lambda s: (
            s.qk_clip and (s.transformer_impl == "local" or captures_layers(s) or s.fp8 or s.fp4)
        ),
        "with local or captured layers, or with layers in FP8 or FP4",
        "Megatron has the largest scores from Transformer Engine's attention alone, and a replayed "
        "graph does not tell them; weights in FP8 or FP4 have not been tested beside it",
        _DROP_BOTH,
    ),
    refusal(
        "--qk-clip --tensor-model-parallel-size 2",
        lambda s: s.qk_clip and s.tensor_model_parallel_size > 1 and not s.multi_latent_attention,
        "with --tensor-model-parallel-size above 1, without --multi-latent-attention",
        "Megatron takes the weights of a layer for unsplit, and ends without --use-asynchzp too",
        "use --tensor-model-parallel-size 1, or --multi-latent-attention",
    ),
    *because(*IGNORES_FLAGS),
    *because(
        "inference reads whole parameters, of which a rank holds only a shard",
        _DROP_BOTH,
        "--perform-rl-step",
        equal_to("--transformer-impl inference_optimized"),
    ),
    *because(
        _UNTESTED,
        _DROP,
        refusal(
            "--moe-use-grouped-tensor",
            lambda s: s.moe_use_grouped_tensor and not s.use_transformer_engine_op_fuser,
            "without --use-transformer-engine-op-fuser, which switches it on",
        ),
        "--enable-mhc-connections",
        refusal("--output-logit-dtype fp32", lambda s: s.logit_dtype, setting="logit_dtype"),
        "--muon-use-syrk",
        other_than("--moe-dispatch-fwd-dtype mxfp8", "bf16"),
        other_than("--moe-combine-bwd-dtype mxfp8", "bf16"),
    ),
    *because(
        "Megatron reads which rank writes what from it without a check, even if it was made for "
        "other ranks",
        _DROP,
        "--ckpt-pg-tensors-cache-path cache",
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
    _with_sub_samples(
        "--mtp-num-layers 1",
        lambda s: (
            s.mtp_num_layers
            or s.multi_latent_attention
            or s.experimental_attention_variant
            or s.hybrid_layer_pattern is True  # a framework's hybrid model
            or set(s.hybrid_layer_pattern or "") - set("*-E|/")
        ),
        "with --mtp-num-layers, --multi-latent-attention, --experimental-attention-variant, or "
        "a --hybrid-layer-pattern with more than *, - and E",
        "these layers do not follow the ranks of a sub-sample",
        "leave one of the two out",
    ),
    _with_sub_samples(
        "--num-experts 4 --moe-aux-loss-coeff 0.01",
        lambda s: s.num_experts and balances_experts(s),
        "with experts that are balanced by a loss, a bias or a quantile",
        "fillers, the sub-samples of one token that make ranks even, would be counted as tokens of "
        "an expert",
        "use --moe-router-load-balancing-type none without --moe-z-loss-coeff and "
        "--moe-router-enable-expert-bias",
    ),
    _with_sub_samples(
        "--num-experts 4 --expert-model-parallel-size 2",
        lambda s: s.num_experts and exchanges_equal_counts(s),
        "with experts on several ranks and another dispatcher than alltoall, or padded experts",
        "ranks that share experts have sub-samples of different lengths, and these dispatchers "
        "expect equal ones",
        "use --moe-token-dispatcher-type alltoall without --moe-pad-expert-input-to-capacity",
    ),
    _with_sub_samples(
        "--micro-batch-size 2",
        lambda s: max(s.micro_batch_size or 1, s.eval_micro_batch_size or 1) > 1,
        "with a --micro-batch-size or --eval-micro-batch-size above 1",
        "each sub-sample is a batch of one",
        "use --micro-batch-size 1",
    ),
    _with_sub_samples(
        "--fp8-format hybrid",
        lambda s: s.fp8 or s.fp4 or captures_layers(s) or captures_iteration(s),
        "with layers in FP8 or FP4, or captured ones",
        "fillers have one token, and sub-samples any number",
        "use --bf16 without --fp8-format, --fp4-format and --cuda-graph-impl",
    ),
    _with_sub_samples(
        "--step-batch-size-schedule 0:8,10:16",
        lambda s: s.step_batch_size_schedule,
        "with --step-batch-size-schedule",
        "Megatron reads one number of samples in all steps",
        "use one --global-batch-size",
    ),
    refusal(
        "--num-experts 4 --tensor-model-parallel-size 2",
        lambda s: s.num_experts and s.add_bias_linear and s.tensor_model_parallel_size > 1,
        "with tensor parallelism and biases",
        "Megatron sums the bias gradients of experts over tensor-parallel ranks, whose shards of "
        "experts differ",
        "add --disable-bias-linear",
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
    *because(
        "moments are stored in fp32 or bf16",
        "use bf16",
        *(
            refusal(
                f"--{name} fp16 --use-precision-aware-optimizer",
                lambda s, name=argument_of(f"--{name}"): (
                    not is_fp32(word := getattr(s, name)) and "bf" not in str(word)
                ),
                "other than fp32 and bf16",
            )
            for name in ("exp-avg-dtype", "exp-avg-sq-dtype")
        ),
    ),
    *because(
        "it has no effect without --use-precision-aware-optimizer",
        "add that flag",
        *(
            refusal(
                f"--{name} bf16",
                lambda s, name=argument_of(f"--{name}"): (
                    "bf" in str(getattr(s, name)) and not s.use_precision_aware_optimizer
                ),
                "bf16 without --use-precision-aware-optimizer",
            )
            for name in ("exp-avg-dtype", "exp-avg-sq-dtype")
        ),
    ),
    refusal(
        "--use-precision-aware-optimizer --optimizer sgd",
        lambda s: s.use_precision_aware_optimizer and s.optimizer != "adam",
        "without --optimizer adam",
        "it is for Adam alone",
        "use --optimizer adam, or drop the flag",
    ),
    refusal(
        "--optimizer-offload-fraction 1.5 --optimizer-cpu-offload",
        lambda s: s.optimizer_cpu_offload and not 0 <= s.optimizer_offload_fraction <= 1,
        "below 0 or above 1",
        "it is no part of the optimizer states",
        "give a number from 0 to 1",
    ),
    *(
        refusal(
            f"--asynchzp-early-update on {example}",
            lambda s, asks=asks: s.asynchzp_early_update == "on" and asks(s),
            f"on with {example}",
            reason,
            "leave the flag out",
            beside=example.split()[0],
        )
        for example, asks, reason in LATE_GRADS
    ),
)
