# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Stands in for `transformer_engine_torch`, in torch operations.

It has the functions of the compiled extension that Transformer Engine's Python needs for linear
layers, norms, activations, attention without a fused kernel, and fused optimizers. Any other
function raises when it is called, with its name. Products are computed in fp32 and rounded once.
Scales stay in their compact order, because only the real products need another.
"""

import enum
import importlib
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from scripts.testbed.te import formats
from scripts.testbed.te.formats import Coded, Grid
from scripts.testbed.te.peak import as_a_kernel

Tensor = torch.Tensor

# ---- names that are there although nothing stands for them


class _Names(type):
    """An enumeration with every name that is asked for, whose numbers are never read."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(cls.__members__))
        return len(cls.__members__) - 1

    @property
    def __members__(cls) -> dict[str, int]:
        return {name: value for name, value in vars(cls).items() if not name.startswith("_")}


class _Extension(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Names(name, (), {}) if name[0].isupper() else _refusal(name)
        setattr(self, name, made)
        return made


def _refusal(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"the stand-in for Transformer Engine has no {name}")

    return call


class DType(enum.IntEnum):
    """Source: common/include/transformer_engine/transformer_engine.h, NVTEDType."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


_TORCH = {
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: formats.E4M3,
    DType.kFloat8E5M2: formats.E5M2,
}


def _torch_dtype(dtype: Any) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else _TORCH[DType(int(dtype))]


# fmt: off
FP8FwdTensors = enum.IntEnum("FP8FwdTensors", [
    f"GEMM{i}_{name}" for i in (1, 2, 3) for name in ("INPUT", "WEIGHT", "OUTPUT")], start=0)
FP8BwdTensors = enum.IntEnum("FP8BwdTensors", [
    f"GRAD_{name}{i}" for i in (1, 2, 3) for name in ("OUTPUT", "INPUT")], start=0)
# fmt: on

# ---- quantisers: each makes the tensors that its class of Transformer Engine keeps


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _pad(scales: Tensor, *multiples: int) -> Tensor:
    """With zeros, up to multiples of rows and columns."""
    rows, columns = (-size % of for size, of in zip(scales.shape, multiples, strict=True))
    return torch.nn.functional.pad(scales, (0, columns, 0, rows))


def _is_delayed(quantizer: Any) -> bool:
    """Version 2.15 gives the others a place for a scale too."""
    return type(quantizer).__name__ == "Float8Quantizer"


def _per_tensor(x: Tensor, quantizer: Any) -> dict[str, Any]:
    """Source: pytorch/csrc/quantizer.cpp, Float8Quantizer and Float8CurrentScalingQuantizer."""
    dtype = _torch_dtype(quantizer.dtype)
    amax = x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
    if _is_delayed(quantizer):  # the scale is there, the magnitude is kept
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.view_as(quantizer.amax)))
        scale = quantizer.scale.view(())
    else:
        if getattr(quantizer, "with_amax_reduction", False):
            dist.all_reduce(amax, dist.ReduceOp.MAX, quantizer.amax_reduction_group)
        scale = formats.scale_of(
            amax, torch.finfo(dtype).max, quantizer.force_pow_2_scales, quantizer.amax_epsilon
        )
    codes = formats.cast(x, scale, dtype)
    made = {"fp8_scale_inv": (1 / scale).view(1), "fp8_dtype": quantizer.dtype}
    made["data"] = codes if quantizer.rowwise_usage else None
    made["data_transpose"] = _flat(codes).t().contiguous() if quantizer.columnwise_usage else None
    return made


_TILE, _MX = 128, 32


def _block_grid(tensor_or_quantizer: Any) -> Grid:
    quantizer = getattr(tensor_or_quantizer, "_quantizer", None) or tensor_or_quantizer
    rows = _TILE if quantizer.block_scaling_dim == 2 else 1
    return Grid(rows, _TILE, "power" if quantizer.force_pow_2_scales else "fp32")


def _tiles(x: Tensor, quantizer: Any) -> dict[str, Any]:
    """128 x 128 or 1 x 128; columnwise is the same of the transposed matrix.

    Source: pytorch/tensor/float8_blockwise_tensor.py, get_scale_shape and get_columnwise_shape.
    """
    grid, dtype = _block_grid(quantizer), _torch_dtype(quantizer.dtype)

    def one(matrix: Tensor) -> tuple[Tensor, Tensor]:
        coded = formats.encode(matrix, grid, dtype, quantizer.amax_epsilon)
        scales = coded.inverse if grid.rows == _TILE else coded.inverse.t()
        return coded.codes, _pad(scales, 1, 4)

    made = {"fp8_dtype": quantizer.dtype, "is_2D_scaled": grid.rows == _TILE}
    rowwise = one(_flat(x)) if quantizer.rowwise_usage else None
    columnwise = one(_flat(x).t()) if quantizer.columnwise_usage else None
    made["rowwise_data"], made["rowwise_scale_inv"] = rowwise or (None, None)
    made["columnwise_data"], made["columnwise_scale_inv"] = columnwise or (None, None)
    if rowwise is not None:
        made["rowwise_data"] = rowwise[0].view(x.shape)
    if columnwise is not None:
        made["columnwise_data"] = columnwise[0].view(x.shape[-1], *x.shape[:-1])
    return made


def _microscaled(x: Tensor, quantizer: Any) -> dict[str, Any]:
    """1 x 32 along rows, 32 x 1 along columns, both in the order of the matrix.

    Source: pytorch/tensor/mxfp8_tensor.py, get_scale_shape.
    """
    dtype = _torch_dtype(quantizer.dtype)
    made = {"fp8_dtype": quantizer.dtype, "with_gemm_swizzled_scales": False}
    ways = (("rowwise", Grid(1, _MX, "e8m0"), 128, 4), ("columnwise", Grid(_MX, 1, "e8m0"), 4, 128))
    for name, grid, *multiples in ways:
        made[f"{name}_data"] = made[f"{name}_scale_inv"] = None
        if getattr(quantizer, f"{name}_usage"):
            coded = formats.encode(_flat(x), grid, dtype)
            made[f"{name}_data"] = coded.codes.view(x.shape)
            made[f"{name}_scale_inv"] = _pad(coded.inverse, *multiples)
    return made


def _halved(x: Tensor, quantizer: Any) -> dict[str, Any]:
    """Quantise to NVFP4: rowwise 1 x 16, columnwise the same of the transposed matrix.

    It is transformed if the quantiser asks for it; weights are in 16 x 16. Source:
    pytorch/custom_recipes/quantization_ref_nvfp4.py, NVFP4QuantizerRef.
    """
    if quantizer.row_scaled_nvfp4 or quantizer.nvfp4_use_4over6:
        _refusal("NVFP4 with scales of rows, or 4 over 6")()
    rows = formats.BLOCK if quantizer.with_2d_quantization else 1
    made = {"fp4_dtype": quantizer.dtype, "with_gemm_swizzled_scales": False}
    for name, matrix in (("rowwise", _flat(x)), ("columnwise", _flat(x).t().contiguous())):
        made[f"{name}_data"] = made[f"{name}_scale_inv"] = made[f"amax_{name}"] = None
        if not getattr(quantizer, f"{name}_usage"):
            continue
        if name == "columnwise" and quantizer.with_rht:
            blocks = matrix.view(matrix.numel() // formats.BLOCK, formats.BLOCK)
            turned = blocks @ quantizer.rht_matrix.to(matrix.dtype)
            matrix = turned.view(matrix.shape)
        amax = matrix.abs().amax().float().view(1) if x.numel() else x.new_zeros(1).float()
        if quantizer.with_amax_reduction:
            dist.all_reduce(amax, dist.ReduceOp.MAX, quantizer.amax_reduction_group)
        uniform = None
        if quantizer.stochastic_rounding:
            uniform = torch.rand(matrix.shape, device=x.device)
        coded = formats.encode_fp4(matrix, amax, rows, uniform)
        leading = x.shape[:-1] if name == "rowwise" else matrix.shape[:1]
        made[f"{name}_data"] = coded.codes.view(*leading, matrix.shape[1] // 2)
        made[f"{name}_scale_inv"] = _pad(coded.inverse.view(torch.uint8), 128, 4)
        made[f"amax_{name}"] = amax
    return made


class _Kind:
    """A format: the names of its quantisers, of its tensor and its storage, and how it is made."""

    def __init__(self, module: str, tensor: str, make: Callable[[Tensor, Any], dict[str, Any]]):
        self.module, self.tensor, self.make = module, tensor, make

    def build(self, x: Tensor, quantizer: Any) -> Any:
        made = self.make(x, quantizer) | {"quantizer": quantizer}
        tensors = f"transformer_engine.pytorch.tensor.{self.module}_tensor"
        if quantizer.internal:
            storages = f"transformer_engine.pytorch.tensor.storage.{self.module}_tensor_storage"
            storage = getattr(importlib.import_module(storages), f"{self.tensor}Storage")
            return storage(fake_dtype=x.dtype, **made)
        tensor = getattr(importlib.import_module(tensors), self.tensor)
        return tensor(shape=x.shape, dtype=x.dtype, requires_grad=False, **made)


_PER_TENSOR = _Kind("float8", "Float8Tensor", _per_tensor)
_KINDS = {
    "Float8Quantizer": _PER_TENSOR,
    "Float8CurrentScalingQuantizer": _PER_TENSOR,
    "Float8BlockQuantizer": _Kind("float8_blockwise", "Float8BlockwiseQTensor", _tiles),
    "MXFP8Quantizer": _Kind("mxfp8", "MXFP8Tensor", _microscaled),
    "NVFP4Quantizer": _Kind("nvfp4", "NVFP4Tensor", _halved),
}


def _kind_of(quantizer: Any) -> _Kind:
    try:
        return _KINDS[type(quantizer).__name__]
    except KeyError:
        return _refusal(type(quantizer).__name__)()


def quantize(x: Tensor, quantizer: Any, out: Any = None, noop: Tensor | None = None) -> Any:
    seen = quantizer.amax.clone() if noop is not None and _is_delayed(quantizer) else None
    made = _kind_of(quantizer).build(x.detach(), quantizer)
    if out is None:
        return made
    for name, value in vars(made).items():
        if isinstance(value, Tensor) and isinstance(old := getattr(out, name, None), Tensor):
            old.copy_(_unless(noop, old, value.view_as(old)))
        elif name == "_transpose_invalid":
            setattr(out, name, value)
    if seen is not None:
        quantizer.amax.copy_(_unless(noop, seen, quantizer.amax))
    return out


def _unless(noop: Tensor | None, old: Tensor, new: Tensor) -> Tensor:
    """`new`, but `old` where the device has been told to leave it: the host does not ask."""
    return new if noop is None else torch.where(noop.bool(), old, new)


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, *_: Any
) -> Any:
    return quantize(torch.zeros(tuple(shape), dtype=dtype, device=device), quantizer)


def split_quantize(x: Tensor, splits: Sequence[int], quantizers: Sequence[Any], **_: Any) -> list:
    return [quantize(part, one) for part, one in zip(x.split(list(splits)), quantizers)]


def bgrad_quantize(grad: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    return _flat(grad).float().sum(0).to(grad.dtype), quantize(grad, quantizer)


def _values(tensor: Any, is_rowwise: bool) -> Tensor:
    """Return the matrix that an operand stands for, in fp32.

    Blocks in one direction are those along the dimension that is summed over: rows if is_rowwise.
    """
    if hasattr(tensor, "_fp4_dtype"):
        return _halved_values(tensor, is_rowwise)
    if isinstance(tensor, Tensor) and not hasattr(tensor, "_fp8_dtype"):
        return _flat(tensor).float()
    dtype = _torch_dtype(tensor._fp8_dtype)  # pyright: ignore[reportAttributeAccessIssue]
    if hasattr(tensor, "_transpose"):
        return _per_tensor_values(tensor, dtype)
    name = "rowwise" if is_rowwise else "columnwise"
    codes, scales = getattr(tensor, f"_{name}_data"), getattr(tensor, f"_{name}_scale_inv")
    if codes is None:
        raise RuntimeError(f"the product needs {name} data, which {type(tensor).__name__} has not")
    if hasattr(tensor, "_is_2D_scaled"):
        codes = codes.reshape(-1, codes.shape[-1]) if is_rowwise else codes.flatten(1)
        grid = _block_grid(tensor)
        inverse = scales if tensor._is_2D_scaled else scales.t()  # pyright: ignore[reportAttributeAccessIssue]
        found = _decoded(codes, inverse, grid, dtype)
        return found if is_rowwise else found.t()
    grid = Grid(1, _MX, "e8m0") if is_rowwise else Grid(_MX, 1, "e8m0")
    return _decoded(_flat(codes), scales, grid, dtype)


def _halved_values(tensor: Any, is_rowwise: bool) -> Tensor:
    """Columnwise those of the transformed matrix, whose transform the other operand undoes."""
    name = "rowwise" if is_rowwise else "columnwise"
    codes, scales = getattr(tensor, f"_{name}_data"), getattr(tensor, f"_{name}_scale_inv")
    if codes is None:
        raise RuntimeError(f"the product needs {name} data, which {type(tensor).__name__} has not")
    codes = codes.reshape(-1, codes.shape[-1]) if is_rowwise else codes.flatten(1)
    inverse = scales[: len(codes), : codes.shape[1] * 2 // formats.BLOCK].view(formats.E4M3)
    found = formats.decode_fp4(Coded(codes, inverse), getattr(tensor, f"_amax_{name}"))
    return found if is_rowwise else found.t()


def _per_tensor_values(tensor: Any, dtype: torch.dtype) -> Tensor:
    if tensor._data is not None:
        return _flat(tensor._data).view(dtype).float() * tensor._scale_inv
    return (tensor._transpose.view(dtype).float() * tensor._scale_inv).t()


def _decoded(codes: Tensor, padded: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    rows, columns = (-(-size // of) for size, of in zip(codes.shape, (grid.rows, grid.columns)))  # pyright: ignore[reportOperatorIssue]
    return formats.decode(Coded(codes, padded[:rows, :columns]), grid, dtype)


def dequantize(tensor: Any, dtype: Any) -> Tensor:
    is_rowwise = getattr(tensor, "_rowwise_data", None) is not None
    return _values(tensor, is_rowwise).to(_torch_dtype(dtype)).view(tensor.size())


def fp8_transpose(codes: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    turned = _flat(codes).t().contiguous()
    return turned if out is None else out.copy_(turned.view_as(out))


def fused_amax_and_scale_update_after_reduction(
    reduced: Tensor,
    histories: Sequence[Tensor],
    scales: Sequence[Tensor],
    algorithm: str,
    dtype: Any,
    margin: float,
) -> None:
    """Source: common/recipe/delayed_scaling.cu, and `_amax_and_scale_update` of its Python."""
    top = torch.finfo(_torch_dtype(dtype)).max * 2.0**-margin
    parts = reduced.split([scale.numel() for scale in scales])
    for newest, history, scale in zip(parts, histories, scales, strict=True):
        history[0].copy_(newest)
        amax = history.amax(0) if algorithm == "max" else newest
        is_seen = torch.isfinite(amax) & (amax > 0)
        scale.copy_(torch.where(is_seen, formats.scale_of(amax, top, is_power=False), scale))
        history.copy_(history.roll(-1, 0))
        history[0].zero_()


# ---- products


@torch.no_grad()  # late weight gradients come outside of backward, and no kernel is recorded
def generic_gemm(
    a: Any,
    transa: bool,
    b: Any,
    transb: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Any, Tensor | None, Tensor | None, Tensor | None]:
    """Columns first, as cuBLAS has it: op(b) op(a). grad: the bias' gradient is b's sum."""
    if gelu or comm_overlap is not None or alpha != 1.0:
        _refusal("GELU, communication or factors within a product")()
    left, right = _values(b, not transb), _values(a, transa)
    found = (left.t() if transb else left) @ (right.t() if transa else right)
    bias_grad = None
    if bias is not None and bias.numel():
        if grad:
            bias_grad = left.sum(0).to(bias.dtype)
        else:
            found = found + bias.float()
    if out is not None:
        out_matrix = out.view(found.shape)
        out_matrix.add_(found) if accumulate else out_matrix.copy_(found)
        return out, bias_grad, gelu_in, None
    found = found.to(_torch_dtype(out_dtype))
    if not transb:
        found = found.view(*b.size()[:-1], found.shape[-1])
    if quantizer is not None:
        found = quantize(found, quantizer)
    return found, bias_grad, gelu_in, None


@torch.no_grad()
def te_general_grouped_gemm(
    a: Sequence[Any],
    transa: bool,
    b: Sequence[Any],
    transb: bool,
    out: Sequence[Tensor],
    out_dtype: Any,
    splits: Sequence[int] | None,
    bias: Sequence[Tensor],
    bias_type: Any,
    is_single: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    *_: Any,
) -> Sequence[Tensor]:
    """One product for each group; is_single: they are written one after another in out[0]."""
    parts = out[0].split(list(splits or ())) if is_single else out
    for one, other, part, part_bias in zip(a, b, parts, bias, strict=True):
        if not part.numel():
            continue
        if not other.size()[0] and not accumulate:
            part.zero_()
        # fmt: off
        _, bias_grad, _, _ = generic_gemm(one, transa, other, transb, part, None, out_dtype,  # pyright: ignore[reportAssignmentType]
            part_bias, bias_type, False, None, grad, None, 0, accumulate, False)  # pyright: ignore[reportArgumentType]
        # fmt: on
        if grad and bias_grad is not None:
            part_bias.copy_(bias_grad)
    return bias


def fused_multi_row_padding(
    x: Tensor, out: Tensor, splits: Sequence[int], padded: Sequence[int]
) -> None:
    """Rows of each group, with zeros up to its padded number."""
    out.zero_()
    for group, place in zip(x.split(list(splits)), out.split(list(padded)), strict=True):
        place[: len(group)].copy_(group)


def fused_multi_row_unpadding(
    x: Tensor, out: Tensor, padded: Sequence[int], splits: Sequence[int]
) -> None:
    for group, place in zip(x.split(list(padded)), out.split(list(splits)), strict=True):
        place.copy_(group[: len(place)])


# ---- norms and activations


def _gain(weight: Tensor, is_zero_centered: bool) -> Tensor:
    return weight.float() + 1 if is_zero_centered else weight.float()


def _normed(out: Tensor, into: Tensor | None, quantizer: Any, dtype: Any) -> Any:
    out = out.to(_torch_dtype(dtype))
    if quantizer is not None:
        return quantize(out, quantizer)
    return out if into is None else into.copy_(out)


def layernorm_fwd(x, weight, bias, eps, out, quantizer, dtype, margin, is_zero_centered):
    wide = x.float()
    mean = wide.mean(-1)
    rstd = ((wide - mean[:, None]).square().mean(-1) + eps).rsqrt()
    gain = _gain(weight, is_zero_centered)
    normed = (wide - mean[:, None]) * rstd[:, None] * gain + bias.float()
    return _normed(normed, out, quantizer, dtype), mean, rstd


def layernorm_bwd(dy, x, mean, rstd, weight, margin, is_zero_centered):
    dy, x = _flat(dy), _flat(x)
    plain = (x.float() - mean[:, None]) * rstd[:, None]
    dplain = dy.float() * _gain(weight, is_zero_centered)
    along = plain * (dplain * plain).mean(-1, keepdim=True)
    dx = rstd[:, None] * (dplain - dplain.mean(-1, keepdim=True) - along)
    dweight, dbias = (dy.float() * plain).sum(0), dy.float().sum(0)
    return dx.to(dy.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)


def rmsnorm_fwd(x, weight, eps, out, quantizer, dtype, margin, is_zero_centered):
    wide = x.float()
    rstd = (wide.square().mean(-1) + eps).rsqrt()
    normed = wide * rstd[:, None] * _gain(weight, is_zero_centered)
    return _normed(normed, out, quantizer, dtype), None, rstd


def rmsnorm_bwd(dy, x, rstd, weight, margin, is_zero_centered):
    dy, x = _flat(dy), _flat(x)
    plain = x.float() * rstd[:, None]
    dplain = dy.float() * _gain(weight, is_zero_centered)
    dx = rstd[:, None] * (dplain - plain * (dplain * plain).mean(-1, keepdim=True))
    return dx.to(dy.dtype), (dy.float() * plain).sum(0).to(weight.dtype)


def _swiglu(x: Tensor) -> Tensor:
    gate, linear = x.chunk(2, -1)
    return functional.silu(gate) * linear


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": _swiglu,
    "gelu": partial(functional.gelu, approximate="tanh"),
    "srelu": lambda x: x.relu().square(),
}


def _activated(of: Callable[[Tensor], Tensor], x: Tensor, quantizer: Any) -> Any:
    made = of(x.float()).to(x.dtype)
    return made if quantizer is None else quantize(made, quantizer)


def _activation_backward(
    of: Callable[[Tensor], Tensor], grad: Tensor, x: Tensor, quantizer: Any
) -> Any:
    with torch.enable_grad():
        wide = x.detach().float().requires_grad_()
        (made,) = torch.autograd.grad(of(wide), wide, grad.float())
    made = made.to(x.dtype)
    return made if quantizer is None else quantize(made, quantizer)


def scaled_swiglu(x: Tensor, scales: Tensor, quantizer: Any, interleaved: int) -> Any:
    """Each row of the activation times its scale."""
    if interleaved:
        _refusal("interleaved gates")()
    return _activated(lambda wide: _swiglu(wide) * scales.float().view(-1, 1), x, quantizer)


def scaled_dswiglu(
    grad: Tensor, x: Tensor, scales: Tensor, quantizer: Any, interleaved: int, scales_too: bool
) -> tuple[Any, Tensor | None]:
    if interleaved:
        _refusal("interleaved gates")()
    wide = grad.float() * scales.float().view(-1, 1)
    of_scales = (grad.float() * _swiglu(x.float())).sum(-1) if scales_too else None
    made = _activation_backward(_swiglu, wide, x, quantizer)
    return made, None if of_scales is None else of_scales.view(scales.shape).to(scales.dtype)


# ---- attention without a fused kernel


def _softmax(scores: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
    wide = scores.float() * scale
    if hidden is not None:
        wide = wide.masked_fill(hidden, -10000.0 if hidden.dtype is torch.bool else float("-inf"))
    return wide.softmax(-1).to(scores.dtype)


def _later(scores: Tensor) -> Tensor:
    shape, device = scores.shape[-2:], scores.device
    return torch.ones(shape, dtype=torch.bool, device=device).triu(1 + shape[1] - shape[0])


def scaled_softmax_forward(scores: Tensor, scale: float) -> Tensor:
    return _softmax(scores, scale, None)


def scaled_masked_softmax_forward(scores: Tensor, mask: Tensor, scale: float) -> Tensor:
    return _softmax(scores, scale, mask.bool())


def scaled_upper_triang_masked_softmax_forward(scores: Tensor, scale: float) -> Tensor:
    wide = (scores.float() * scale).masked_fill(_later(scores), float("-inf"))
    return wide.softmax(-1).to(scores.dtype)


def _softmax_backward(grad: Tensor, weights: Tensor, scale: float) -> Tensor:
    product = grad.float() * weights.float()
    dscores = product - weights.float() * product.sum(-1, keepdim=True)
    return (dscores * scale).to(weights.dtype)


# ---- packed sequences: sequence i is the rows from starts[i] to starts[i + 1]


def _padded_rows(starts: Tensor, length: int) -> Tensor:
    """Which of [sequences, length] are rows of packed sequences."""
    sizes = starts.diff()
    return torch.arange(length, device=starts.device) < sizes[:, None]


def convert_thd_to_bshd(packed: Tensor, starts: Tensor, batch_size: int, length: int) -> Tensor:
    padded = packed.new_zeros(batch_size, length, *packed.shape[1:])
    padded[_padded_rows(starts, length)] = packed[: int(starts[-1])]
    return padded


def convert_bshd_to_thd(padded: Tensor, starts: Tensor, num_rows: int) -> Tensor:
    packed = padded.new_zeros(num_rows, *padded.shape[2:])
    packed[: int(starts[-1])] = padded[_padded_rows(starts, padded.shape[1])]
    return packed


# ---- optimizers


def multi_tensor_adam(
    chunk, noop, lists, lr, beta1, beta2, eps, step, is_decoupled, corrects_bias, weight_decay
):
    """lists: gradients, parameters, two moments, and the main parameters where they are apart.

    Source: common/multi_tensor/adam.cu, AdamFunctorMaster.
    """
    correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if corrects_bias else (1.0, 1.0)
    for grad, param, first, second, *main in zip(*lists, strict=True):
        values = (main[0] if main else param).float()
        g = grad.float() if is_decoupled else grad.float() + weight_decay * values
        m = beta1 * first.float() + (1 - beta1) * g
        v = beta2 * second.float() + (1 - beta2) * g * g
        update = (m / correction1) / ((v / correction2).sqrt() + eps)
        if is_decoupled:
            update = update + weight_decay * values
        values = values - lr * update
        for place, value in zip((first, second, param, *main), (m, v, values, values)):
            place.copy_(value)


def multi_tensor_adam_param_remainder(chunk, noop, lists, *settings):
    """Update as multi_tensor_adam does; main parameters are the lower 16 bits of bf16 ones.

    If the highest of these bits is set the bf16 was rounded up. Source:
    common/multi_tensor/adam.cu, AdamFunctorMasterParamRemainder.
    """
    for grad, param, first, second, low in zip(*lists, strict=True):
        lower = low.to(torch.int32)
        high = param.view(torch.int16).to(torch.int32) - (lower < 0).int()
        values = ((high << 16) | (lower & 0xFFFF)).view(torch.float32)
        multi_tensor_adam(chunk, noop, [[grad], [values], [first], [second]], *settings)
        bits = values.view(torch.int32)
        low.copy_(bits & 0xFFFF)
        param.view(torch.int16).copy_((bits >> 16) + (low < 0).int())


def multi_tensor_scale(chunk, noop, lists, scale):
    """Scale. lists: sources and targets. noop is set if a result is not finite."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source.float() * scale)
        noop.copy_(torch.maximum(noop, (~torch.isfinite(target).all()).to(noop.dtype)))


def multi_tensor_l2norm(chunk, noop, lists, by_tensor=False):
    squares = [one.float().square().sum() for one in lists[0]]
    norms = torch.stack(squares).sqrt() if by_tensor else torch.empty(0, device=noop.device)
    return torch.stack(squares).sum().sqrt().view(1), norms


# ---- the module

extension: Any = _Extension("transformer_engine_torch")
# fmt: off
for _made in (
    DType, FP8FwdTensors, FP8BwdTensors, quantize, create_empty_quantized_tensor, split_quantize,
    bgrad_quantize, dequantize, fp8_transpose, fused_amax_and_scale_update_after_reduction,
    generic_gemm, te_general_grouped_gemm, layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd,
    fused_multi_row_padding, fused_multi_row_unpadding, scaled_swiglu, scaled_dswiglu,
    scaled_softmax_forward, scaled_masked_softmax_forward,
    scaled_upper_triang_masked_softmax_forward, convert_thd_to_bshd, convert_bshd_to_thd,
    multi_tensor_adam, multi_tensor_adam_param_remainder, multi_tensor_scale, multi_tensor_l2norm,
):
    setattr(extension, _made.__name__, _made if isinstance(_made, type) else as_a_kernel(_made))  # pyright: ignore[reportArgumentType]
# fmt: on
for _name, _of in _ACTIVATIONS.items():
    setattr(extension, _name, as_a_kernel(partial(_activated, _of)))
    setattr(extension, f"d{_name}", as_a_kernel(partial(_activation_backward, _of)))
extension.scaled_aligned_causal_masked_softmax_forward = (
    extension.scaled_upper_triang_masked_softmax_forward
)
for _name in ("", "_masked", "_upper_triang_masked", "_aligned_causal_masked"):
    setattr(extension, f"scaled{_name}_softmax_backward", as_a_kernel(_softmax_backward))
# With a factor that is on the device.
extension.multi_tensor_scale_tensor = extension.multi_tensor_scale
extension.get_num_cublas_streams = lambda: 1
extension.get_cublasLt_version = lambda: 130000
extension.get_cudnn_version = lambda: 91000
