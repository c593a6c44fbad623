# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters in a Megatron model as Megatron Bridge and NeMo have them.

A wrapper has `to_wrap` and `adapter`, whose `linear_in` and `linear_out` are Megatron's parallel
layers, and a base that is frozen by name.

A checkpoint has the base under its own keys, without `to_wrap`, and with each
`<linear>.adapter.linear_in.weight` and `<linear>.adapter.linear_out.weight`, as theirs do.
"""

from copy import copy
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import nn

from scripts.testbed.tiny_gpt import seed_parameters

RANK, ALPHA = 4, 8.0
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class Adapter(nn.Module):
    """x -> alpha / rank * linear_out(linear_in(x)), split over tensor-parallel ranks as `base`."""

    def __init__(self, base: Any, rank: int, alpha: float, gates: bool):
        super().__init__()
        if base.is_expert and base.config.expert_tensor_parallel_size > 1:
            raise NotImplementedError("Megatron adds up the parts of split experts only afterwards")
        self._scale, self._gates = alpha / rank, gates
        self._is_gathered = base.config.sequence_parallel and not base.is_expert
        config = copy(base.config)  # the adapter's own layers see whole sequences
        config.sequence_parallel = False
        common: dict[str, Any] = {
            "config": config,
            "init_method": nn.init.xavier_normal_,
            "bias": False,
            "is_expert": base.is_expert,
        }
        reads_parts = self._reads_parts = isinstance(base, RowParallelLinear)
        self.linear_in: Any
        if reads_parts:
            self.linear_in = RowParallelLinear(
                base.input_size, rank, input_is_parallel=True, skip_bias_add=True, **common
            )
        else:
            self.linear_in = ColumnParallelLinear(
                base.input_size, rank, gather_output=True, **common
            )
        self.linear_out: Any = ColumnParallelLinear(
            rank,
            base.output_size,
            gather_output=reads_parts,
            stride=2 if gates else 1,  # what a rank has of both halves, as the base
            **common,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_gathered and not self._reads_parts:
            x = gather_from_sequence_parallel_region(x)
        output = self._scale * self.linear_out(self.linear_in(x)[0])[0]
        if self._is_gathered and self._reads_parts:
            output = scatter_to_sequence_parallel_region(output)
        return output

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ):
        state = self.linear_in.sharded_state_dict(f"{prefix}linear_in.", sharded_offsets, metadata)
        out = self.linear_out.sharded_state_dict(f"{prefix}linear_out.", sharded_offsets, metadata)
        weight = f"{prefix}linear_out.weight"
        if self._gates:  # its two halves are split over the ranks each by itself
            out[weight] = apply_swiglu_sharded_factory(out[weight], sharded_offsets)
        return state | out


class AdaptedLinear(nn.Module):
    """`to_wrap`, a parallel layer of Megatron, and what its `adapter` adds."""

    def __init__(self, to_wrap: Any, adapter: Adapter):
        super().__init__()
        self.to_wrap, self.adapter = to_wrap, adapter

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = self.to_wrap(x)
        return output + self.adapter(x), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ):
        base = self.to_wrap.sharded_state_dict(prefix, sharded_offsets, metadata)
        return base | self.adapter.sharded_state_dict(
            f"{prefix}adapter.", sharded_offsets, metadata
        )


def add_adapters(
    chunks: list[Any], rank: int = RANK, targets: tuple[str, ...] = TARGETS
) -> list[Any]:
    """Wrap each layer of these names, and freeze every parameter that is not an adapter's."""
    for chunk in chunks:
        for module in list(chunk.modules()):
            for name, base in list(module.named_children()):
                if name in targets and isinstance(base, (ColumnParallelLinear, RowParallelLinear)):
                    config: Any = base.config
                    gates = name == "linear_fc1" and config.gated_linear_unit
                    setattr(module, name, AdaptedLinear(base, Adapter(base, rank, ALPHA, gates)))
        for name, param in chunk.named_parameters():
            param.requires_grad_(".adapter." in name)
        if hasattr(chunk, "embedding") and chunk.config.recompute_granularity == "full":
            # Megatron recomputes a layer in backward only where its input has a gradient.
            chunk.embedding.register_forward_hook(lambda _, args, out: out.requires_grad_())
    return chunks


def adapted_and_seeded(chunks: list[Any]) -> list[Any]:
    """Add adapters, and draw each matrix from its name."""
    return seed_parameters(add_adapters(chunks))
