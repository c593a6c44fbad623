# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Makes the planner's model of Megatron's validated arguments, and chooses sizes that are auto.

The choice follows from the flags and the cluster file alone, so it is the same on every rank.
"""

import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, Literal

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.arguments import config_of
from megatron_asynchzp.mcore.flags.config import AUTO, STATES
from megatron_asynchzp.mcore.flags.megatron_settings import captures, captures_layers
from megatron_asynchzp.mcore.flags.shard_sizes import describe_cuts, node_size
from megatron_asynchzp.mcore.run.settings import RunSettings
from megatron_asynchzp.planner.activations import (
    FP4_COPIES_NBYTES,
    FP8_COPIES_NBYTES,
    Kernels,
    Recompute,
    RunShape,
)
from megatron_asynchzp.planner.cluster import GIB, Cluster, Device, Link
from megatron_asynchzp.planner.cluster_files import load_cluster
from megatron_asynchzp.planner.costs import Costing
from megatron_asynchzp.planner.model import (
    Adapters,
    Attention,
    Batch,
    Experts,
    LatentAttention,
    Layer,
    Mamba,
    Mlp,
    Model,
    Parallel,
)
from megatron_asynchzp.planner.plan import Plan
from megatron_asynchzp.planner.search import Outcome, search
from megatron_asynchzp.planner.space import Space, undivided
from megatron_asynchzp.planner.traffic import Wire

_MAMBA_HEADS_OF = 2  # Megatron's expansion: heads x head_dim are twice the hidden size

# ---- a run as it is


def plan_of(args: Any, setting: RunShape, run: RunSettings | None = None) -> Plan:
    """Return the plan of validated arguments, with (1, 1, 1) for sizes that are not numbers yet."""
    run = run or RunSettings.of_arguments(args)
    return Plan(
        run.sizes,
        setting.parallel,
        setting.batch,
        run.schedule,
        setting.recompute,
        _wire(args, run),
        run.moment_nbytes,
        is_on_cpu=args.distributed_backend == "gloo",
        has_loss_scale=args.fp16,
        seated=_seated_kinds(args),
        main_grad=run.main_grad_dtype.itemsize,
        offload=run.offload,
    )


def _wire(args: Any, run: RunSettings) -> Wire:
    """Return what travels; a code counts its part of a scale (low_precision.send_codes)."""
    code_nbytes = {"blockwise": 1 + 4 / 128**2, "mxfp8": 1 + 1 / 32}.get(args.fp8_recipe, 1.0)
    has_directions = args.fp8_recipe == "mxfp8"
    if args.fp4:
        has_directions = os.getenv("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "0") == "1"
        code_nbytes = 1 / 2 + (1 / 16 if has_directions else 1 / 16**2)
    may_recompute = args.recompute_granularity == "full" or args.overlap_moe_expert_parallel_comm
    if has_directions and may_recompute:
        code_nbytes = (code_nbytes + 2) / 2  # such a layer comes in bf16 for backward
    nbytes = run.sends_codes * code_nbytes
    return Wire(run.grad_dtype.itemsize, code_nbytes=nbytes, has_directions=has_directions)


def _seated_kinds(args: Any) -> tuple[str, ...]:
    kinds = ("layer", "experts") if captures(args, "moe") else ("layer",)
    return kinds if captures_layers(args) else ()


def costing_of(
    args: Any, setting: RunShape | None = None, run: RunSettings | None = None
) -> Costing:
    """Return the bytes and the order of the run, which depend on no cluster's speeds."""
    setting = setting or setting_of(args)
    cluster = Cluster("any", args.world_size, 1, Device(1.0, 1.0), Link(1.0), Link(1.0))
    return Costing(setting.model, plan_of(args, setting, run), cluster, setting.kernels)


def faults_of_layers(args: Any) -> Iterator[str]:
    """Name sizes that Megatron would refuse when it builds the model, or in the first step."""
    # The model is the one that Megatron's own scripts make of validated arguments.
    if args.num_experts:
        if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
            yield "--num-experts with --tensor-model-parallel-size: add --sequence-parallel"
        groups, chosen = args.moe_router_num_groups or 1, args.moe_router_group_topk or 1
        size, needed = args.num_experts // groups, args.moe_router_topk // chosen
        if needed > size:
            yield (
                f"--moe-router-topk {args.moe_router_topk} over --moe-router-group-topk {chosen} "
                f"needs {needed} experts of a group, but each of the {groups} groups has {size}; "
                "lower the first, or raise the second"
                if groups > 1
                else f"--moe-router-topk {needed} is above --num-experts {size}; lower it"
            )
        pattern = args.moe_layer_freq
        if isinstance(pattern, list) and len(pattern) != args.num_layers:
            yield f"--moe-layer-freq has {len(pattern)} entries for --num-layers {args.num_layers}"
    try:
        model, parallel = model_of(args), parallel_of(args)
    except ConfigurationError:
        return  # a layer without a formula in the planner
    for name, size, other, by in undivided(model, parallel, args.seq_length):
        yield f"--{name} {size} is not a multiple of --{other} {by}"
    if args.multi_latent_attention and args.transformer_impl == "local":
        ranks = args.q_lora_rank or 0, args.kv_lora_rank + args.qk_pos_emb_head_dim
        for size in filter(lambda size: size % parallel.tp, ranks):
            yield (
                f"--q-lora-rank, or --kv-lora-rank with --qk-pos-emb-head-dim, of {size} is not a "
                f"multiple of --tensor-model-parallel-size {parallel.tp}, as local layers want it"
            )
    stages, count = parallel.pp, batch_of(args).num_micro_batches
    group = args.microbatch_group_size_per_vp_stage or stages
    if parallel.virtual > 1 and (not stages <= group <= count or 0 < count % group < stages):
        yield (
            f"--global-batch-size {args.global_batch_size}: {count} micro-batches of a pipeline "
            f"do not go through --pipeline-model-parallel-size {stages} in groups of {group}, as "
            "interleaved stages take them"
        )


# ---- what may be chosen


def space_of(args: Any, cluster: Cluster, setting: RunShape | None = None, **free: Any) -> Space:
    """Return the space of all shard sizes on `cluster`; fields of Space in `free` vary too."""
    setting = setting or setting_of(args)
    start = plan_of(args, setting)
    parallel, batch = setting.parallel, setting.batch
    replicas = cluster.num_ranks // (parallel.tp * parallel.pp * parallel.cp)
    kept: dict[str, Any] = {
        "depths": (start.schedule.prefetch_depth,),
        "micro_batch_sizes": (batch.size,),
        "recomputes": (setting.recompute,),
    }
    global_batch = args.global_batch_size or batch.size * replicas
    return Space(setting.model, cluster, global_batch, start, setting.kernels, **(kept | free))


def find(space: Space, *progress: Any) -> Outcome:
    """Search for plans. Raises ConfigurationError, one line, if no plan can run."""
    with naming_the_flag():
        outcome = search(space, *progress)
    if outcome.num_plans == 0:
        raise ConfigurationError(
            f"--global-batch-size {space.global_batch}: no micro-batch size divides it over the "
            f"replicas on {space.cluster.num_ranks} ranks; change the batch or the parallel sizes"
        )
    return outcome


@contextmanager
def naming_the_flag() -> Iterator[None]:
    """Name the flag in a ConfigurationError about too little memory in flight."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"--asynchzp-memory-in-flight-gb: {error}") from error


def choose_sizes(args: Namespace) -> list[str]:
    """Write the best sizes into validated `args` if one is auto; return the lines to log.

    Sizes that were given as numbers stay, the others are chosen together. Raises
    ConfigurationError, one line, for a cluster that is not the run's or a model that does not fit.
    """
    config = config_of(args)
    if not (automatic := config.states_of_size(AUTO)):
        return []
    cluster = _cluster(args)
    kept = {s: size for s, size in config.shard_sizes.items() if size not in (None, AUTO)}
    outcome = find(space_of(_with_vocabulary(args), cluster, kept_sizes=kept))
    best = outcome.best
    if best is None:
        raise ConfigurationError(
            f"--asynchzp-{automatic[0]}-shard-size auto: none of "
            f"{outcome.num_plans} plans fits into the {cluster.device.memory_gib:g} GiB less "
            f"{cluster.device.reserved_gib:g} of --asynchzp-cluster {args.asynchzp_cluster}; start "
            "more ranks, or give other numbers"
        )
    flags = []
    for state in STATES:
        size = getattr(best.plan.sizes, state)
        setattr(args, f"asynchzp_{state}_shard_size", size)
        flags.append(f"--asynchzp-{state}-shard-size {size}")
    return [
        f"chosen of {outcome.num_plans} plans for {args.asynchzp_cluster}: {' '.join(flags)} "
        f"(planned: {best.step_s:.3g} s a step, {best.costing.memory.total / GIB:.2f} GiB a rank)",
        *describe_cuts(best.plan.sizes, best.costing.dense_ranks),
        *cluster.doubts,
    ]


def _cluster(args: Any) -> Cluster:
    cluster = load_cluster(args.asynchzp_cluster).with_ranks(args.world_size)
    if cluster.ranks_per_node != node_size(args):
        raise ConfigurationError(
            f"--asynchzp-cluster {args.asynchzp_cluster}: its nodes have {cluster.ranks_per_node} "
            f"ranks, those of this run {node_size(args)}; set ranks_per_node in the file"
        )
    return cluster


def _with_vocabulary(args: Namespace) -> Namespace:
    """Add the padded size of the vocabulary, which Megatron finds when it builds its tokenizer."""
    if args.padded_vocab_size is not None:
        return args
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    args = copy(args)
    build_tokenizer(args)
    return args


# ---- a model


def setting_of(args: Any) -> RunShape:
    """Return the shape of a run. Raises ConfigurationError for a layer without a formula."""
    return RunShape(
        model_of(args), parallel_of(args), batch_of(args), kernels_of(args), recompute_of(args)
    )


def model_of(args: Any) -> Model:
    layers = _layers(args)
    mtp = _predictions(args, layers, args.mtp_num_layers or 0)
    has_positions = args.position_embedding_type == "learned_absolute"
    return Model(
        hidden=args.hidden_size,
        vocabulary=args.padded_vocab_size,
        layers=layers,
        mtp=mtp,
        is_tied=not args.untie_embeddings_and_output_weights,
        has_bias=args.add_bias_linear,
        norm_numel=1 if args.normalization == "RMSNorm" else 2,
        num_positions=args.max_position_embeddings if has_positions else 0,
        itemsize=2 if args.bf16 or args.fp16 else 4,
        adapters=_adapters(args, layers + mtp),
    )


def _adapters(args: Any, layers: Sequence[Layer]) -> Adapters | None:
    """Return the adapters that a model's script adds later, or refuse layers of other kinds."""
    if args.asynchzp_adapter_rank is None:
        return None
    if args.mtp_num_layers or not all(
        isinstance(layer.mixer, Attention) and isinstance(layer.mlp, Mlp) for layer in layers
    ):
        raise ConfigurationError(
            "--asynchzp-adapter-rank: the planner counts adapters of layers with attention and a "
            "dense MLP alone; leave the flag out to plan as if all were trained"
        )
    return Adapters(args.asynchzp_adapter_rank, frozenset(args.asynchzp_adapter_layers))


def refuse_other_adapters(args: Any, run: RunSettings, stage: int, trained_numel: int) -> None:
    """Refuse a rank that trains other parameters than --asynchzp-adapter-rank stands for."""
    if run.config.adapter_rank is None:
        return
    units = costing_of(args, run=run).units[stage]
    planned = sum(unit.numel for unit in units if unit.is_trained)
    if planned != trained_numel:
        raise ConfigurationError(
            f"--asynchzp-adapter-rank {args.asynchzp_adapter_rank} stands for {planned:,} trained "
            f"parameters on a rank of stage {stage}, the model has {trained_numel:,}: give its "
            "own rank and --asynchzp-adapter-layers, or leave the flags out"
        )


def _layers(args: Any) -> tuple[Layer, ...]:
    if args.hybrid_layer_pattern is not None:
        return _hybrid_layers(args, args.hybrid_layer_pattern.split("/")[0])
    mixer = _latent(args) if args.multi_latent_attention else _attention(args)
    pattern = args.moe_layer_freq if args.num_experts else [0] * args.num_layers
    if isinstance(pattern, int):
        pattern = [index % pattern == 0 for index in range(args.num_layers)]
    return tuple(Layer(mixer, _experts(args) if one else _mlp(args)) for one in pattern)


def _hybrid_layers(args: Any, pattern: str) -> tuple[Layer, ...]:
    """Return a layer for each character, as in --hybrid-layer-pattern; "|" parts stages."""
    made = {
        "M": lambda: Layer(_mamba(args), None),
        "*": lambda: Layer(_attention(args), None),
        "+": lambda: Layer(_latent(args), None),
        "-": lambda: Layer(None, _mlp(args)),
        "E": lambda: Layer(None, _experts(args)),
    }
    letters = pattern.replace("|", "")
    if unknown := set(letters) - made.keys():
        raise ConfigurationError(
            f"--hybrid-layer-pattern {pattern}: no formula for layers {''.join(sorted(unknown))}; "
            f"the dry run knows {' '.join(made)}"
        )
    return tuple(made[letter]() for letter in letters)


def _predictions(args: Any, layers: tuple[Layer, ...], number: int) -> tuple[Layer, ...]:
    """Return the layers of multi-token prediction: a GPT's last, or those a hybrid model names."""
    if not number:
        return ()
    if args.hybrid_layer_pattern is None:
        return (layers[-1],) * number
    own = args.hybrid_layer_pattern.split("/")[1]
    return _hybrid_layers(args, own) * number


def _attention(args: Any) -> Attention:
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return Attention(
        args.num_attention_heads,
        groups,
        args.kv_channels,
        has_qk_norm=args.qk_layernorm,
        has_qkv_bias=args.add_qkv_bias,
    )


def _latent(args: Any) -> LatentAttention:
    return LatentAttention(
        args.num_attention_heads,
        args.q_lora_rank or 0,
        args.kv_lora_rank,
        args.qk_head_dim,
        args.qk_pos_emb_head_dim,
        args.v_head_dim,
        has_qk_norm=args.qk_layernorm,
    )


def _mamba(args: Any) -> Mamba:
    heads = args.mamba_num_heads or _MAMBA_HEADS_OF * args.hidden_size // args.mamba_head_dim
    return Mamba(heads, args.mamba_head_dim, args.mamba_num_groups, args.mamba_state_dim)


def _mlp(args: Any) -> Mlp:
    return Mlp(args.ffn_hidden_size, bool(args.swiglu))


def _experts(args: Any) -> Experts:
    return Experts(
        args.num_experts,
        args.moe_router_topk,
        args.moe_ffn_hidden_size or args.ffn_hidden_size,
        bool(args.swiglu),
        shared_ffn=args.moe_shared_expert_intermediate_size or 0,
        has_shared_gate=getattr(args, "moe_shared_expert_gate", False),
        has_router_bias=args.add_bias_linear,
    )


def parallel_of(args: Any) -> Parallel:
    return Parallel(
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        cp=args.context_parallel_size,
        ep=args.expert_model_parallel_size,
        expert_tp=args.expert_tensor_parallel_size,
        virtual=args.virtual_pipeline_model_parallel_size or 1,
        sequence_parallel=args.sequence_parallel,
        stage_layers=_stage_layers(args),
    )


def _stage_layers(args: Any) -> tuple[int, ...] | None:
    """Return the layers of each model chunk, None for equal shares."""
    stages = args.pipeline_model_parallel_size
    parts = stages * (args.virtual_pipeline_model_parallel_size or 1)
    if args.hybrid_layer_pattern and "|" in args.hybrid_layer_pattern:
        return tuple(map(len, args.hybrid_layer_pattern.split("/")[0].split("|")))
    if args.pipeline_model_parallel_layout is not None:
        return _laid_out(args.pipeline_model_parallel_layout)
    first, last = (getattr(args, f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    edges = (
        bool(args.account_for_embedding_in_pipeline_split),
        bool(args.account_for_loss_in_pipeline_split),
    )
    if not (first or last or any(edges)):
        return None
    if any(edges):
        each = (args.num_layers + sum(edges)) // parts
        counts = [each] * parts
        counts[0] -= edges[0]
        counts[-1] -= edges[1]
        return tuple(counts)
    chunks = parts // stages
    given = {0: first, stages - 1: last}
    left = args.num_layers - sum(number or 0 for number in given.values())
    others = stages - sum(number is not None for number in given.values())
    each = left // others if others else 0
    of_stage = [(each if given.get(i) is None else given[i]) // chunks for i in range(stages)]
    return tuple(of_stage * chunks)


def _laid_out(layout: str) -> tuple[int, ...]:
    """Return the decoder layers of each chunk; refuse multi-token prediction before the last."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    chunks = PipelineParallelLayerLayout.parse_str_to_list(layout)
    if any(LayerType.mtp in chunk for chunk in chunks[:-1]):
        raise ConfigurationError(
            f"--pipeline-model-parallel-layout {layout}: the planner knows multi-token prediction "
            "on the last stage only; move m there"
        )
    return tuple(chunk.count(LayerType.decoder) for chunk in chunks)


def batch_of(args: Any) -> Batch:
    replicas = args.data_parallel_size * args.micro_batch_size
    number = max(1, (args.global_batch_size or replicas) // replicas)
    if args.hybrid_context_parallel:  # as if sub-samples filled what a rank takes at most
        longest = args.max_seqlen_per_dp_cp_rank * args.context_parallel_size
        number = -(-number * args.micro_batch_size * args.seq_length // longest)
        return Batch(1, longest, number)
    return Batch(args.micro_batch_size, args.seq_length, number)


def kernels_of(args: Any) -> Kernels:
    """Return the kernels: local layers keep what torch keeps, those of TE are fused."""
    is_fused = args.transformer_impl != "local"
    backend = getattr(args.attention_backend, "name", args.attention_backend)
    core = "flash" if is_fused and backend != "unfused" else "scores"
    if not is_fused and getattr(args, "use_pasa_attention", False):
        core = "pasa" if args.distributed_backend == "gloo" else "flash"
    return Kernels(
        core,
        is_fused,
        dropout=args.hidden_dropout > 0,
        attention_dropout=args.attention_dropout > 0,
        has_rope=args.position_embedding_type in ("rope", "yarn", "mrope"),
        is_softmax_fp32=args.attention_softmax_in_fp32,
        keeps_quantised=_kept_quantised(args),
        copies_nbytes=FP4_COPIES_NBYTES if args.fp4 else FP8_COPIES_NBYTES * bool(args.fp8),
    )


def _kept_quantised(args: Any) -> Literal["none", "experts", "all"]:
    if args.fp8 and args.fp8_recipe == "delayed":
        return "all"
    is_quantised = args.fp8 or args.fp4
    return "experts" if is_quantised and args.num_experts and args.moe_grouped_gemm else "none"


def recompute_of(args: Any) -> Recompute:
    if args.recompute_granularity is None:
        return Recompute()
    return Recompute(
        args.recompute_granularity,
        args.recompute_method or "uniform",
        args.recompute_num_layers or 1,
        frozenset(args.recompute_modules or ("core_attn",)),
    )
