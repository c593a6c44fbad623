# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the input of an attention, the same for every way to compute it, and names its shapes.

B batch, H query heads, G key heads, R = H / G, S queries, T keys, D channels of q and k, E of v,
J blocks of keys. Query heads may be further rows of their shared key head's matrix.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from megatron_asynchzp.attention.mask import AttentionMask


class AttentionOutput(NamedTuple):
    """Output and log-sum-exp of an attention."""

    output_BHSE: torch.Tensor  # in the dtype of q
    lse_BHS: torch.Tensor  # of all scaled scores, fp32 or better; -inf if nothing is attended


class AttentionGradients(NamedTuple):
    """Gradients of q, k and v, each in its shape and dtype."""

    dq_BHSD: torch.Tensor
    dk_BGTD: torch.Tensor
    dv_BGTE: torch.Tensor


def check_shapes(q_BHSD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTE: torch.Tensor) -> None:
    shapes = [tuple(x.shape) for x in (q_BHSD, k_BGTD, v_BGTE)]
    if any(len(shape) != 4 for shape in shapes):
        raise ValueError(f"q, k, v must be [batch, heads, length, channels], not {shapes}")
    (batch, heads, _, dim), (batch_k, groups, keys, dim_k), (batch_v, groups_v, keys_v, _) = shapes
    if not batch == batch_k == batch_v or dim != dim_k or (groups, keys) != (groups_v, keys_v):
        raise ValueError(f"q, k, v do not fit together: {shapes}")
    if heads % groups:
        raise ValueError(f"{heads} query heads are not a multiple of {groups} key heads")


def fold_heads(x_BHS: torch.Tensor, num_groups: int) -> torch.Tensor:
    """[B, H, S, ...] -> [B, G, R S, ...]: the query heads of a key head, one below the other."""
    return x_BHS.reshape(x_BHS.shape[0], num_groups, -1, *x_BHS.shape[3:])


def unfold_heads(x_BGN: torch.Tensor, num_heads: int) -> torch.Tensor:
    return x_BGN.reshape(x_BGN.shape[0], num_heads, -1, *x_BGN.shape[3:])


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
