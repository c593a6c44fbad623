# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Checks that the fused PASA kernels are as accurate as their arithmetic allows."""

import os
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from megatron_asynchzp.attention.call import AttentionCall
from megatron_asynchzp.attention.mask import AttentionMask, PackedSequences
from megatron_asynchzp.attention.pasa import block_attention
from scripts.bench import bench_attention
from scripts.gpu_check.outcome import CheckFailed, Target
from scripts.report.records import read
from scripts.testbed.attention.exact import exact_backward, exact_forward
from scripts.testbed.attention.paper_data import normal_inputs, relative_rmse
from scripts.testbed.differences import largest

# Relative RMS error of O, LSE, dQ, dK and dV on keys with a bias.
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_K_BIAS = 8.0
_NAMES = ("O", "LSE", "dQ", "dK", "dV")


def masks(length: int) -> dict[str, AttentionMask]:
    """Kinds of masks on lengths that no tile divides."""
    packed = torch.tensor([0, length // 3, length])
    return {
        "causal": AttentionMask(length, length, is_causal=True),
        "fewer queries": AttentionMask(length // 2, length, is_causal=True),
        "causal window": AttentionMask(length, length, is_causal=True, window=(20, -1)),
        "packed": AttentionMask(
            length, length, is_causal=True, packed=PackedSequences(packed, packed)
        ),
    }


def errors(
    mask: AttentionMask, dim: int, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Relative RMS errors of block mode against fp64, on inputs of `dtype`."""
    drawn = normal_inputs(mask, heads=4, groups=2, dim=dim)
    inputs = drawn._replace(k=drawn.k + _K_BIAS).to(dtype)
    leaves = [x.to(device).requires_grad_() for x in inputs[:3]]
    is_fused = device.type == "cuda"
    call = AttentionCall(*leaves, mask, dim**-0.5)  # pyright: ignore[reportCallIssue]
    result = block_attention(call, is_fused=is_fused)
    gradients = torch.autograd.grad(result.output_BHSE, leaves, inputs.d_output.to(device))
    found = (result.output_BHSE.detach(), result.lse_BHS, *gradients)
    with torch.no_grad():
        true = (
            *exact_forward(*inputs[:3], mask, dim**-0.5),
            *exact_backward(inputs.d_output, *inputs[:3], mask, dim**-0.5),
        )
    pairs = zip(_NAMES, found, true, strict=True)
    return {name: relative_rmse(*_finite(one.cpu(), right)) for name, one, right in pairs}


def _finite(found: torch.Tensor, true: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both with zeros where both are minus infinity: the LSE of a query that sees nothing."""
    if not torch.equal(found.isneginf(), true.isneginf()):
        return torch.full_like(true, float("nan")), true
    return found.masked_fill(found.isneginf(), 0), true.masked_fill(true.isneginf(), 0)


def all_errors(target: Target) -> Iterator[tuple[str, dict[str, float], float]]:
    """Every case: what it is, its errors, and what they may be."""
    device = torch.device(target.device)
    # Every kernel of the table once: to compile one takes seconds.
    kinds = [(64, torch.float16), (128, torch.bfloat16)]
    length = 700
    if not target.is_large:
        kinds, length = [(32, dtype) for dtype in TOLERANCE], 150
    if is_interpreted():
        kinds = [(32, torch.float16)]  # its products of bf16 are those of the bits as integers
    for (dim, dtype), (name, mask) in product(kinds, masks(length).items()):
        found = errors(mask, dim, dtype, device)
        yield f"{name}, {dim} channels, {dtype}", found, TOLERANCE[dtype]


def is_interpreted() -> bool:
    """Whether Triton runs its kernels on the host, operation by operation."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def bench_flags(target: Target) -> list[str]:
    """With the tiles of the table: to tune them is minutes of compiling."""
    if target.is_large:
        return ["--lengths", "4096", "--dtype", "bf16", "--causal", "--device", "cuda"]
    small = ["--lengths", "64", "--heads", "2", "--groups", "1", "--head-dim", "32"]
    return [*small, "--dtype", "fp32", "--repetitions", "1", "--device", target.device]


def run(target: Target) -> dict[str, Any]:
    worst, faults = dict.fromkeys(_NAMES, 0.0), []
    number = 0
    for what, found, limit in all_errors(target):
        number += 1
        worst = {name: largest([worst[name], found[name]]) for name in _NAMES}
        faults += [f"{what}: {n} {e:.1e}" for n, e in found.items() if not e <= limit]
    figures: dict[str, Any] = {"cases": number, "worst relative errors": worst}
    if faults:
        raise CheckFailed(f"{len(faults)} errors too large, the first in {faults[0]}", figures)
    if is_interpreted():
        return figures | {"times": "none: Triton interprets its kernels here"}
    records = target.folder / "attention.jsonl"
    records.unlink(missing_ok=True)
    status = bench_attention.main([*bench_flags(target), "--out", str(records)])
    for line in read([records]):
        figures[line["way"]] = (
            {"forward ms": 1e3 * line["forward_s"], "backward ms": 1e3 * line["backward_s"]}
            if line["is_right"]
            else "too inaccurate to be timed"
        )
    if status:
        raise CheckFailed("the benchmark found a way that is too inaccurate", figures)
    return figures
