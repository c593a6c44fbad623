# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the model of a command line.

From megatron-core 0.19 on `pretrain` builds a model from a configuration; 0.18 has configurations
of hybrid models alone, and asks for a function.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.training import argument_utils, get_args
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    pretrain_cfg_container_from_args,
)


def model_for_pretrain(args: Namespace, *hooks: Callable[[list], list]) -> dict[str, Any]:
    """Those arguments of `pretrain` that say which model it builds.

    args: Megatron's, validated.
    hooks: called with the chunks of the model before they are wrapped; return them.
    """
    kind = "gpt" if args.hybrid_layer_pattern is None else "hybrid"
    config_from_args = getattr(argument_utils, f"{kind}_config_from_args", None)
    if config_from_args is None:
        container = pretrain_cfg_container_from_args(args)
        return {"cfg_container": container, "model_provider": partial(provide_gpt, hooks)}
    model = config_from_args(args)
    if not hasattr(argument_utils, "gpt_config_from_args"):
        container = pretrain_cfg_container_from_args(args, model)
        return {"cfg_container": container, "model_provider": partial(provide_hybrid, model, hooks)}
    model.pre_wrap_hooks += hooks
    return {"cfg_container": pretrain_cfg_container_from_args(args, model), "model_provider": None}


def provide_hybrid(
    model: Any,
    hooks: Sequence[Callable[[list], list]],
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """One pipeline stage of a model with this configuration."""
    builder = model.get_builder_cls()(model)
    built = builder.build_model(pg_collection, pre_process, post_process, vp_stage)
    for hook in hooks:
        hook([built])
    return built


def provide_gpt(
    hooks: Sequence[Callable[[list], list]] = (),
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """One pipeline stage (pre_process: with the embedding; post_process: with the output layer)."""
    args: Any = get_args()
    config = config or core_transformer_config_from_args(args)
    use_te = args.transformer_impl == "transformer_engine"
    layers = get_gpt_decoder_block_spec(
        config, use_te, args.normalization, args.qk_l2_norm, vp_stage=vp_stage
    )
    more_tokens = None
    if args.mtp_num_layers:
        more_tokens = get_gpt_mtp_block_spec(config, layers, use_te, vp_stage=vp_stage)
    model = GPTModel(
        config,
        layers,  # pyright: ignore[reportArgumentType]
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        mtp_block_spec=more_tokens,  # pyright: ignore[reportArgumentType]
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )
    for hook in hooks:
        hook([model])
    return model
