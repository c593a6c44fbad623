# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the fused kernels without a GPU: a process of its own in which triton interprets, because
triton decides at its first import. Knows no test; bodies are module-level functions."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from megatron_asynchzp.attention.call import AttentionCall
from megatron_asynchzp.attention.mask import AttentionMask
from scripts.testbed.attention.paper_data import Inputs


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


@contextmanager
def interpreter() -> Iterator[Callable[..., Any]]:
    """A function that calls another one, with its arguments, where triton interprets."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_interpret) as pool:
        yield lambda fn, *args, **options: pool.submit(fn, *args, **options).result(timeout=300)


def attend(
    inputs: Inputs, mask: AttentionMask, scale: float, *, is_fused: bool
) -> list[torch.Tensor]:
    """O, LSE, dQ, dK, dV of block mode, through autograd."""
    from megatron_asynchzp.attention.pasa import block_attention

    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    result = block_attention(AttentionCall(*leaves, mask, scale), is_fused=is_fused)
    gradients = torch.autograd.grad(result.output_BHSE, leaves, inputs.d_output)
    return [result.output_BHSE.detach(), result.lse_BHS, *gradients]
