# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The layers of a hybrid model without Transformer Engine, which Megatron's own spec needs.

    pretrain_hybrid.py --spec megatron_asynchzp.cpu_platform.local_hybrid local_hybrid_stack_spec

It has Mamba (M), attention (*), MLP (-) and expert (E) layers, and multi-token prediction. The
platform gives Mamba layers their kernels (state_space.py).
"""

from dataclasses import replace
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer


class LocalHybridStack(HybridStack):
    """Megatron's stack, which builds its last norm from Transformer Engine, with a local norm."""

    def __init__(self, config: TransformerConfig, submodules: HybridStackSubmodules, **rest: Any):
        super().__init__(config, submodules, post_layer_norm=False, **rest)
        self.post_layer_norm = True
        if self.post_process:
            norm: Any = LocalSpecProvider().layer_norm(rms_norm=config.normalization == "RMSNorm")
            self.final_norm = norm(config, config.hidden_size, eps=config.layernorm_epsilon)


def _local_hybrid_stack_spec() -> ModuleSpec:
    # A GPT layer is an attention half and an MLP half; a hybrid layer is one of the two.
    whole = get_gpt_layer_local_submodules()
    attention = replace(whole, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)
    mlp = replace(
        whole, input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp
    )
    # Any number of experts gives the same spec.
    experts = replace(mlp, mlp=get_moe_module_spec(use_te=False, num_experts=8))
    mixer = ModuleSpec(
        module=MambaMixer,
        submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
    )
    mamba = MambaLayerSubmodules(
        norm=whole.input_layernorm,
        mixer=mixer,
        mamba_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]
    )
    return ModuleSpec(
        module=LocalHybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
            moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=experts),
            mtp_block_spec=_prediction_spec(whole.input_layernorm),
        ),
    )


def _prediction_spec(norm: Any) -> ModuleSpec:
    layer = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, eh_proj=ColumnParallelLinear, layer_norm=norm
    )
    spec = ModuleSpec(module=MultiTokenPredictionLayer, submodules=layer)
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[spec]),
    )


local_hybrid_stack_spec = _local_hybrid_stack_spec()
