# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Makes operators of torch_npu of aten's operations in fp32, for the emulated NPU.

They are npu_fusion_attention with its gradients, strict about what the operator's documentation
asks for, and the calls of torch_npu's own autograd. Nothing here waits for the device: a value that
the documentation forbids gives NaN.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_COMPRESSED = 2048  # side of the triangle that stands for a mask of modes 2 to 4
_EMPTY = 1e4  # of a row that attends nothing, where no zeros are asked for: of no meaning


class _Call(NamedTuple):
    """One call of the operator; q_ends and k_ends: of the sequences in layout TND."""

    layout: str
    scale: float
    atten_mask: torch.Tensor | None
    mode: int
    pre: int
    next: int
    q_ends: list[int] | None
    k_ends: list[int] | None

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> None:
        _demand(q.dtype == k.dtype == v.dtype and q.dtype in _DTYPES, "fp16, bf16 and fp32")
        _demand(self.layout in ("BNSD", "TND"), f"layout {self.layout} is not emulated")
        _demand(q.shape[1] == heads <= 256 and heads % k.shape[1] == 0, "1 to 256 heads, in groups")
        _demand(q.shape[-1] == k.shape[-1] >= v.shape[-1], "as many channels in q and k")
        _demand(k.shape[-1] <= 768 and k.shape[:-1] == v.shape[:-1], "at most 768 channels")
        _demand(self.mode in range(5), f"sparse_mode {self.mode} is not emulated")
        if self.mode in (2, 3, 4):
            shape = None if self.atten_mask is None else tuple(self.atten_mask.shape)
            _demand(shape == (_COMPRESSED, _COMPRESSED), "modes 2 to 4 take a triangle of 2048")
        if self.q_ends is not None and self.k_ends is not None:
            _demand(len(self.q_ends) == len(self.k_ends) <= 1024, "at most 1024 sequences")
            ends = (self.q_ends[-1], self.k_ends[-1])
            _demand(ends == (q.shape[0], k.shape[0]), "sequences that fill all tokens")

    def pieces(self) -> list[tuple[slice, slice]]:
        """Queries and keys of each sequence; BNSD has one."""
        if self.q_ends is None or self.k_ends is None:
            return [(slice(None), slice(None))]
        q_starts, k_starts = [0, *self.q_ends[:-1]], [0, *self.k_ends[:-1]]
        bounds = zip(q_starts, self.q_ends, k_starts, self.k_ends, strict=True)
        return [(slice(a, b), slice(c, d)) for a, b, c, d in bounds]

    def part(self, x: torch.Tensor, piece: slice) -> torch.Tensor:
        """[B, N, S, D] of a piece."""
        return x if self.layout == "BNSD" else x[piece].transpose(0, 1).unsqueeze(0)

    def put(self, whole: torch.Tensor, piece: slice, part: torch.Tensor) -> None:
        target = whole if self.layout == "BNSD" else whole[piece]
        target.copy_(part if self.layout == "BNSD" else part.squeeze(0).transpose(0, 1))

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """-inf where the mask hides a key."""
        scores = (q.float() @ _spread(k, q).mT) * self.scale
        hidden = self._hidden(q.shape[2], k.shape[2], q.device)
        return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)

    def _hidden(self, num_q: int, num_k: int, device: torch.device) -> torch.Tensor | None:
        mask = self.atten_mask
        if mask is None:
            return None
        i = torch.arange(num_q, device=device)[:, None]
        j = torch.arange(num_k, device=device)[None]
        if self.mode in (0, 1):
            _demand(tuple(mask.shape[-2:]) == (num_q, num_k), "a mask of the scores' shape")
            bounded = (j - i > self.next) | (i - j > self.pre)
            return mask.bool() if self.mode == 1 else mask.bool() | bounded
        shift = 0 if self.mode == 2 else num_k - num_q  # where the diagonal ends
        if self.mode in (2, 3):
            return j - i > shift
        return (j - i - shift > self.next) | (i + shift - j > self.pre)

    def nan_if_not_triangle(self, like: torch.Tensor) -> torch.Tensor | float:
        if self.mode not in (2, 3, 4):
            return 0.0
        ones = torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.bool, device=like.device)
        mask: Any = self.atten_mask
        differs = (mask.bool() != ones.triu(1)).any()
        return torch.where(differs, torch.nan, 0.0)


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"npu_fusion_attention: {what}")


def _spread(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Of each group of heads to each of its heads, in fp32."""
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], 1)


def _gathered(x: torch.Tensor, groups: int) -> torch.Tensor:
    return x.unflatten(1, (groups, -1)).sum(2)


def _forward(query: Any, key: Any, value: Any, head_num: int, input_layout: str, **given: Any):
    _demand(all(given.get(name) is None for name in ("pse", "padding_mask", "prefix", "sink")), "")
    _demand(given.get("keep_prob", 1.0) == 1.0, "dropout is not emulated")
    call = _call(input_layout, given.get("scale", 1.0), given)
    call.check(query, key, value, head_num)
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    stats = (*query.shape[:-1], 8)
    top, total = (torch.empty(stats, dtype=torch.float32, device=query.device) for _ in range(2))
    fault = call.nan_if_not_triangle(query)
    # Rows that attend nothing: zeros where they are asked for; forbidden in TND.
    empty = 0.0 if given.get("inner_precise") == 2 else _EMPTY
    empty = torch.nan if call.layout == "TND" else empty
    for qs, ks in call.pieces():
        q, k, v = call.part(query, qs), call.part(key, ks), call.part(value, ks)
        scores = call.scores(q, k)
        largest = scores.amax(-1, keepdim=True)
        largest = torch.where(largest.isinf(), 0.0, largest)
        weights = (scores - largest).exp()
        sums = weights.sum(-1, keepdim=True)
        result = torch.where(sums == 0, empty, (weights / sums) @ _spread(v, q)) + fault
        call.put(out, qs, result.to(query.dtype))
        call.put(top, qs, largest.expand(*largest.shape[:-1], 8))
        call.put(total, qs, sums.expand(*sums.shape[:-1], 8))
    return out, top, total, query.new_empty(0), 0, 0, 0


def _backward(
    query: Any, key: Any, value: Any, dy: Any, head_num: int, input_layout: str, **given: Any
):
    call = _call(input_layout, given.get("scale_value", 1.0), given)
    dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for qs, ks in call.pieces():
        q, k, v = call.part(query, qs), call.part(key, ks), call.part(value, ks)
        d, out = call.part(dy, qs).float(), call.part(given["attention_in"], qs).float()
        top, sums = (call.part(given[n], qs)[..., :1] for n in ("softmax_max", "softmax_sum"))
        p = torch.where(sums == 0, 0.0, (call.scores(q, k) - top).exp() / sums)
        d_s = p * (d @ _spread(v, q).mT - (d * out).sum(-1, keepdim=True)) * call.scale
        call.put(dq, qs, d_s @ _spread(k, q))
        call.put(dk, ks, _gathered(d_s.mT @ q.float(), k.shape[1]))
        call.put(dv, ks, _gathered(p.mT @ d, k.shape[1]))
    return dq, dk, dv, query.new_empty(0), query.new_empty(0)


def _call(layout: str, scale: float, given: dict[str, Any]) -> _Call:
    most = 2147483647
    ends = (given.get(name) for name in ("actual_seq_qlen", "actual_seq_kvlen"))
    lists = [None if x is None else [int(end) for end in x] for x in ends]
    pre, after = given.get("pre_tockens", most), given.get("next_tockens", most)
    mask, mode = given.get("atten_mask"), given.get("sparse_mode", 0)
    return _Call(layout, scale, mask, mode, pre, after, *lists)


def _forward_v3(*args: Any, **given: Any):
    """Torch's scaled_dot_product_attention on an NPU: its random state is in tensors."""
    *tensors, _seed, _offset, _numels = _forward(*args, **given)
    return (*tensors, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))


def _matmul_backward(grad: Any, self: Any, other: Any, mask: list[bool]):
    """torch_npu's own formula for the gradient of a matmul, for which aten has no CPU kernel."""
    a, b = (
        (self[None] if self.dim() == 1 else self),
        (other[:, None] if other.dim() == 1 else other),
    )
    grad = grad.unsqueeze(-2) if self.dim() == 1 else grad
    grad = grad.unsqueeze(-1) if other.dim() == 1 else grad
    d_a = d_b = self.new_empty(0)
    if mask[0]:
        d_a = (grad @ b.mT).sum_to_size(a.shape).reshape(self.shape)
    if mask[1] and b.dim() == 2:
        d_b = a.flatten(0, -2).mT @ grad.flatten(0, -2)
    elif mask[1]:
        d_b = (a.mT @ grad).sum_to_size(b.shape)
    return d_a, (d_b.reshape(other.shape) if mask[1] else d_b)


_OF_NPU: dict[str, Callable] = {
    "npu_fusion_attention": _forward,
    "npu_fusion_attention_grad": _backward,
    "npu_fusion_attention_v3": _forward_v3,
    "npu_fusion_attention_grad_v3": _backward,
}
_libraries: list[torch.library.Library] = []


def install() -> None:
    """For this process, once."""
    npu, aten = (torch.library.Library(name, "IMPL") for name in ("npu", "aten"))
    _libraries.extend([npu, aten])
    aten.impl("matmul_backward", _matmul_backward, "PrivateUse1")
    npu.impl("_npu_dtype_cast", lambda tensor, dtype: tensor.to(dtype), "PrivateUse1")
    for name, function in _OF_NPU.items():
        npu.impl(name, _by_name(name, function), "PrivateUse1")


def _by_name(name: str, function: Callable) -> Callable:
    """`function`, called with what follows the layout by name, whatever its place is."""
    names = [one.name for one in getattr(torch.ops.npu, name).default._schema.arguments]
    first = names.index("input_layout") + 1
    return lambda *args, **options: function(
        *args[:first], **dict(zip(names[first:], args[first:])), **options
    )
