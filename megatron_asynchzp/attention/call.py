# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the input of an attention, the same for every way to compute it."""

from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_asynchzp.attention.heads import check_shapes
from megatron_asynchzp.attention.mask import AttentionMask


@dataclass(frozen=True)
class AttentionCall:
    """softmax(scale q k^T) v under `mask`. q [B, H, S, D], k [B, G, T, D], v [B, G, T, E]."""

    q_BHSD: torch.Tensor
    k_BGTD: torch.Tensor
    v_BGTE: torch.Tensor
    mask: AttentionMask
    scale: float
    dropout: float = 0.0  # probability with which a weight is dropped

    def __post_init__(self):
        check_shapes(self.q_BHSD, self.k_BGTD, self.v_BGTE)
        lengths = (self.q_BHSD.shape[2], self.k_BGTD.shape[2])
        if lengths != (self.mask.num_queries, self.mask.num_keys):
            raise ValueError(
                f"{lengths[0]} queries and {lengths[1]} keys under a mask for "
                f"{self.mask.num_queries} and {self.mask.num_keys}"
            )

    @property
    def device(self) -> torch.device:
        return self.q_BHSD.device

    @property
    def used_BT(self) -> torch.Tensor | None:
        """Keys that some query attends, None for all."""
        return self.mask.used_keys_BT(self.device) if self.mask.has_unused_keys else None


class Vendor(Protocol):
    """A vendor's attention, which gets shifted keys."""

    name: str

    def reason_against(self, call: AttentionCall) -> str | None:
        """Return why it cannot compute `call`; None if it can."""
        ...

    def run(self, call: AttentionCall) -> torch.Tensor:
        """Return the differentiable output, [B, H, S, E]; zero if a query attends nothing."""
        ...
