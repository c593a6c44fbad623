# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A hybrid model's layers without Transformer Engine, which Megatron's own spec needs:

    pretrain_hybrid.py --spec megatron_asynchzp.cpu_platform.local_hybrid local_hybrid_stack_spec

Attention (*) and MLP (-) layers only: Mamba layers need CUDA kernels.
"""

from dataclasses import replace
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer


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
    return ModuleSpec(
        module=LocalHybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        ),
    )


local_hybrid_stack_spec = _local_hybrid_stack_spec()
