# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Layers that keep, read and write weights as those of Transformer Engine do, without its kernels;
each computes the same as stock torch where `is_stock` is set.

What they have in common with it, as of its version 2.20:

    Linear            one autograd function; saves its input, the weight twice and the bias
    OpNorm            every norm: an operation of a module; saves its input, and in backward reads
                      the weight from the module as it then is
    OpLinear          a linear layer as such an operation; saves its weight

With `is_fused` (Megatron: --gradient-accumulation-fusion) the gradient of a weight is added to
`weight.main_grad` within the backward of the layer, or written over it where the weight has a true
`overwrite_main_grad`. Linear and its kin read that attribute in forward, OpLinear in backward;
`main_grad` is looked up in backward. The functions keep a weak reference to the weight beside the
saved one, whose Python attributes are lost. Where the weight has `grad_added_to_main_grad`, that is
set and autograd gets a dummy that all weights of a shape share, of undefined values, or of zeros
with `zero_out_wgrad`; else it gets nothing. Saved tensors that nobody else can need are emptied.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.support.toy_models import ToyLM

EPS = 1e-5


@cache
def _shared_dummy(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _dummy_grad(weight: nn.Parameter) -> torch.Tensor | None:
    """What autograd gets in place of a gradient that is in main_grad already."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    dummy = _shared_dummy(weight.shape, weight.dtype)
    dummy.fill_(0.0 if getattr(weight, "zero_out_wgrad", False) else float("nan"))
    return dummy.detach()


def _write_main_grad(main_grad: torch.Tensor, grad: torch.Tensor, overwrites: bool) -> None:
    if overwrites:
        main_grad.copy_(grad)
    else:
        main_grad.add_(grad)


def _empty(*tensors: torch.Tensor) -> None:
    """Give back the memory of saved tensors although autograd still holds them."""
    for tensor in tensors:
        tensor.data = torch.empty(0, dtype=tensor.dtype)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


class _WeightGrad:
    """How a function finds the place of its weight's gradient, from forward to backward."""

    def __init__(self, weight: nn.Parameter, is_fused: bool):
        self.is_fused = is_fused
        if is_fused:
            self._weight = weakref.ref(weight)
            self._overwrites = getattr(weight, "overwrite_main_grad", False)
            self._main_grad: Callable[[], torch.Tensor] = lambda: weight.main_grad

    def deliver(self, grad: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Compute the gradient; what autograd gets."""
        if not self.is_fused:
            return grad()
        weight = self._weight()
        assert weight is not None, "the weight is gone"
        main_grad = weight.main_grad = self._main_grad()
        _write_main_grad(main_grad, grad(), self._overwrites)
        return _dummy_grad(weight)


# ---- layers with a function of their own


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight, x, bias, is_fused: bool):
        ctx.weight_grad = _WeightGrad(weight, is_fused)
        ctx.save_for_backward(x, weight, weight, bias)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        x, weight, same_weight, _bias = ctx.saved_tensors
        assert weight.shape == same_weight.shape
        dgrad = grad @ weight
        wgrad = ctx.weight_grad.deliver(lambda: _flat(grad).t() @ _flat(x))
        return wgrad, dgrad, _flat(grad).sum(0), None


class StandIn(nn.Module):
    """is_fused: weight gradients go into main_grad; is_stock: computed by torch's own functions."""

    is_fused = is_stock = False


class Linear(StandIn):
    """x W' + b."""

    def __init__(self, width: int, out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) * 0.1)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_stock:
            return functional.linear(x, self.weight, self.bias)
        return _LinearFunction.apply(self.weight, x, self.bias, self.is_fused)


# ---- layers that are operations: backward asks the module


class _Operation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: "OpNorm | OpLinear", x: torch.Tensor, *params: nn.Parameter):
        ctx.module = module
        out, saved = module.run_forward(x)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return None, *ctx.module.run_backward(grad, *ctx.saved_tensors)


class OpNorm(StandIn):
    """RMS norm."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_stock:
            return functional.rms_norm(x, x.shape[-1:], self.weight, EPS)
        return _Operation.apply(self, x, self.weight)

    def run_forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        flat = x.reshape(-1, x.shape[-1])
        rstd = (flat.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return (flat * rstd * self.weight).view_as(x), (flat, rstd)

    def run_backward(self, grad: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor):
        dy = grad.reshape(x.shape)
        normed, dnormed = x * rstd, dy * self.weight
        dx = rstd * (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True))
        dweight = (dy * normed).sum(0)
        _empty(x, rstd)
        return dx.view_as(grad), dweight


class OpLinear(StandIn):
    """x W'. Where main_grad is to be overwritten, autograd gets main_grad itself and the weight no
    mark: the gradient arrives twice."""

    def __init__(self, width: int, out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_stock:
            return functional.linear(x, self.weight)
        return _Operation.apply(self, x, self.weight)

    def run_forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        return x @ self.weight.t(), (x, self.weight)

    def run_backward(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor):
        dgrad, wgrad = grad @ weight, _flat(grad).t() @ _flat(x)
        if not self.is_fused:
            return dgrad, wgrad
        overwrites = getattr(self.weight, "overwrite_main_grad", False)
        _write_main_grad(self.weight.main_grad, wgrad, overwrites)
        if overwrites:
            return dgrad, self.weight.main_grad.detach().to(self.weight.dtype)
        return dgrad, _dummy_grad(self.weight)


# ---- a model of them


class Block(nn.Module):
    """Every stand-in once."""

    def __init__(self, width: int):
        super().__init__()
        self.up = Linear(width, 2 * width + 1)
        self.norm = OpNorm(2 * width + 1)
        self.back = OpLinear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(functional.gelu(self.norm(self.up(x))))


class FusedOutput(StandIn):
    """The output layer, whose weight is its own or that of the embedding."""

    def __init__(self, width: int, vocab: int, is_tied: bool):
        super().__init__()
        self.weight = None if is_tied else nn.Parameter(torch.randn(vocab, width) * 0.1)

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        weight = self.weight if weight is None else weight
        if self.is_stock:
            return functional.linear(x, weight)
        return _LinearFunction.apply(weight, x, weight.new_zeros(len(weight)), self.is_fused)


def build_te_toy(
    dtype: torch.dtype = torch.float32,
    is_fused=False,
    is_stock=False,
    is_repeated=False,
    seed=5,
    **toy: Any,
) -> ToyLM:
    """A language model of stand-ins, the same on every rank; is_repeated: one block is called
    twice; toy: see ToyLM."""
    torch.manual_seed(seed)
    model = ToyLM(depth=2, **toy)
    width, vocab = model.embedding.embedding_dim, model.embedding.num_embeddings
    first = Block(width)
    model.blocks = nn.ModuleList([first, first if is_repeated else Block(width)])
    model.norm = OpNorm(width)
    model.output = FusedOutput(width, vocab, model.is_tied)
    for module in model.modules():
        if isinstance(module, StandIn):
            module.is_fused, module.is_stock = is_fused, is_stock
    if model.is_tied:  # as Megatron does, for the gradient of the embedding
        model.embedding.weight.zero_out_wgrad = True
    return model.to(dtype)
