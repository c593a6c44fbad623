# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Norms of Megatron's local layers with sequence parallelism and zero-centred weights.

Megatron has both in Transformer Engine and apex only, and refuses them for torch's norms.
"""

from typing import Any

import torch

_KINDS = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


class _ZeroCentred(torch.nn.Module):
    """A norm of torch whose parameter is the weight minus one."""

    def __init__(self, kind: str, hidden_size: int, eps: float):
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
        has_bias = kind == "LayerNorm"
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size)) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape, weight = self.weight.shape, 1.0 + self.weight
        if self.kind == "RMSNorm":
            return torch.nn.functional.rms_norm(x, shape, weight, self.eps)
        return torch.nn.functional.layer_norm(x, shape, weight, self.bias, self.eps)


def torch_norm(
    cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any
) -> torch.nn.Module:
    """Return torch's norm of `config.normalization`, for WrappedTorchNorm.__new__.

    With sequence parallelism the parameters are marked, so Megatron sums their gradients over
    tensor-parallel ranks. Raises ValueError for a normalization that torch lacks.
    """
    if config.normalization not in _KINDS:
        raise ValueError(f"{config.normalization} is not available on the CPU platform")
    if config.layernorm_zero_centered_gamma:
        norm = _ZeroCentred(config.normalization, hidden_size, eps)
    else:
        norm = _KINDS[config.normalization](hidden_size, eps=eps)
    for param in norm.parameters():
        param.sequence_parallel = config.sequence_parallel  # pyright: ignore
    return norm
