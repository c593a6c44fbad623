# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The three functions of a Mamba-2 layer that Megatron takes from CUDA packages, in plain torch.

They are the gated scan behind a short convolution, and the group norm, of mamba_ssm and
causal_conv1d. They compute the recurrence of "Transformers are SSMs" (arXiv 2405.21060, equation 1
and section 6) in fp32, with autograd's backward. Nothing here knows Megatron.
"""

from typing import Any

import torch
import torch.nn.functional as F


def scan(
    x: torch.Tensor,  # (batch, length, heads, width)
    dt: torch.Tensor,  # (batch, length, heads), positive
    A: torch.Tensor,  # (heads), negative
    B: torch.Tensor,  # (batch, length, heads, state)
    C: torch.Tensor,  # (batch, length, heads, state)
    chunk: int,
) -> torch.Tensor:
    """Compute h_t = exp(dt_t A) h_(t-1) + dt_t B_t x_t, y_t = C_t h_t, from h_0 = 0.

    `chunk` steps form one masked product (section 6); it bounds memory and changes rounding only.
    Returns y with the shape of x.
    """
    batch, length, heads, width = x.shape
    state = x.new_zeros(batch, heads, width, B.shape[-1])
    outputs = []
    for start in range(0, length, chunk):
        piece = slice(start, start + chunk)
        fed, b, c = x[:, piece] * dt[:, piece, :, None], B[:, piece], C[:, piece]
        decay = (dt[:, piece] * A).cumsum(1)  # log of h_0's remaining factor after each step
        between = decay[:, :, None] - decay[:, None]  # (batch, to, from, heads)
        is_later = torch.ones(between.shape[1:3], dtype=torch.bool, device=x.device).tril()
        weights = between.masked_fill(~is_later[:, :, None], -torch.inf).exp()
        weights = weights * torch.einsum("bthn,bshn->btsh", c, b)
        inside = torch.einsum("btsh,bshp->bthp", weights, fed)
        carried = torch.einsum("bthn,bhpn->bthp", c, state) * decay.exp()[..., None]
        outputs.append(inside + carried)
        left = (decay[:, -1:] - decay).exp()  # of each step's input at the end of the chunk
        added = torch.einsum("bshp,bshn,bsh->bhpn", fed, b, left)
        state = state * decay[:, -1].exp()[..., None, None] + added
    return torch.cat(outputs, dim=1)


def split_convolve_scan(
    packed: torch.Tensor,  # (batch, length, gate + x + B + C + dt), of the first projection
    conv_weight: torch.Tensor,  # (channels of x, B and C, taps)
    conv_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,  # (heads), or (heads, headdim) with headdim None
    chunk_size: int,
    *,
    activation: str,
    headdim: int | None,
    ngroups: int,
    norm_before_gate: bool = False,
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `mamba_split_conv1d_scan_combined` for a layer whose norm follows the gate.

    Returns (batch, length, heads * headdim) in the dtype of `packed`. Raises NotImplementedError
    for packed sequences and other activations than SiLU.
    """
    if seq_idx is not None or activation != "silu" or norm_before_gate:
        raise NotImplementedError(
            "Mamba on the CPU platform: whole sequences, SiLU, gate then norm"
        )
    heads = D.shape[0]
    inner = heads * (headdim or D.shape[1])
    rest = packed.shape[-1] - 2 * inner - heads
    gate, mixed, dt = packed.float().split([inner, inner + rest, heads], dim=-1)
    length, taps = mixed.shape[1], conv_weight.float().unbind(-1)
    mixed = F.pad(mixed, (0, 0, len(taps) - 1, 0))  # causal
    mixed = conv_bias.float() + sum(mixed[:, i : i + length] * tap for i, tap in enumerate(taps))
    x, B, C = F.silu(mixed).split([inner, rest // 2, rest // 2], dim=-1)
    x = x.unflatten(-1, (heads, -1))
    B, C = (
        part.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, dim=2)
        for part in (B, C)
    )
    y = scan(x, F.softplus(dt + dt_bias), A.float(), B, C, chunk_size)
    y = y + x * D.float().view(heads, -1)
    return (y.flatten(2) * F.silu(gate)).to(packed.dtype)


class GroupNorm(torch.nn.Module):
    """The RMS norm of each group of the last dimension, as mamba_ssm's RMSNorm without a gate."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, group_size: int | None = None, **options: Any
    ):
        super().__init__()
        options.pop("norm_before_gate", None)
        self.eps = eps
        self.group_size = group_size or hidden_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, **options))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.float().unflatten(-1, (-1, self.group_size))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return (normed.flatten(-2) * self.weight.float()).to(x.dtype)
