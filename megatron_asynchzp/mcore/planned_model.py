# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Fills the planner's plain numbers from Megatron's parsed and validated arguments."""

from argparse import Namespace

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.planner.activations import Kernels, Recompute, Setting
from megatron_asynchzp.planner.model import (
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

_MAMBA_HEADS_OF = 2  # Megatron's expansion: heads x head_dim are twice the hidden size


def setting_of(args: Namespace) -> Setting:
    """Model, parallel sizes, batch, kernels and recomputation of one command line. Raises
    ConfigurationError, one line, for a layer of which the planner has no formula."""
    return Setting(
        model_of(args), parallel_of(args), batch_of(args), kernels_of(args), recompute_of(args)
    )


def model_of(args: Namespace) -> Model:
    """args: after Megatron's validation, with padded_vocab_size."""
    layers = _layers(args)
    number = args.mtp_num_layers or 0
    return Model(
        hidden=args.hidden_size,
        vocabulary=args.padded_vocab_size,
        layers=layers,
        mtp=_predictions(args, layers, number),
        is_tied=not args.untie_embeddings_and_output_weights,
        has_bias=args.add_bias_linear,
        norm_numel=1 if args.normalization == "RMSNorm" else 2,
        num_positions=(
            args.max_position_embeddings
            if args.position_embedding_type == "learned_absolute"
            else 0
        ),
        itemsize=2 if args.bf16 or args.fp16 else 4,
    )


def _layers(args: Namespace) -> tuple[Layer, ...]:
    if args.hybrid_layer_pattern is not None:
        return _hybrid_layers(args, args.hybrid_layer_pattern.split("/")[0])
    mixer = _latent(args) if args.multi_latent_attention else _attention(args)
    pattern = [0] * args.num_layers
    if args.num_experts:
        frequency = args.moe_layer_freq
        pattern = frequency
        if isinstance(frequency, int):
            pattern = [index % frequency == 0 for index in range(args.num_layers)]
    return tuple(Layer(mixer, _experts(args) if one else _mlp(args)) for one in pattern)


def _hybrid_layers(args: Namespace, pattern: str) -> tuple[Layer, ...]:
    """One character a layer, as in --hybrid-layer-pattern; "|" parts pipeline stages."""
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


def _predictions(args: Namespace, layers: tuple[Layer, ...], number: int) -> tuple[Layer, ...]:
    """Multi-token prediction repeats the last layer of a GPT; a hybrid model names its own."""
    if not number:
        return ()
    if args.hybrid_layer_pattern is None:
        return (layers[-1],) * number
    own = args.hybrid_layer_pattern.split("/")[1]
    return _hybrid_layers(args, own) * number


def _attention(args: Namespace) -> Attention:
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return Attention(
        args.num_attention_heads,
        groups,
        args.kv_channels,
        has_qk_norm=args.qk_layernorm,
        has_qkv_bias=args.add_qkv_bias,
    )


def _latent(args: Namespace) -> LatentAttention:
    return LatentAttention(
        args.num_attention_heads,
        args.q_lora_rank or 0,
        args.kv_lora_rank,
        args.qk_head_dim,
        args.qk_pos_emb_head_dim,
        args.v_head_dim,
        has_qk_norm=args.qk_layernorm,
    )


def _mamba(args: Namespace) -> Mamba:
    heads = args.mamba_num_heads or _MAMBA_HEADS_OF * args.hidden_size // args.mamba_head_dim
    return Mamba(heads, args.mamba_head_dim, args.mamba_num_groups, args.mamba_state_dim)


def _mlp(args: Namespace) -> Mlp:
    return Mlp(args.ffn_hidden_size, bool(args.swiglu))


def _experts(args: Namespace) -> Experts:
    return Experts(
        args.num_experts,
        args.moe_router_topk,
        args.moe_ffn_hidden_size or args.ffn_hidden_size,
        bool(args.swiglu),
        shared_ffn=args.moe_shared_expert_intermediate_size or 0,
        has_shared_gate=getattr(args, "moe_shared_expert_gate", False),
        has_router_bias=args.add_bias_linear,
        per_unit=getattr(args, "asynchzp_experts_per_unit", None) or 0,
    )


def parallel_of(args: Namespace) -> Parallel:
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


def _stage_layers(args: Namespace) -> tuple[int, ...] | None:
    """Layers of each model chunk, where they are not equal shares."""
    stages = args.pipeline_model_parallel_size
    parts = stages * (args.virtual_pipeline_model_parallel_size or 1)
    if args.hybrid_layer_pattern and "|" in args.hybrid_layer_pattern:
        return tuple(map(len, args.hybrid_layer_pattern.split("/")[0].split("|")))
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


def batch_of(args: Namespace) -> Batch:
    replicas = args.data_parallel_size * args.micro_batch_size
    number = max(1, (args.global_batch_size or replicas) // replicas)
    return Batch(args.micro_batch_size, args.seq_length, number)


def kernels_of(args: Namespace) -> Kernels:
    """Local layers keep what torch keeps; those of Transformer Engine are fused."""
    is_fused = args.transformer_impl != "local"
    core = "flash"
    if not is_fused:
        core = "scores"
        if getattr(args, "use_pasa_attention", False):
            core = "pasa" if args.distributed_backend == "gloo" else "flash"
    return Kernels(
        core,
        is_fused,
        dropout=args.hidden_dropout > 0,
        attention_dropout=args.attention_dropout > 0,
        has_rope=args.position_embedding_type in ("rope", "yarn", "mrope"),
        is_softmax_fp32=args.attention_softmax_in_fp32,
    )


def recompute_of(args: Namespace) -> Recompute:
    if args.recompute_granularity is None:
        return Recompute()
    return Recompute(
        args.recompute_granularity,
        args.recompute_method or "uniform",
        args.recompute_num_layers or 1,
        frozenset(args.recompute_modules or ("core_attn",)),
    )
