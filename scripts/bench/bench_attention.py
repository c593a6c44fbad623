# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Measures attention with and without PASA's shift: accuracy first, then time. JSON lines.

    python -m scripts.bench.bench_attention [--lengths 1024 4096] [--dtype bf16] [--out FILE]

Every way is first measured against fp64 on biased keys. Where its error is above the tolerance, its
line has "is_right": false, and no time is measured. TFLOPS count 4 B H S T D per forward, half of
it if causal, and 2.5 times that per backward.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from math import isfinite
from pathlib import Path
from unittest.mock import patch

import torch

from megatron_asynchzp.attention.call import AttentionCall
from megatron_asynchzp.attention.mask import AttentionMask
from megatron_asynchzp.attention.pasa import VENDORS, block_attention, delegate_attention
from scripts.report.records import append
from scripts.testbed.attention.exact import exact_backward, exact_forward

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Relative RMS error of O and dQ that a way may have on keys with a bias of K_BIAS, and of dK and dV
# _MORE times as much: SDPA in fp16 comes to 0.8 of it. Without a shift the bias multiplies the
# error of dQ: there it must only be finite.
TOLERANCE = {"fp16": 1e-3, "bf16": 8e-3, "fp32": 1e-5}
K_BIAS = 10.0
_MORE = 2
# Queries and keys of a tile, warps and stages, see triton_forward.
_TRIED = tuple(product((64, 128), (32, 64, 128), (4, 8), (2, 3)))
# Dense peak of the matrix units, TFLOPS, for the roofline.
PEAK = {"H100": 989.0, "H200": 989.0, "A100": 312.0}


@dataclass(frozen=True)
class Way:
    """One way to compute attention.

    `has_shift`: with biased keys its dQ must reach TOLERANCE too, as O, dK and dV must.
    """

    name: str
    has_shift: bool
    run: Callable[[AttentionCall], torch.Tensor]


def ways(call: AttentionCall) -> Iterator[Way]:
    """Everything that can compute `call` here."""
    for vendor in VENDORS:
        if vendor.reason_against(call) is None:
            yield Way(vendor.name, False, vendor.run)
            yield Way(
                f"{vendor.name} + shift",
                True,
                lambda one, name=vendor.name: delegate_attention(one, name),
            )
    is_fused = call.device.type == "cuda"
    yield Way(
        "block" if is_fused else "block (reference)",
        True,
        lambda one: block_attention(one, is_fused=is_fused).output_BHSE,
    )


def draw_call(options, length: int, bias: float, heads: int, groups: int) -> AttentionCall:
    generator = torch.Generator(options.device).manual_seed(0)
    shape = (options.batch, heads, length, options.head_dim)
    shapes = [shape, *[(options.batch, groups, length, options.head_dim)] * 2]
    q, k, v = (torch.randn(s, generator=generator, device=options.device) for s in shapes)
    leaves = [x.to(DTYPES[options.dtype]).requires_grad_() for x in (q, k + bias, v)]
    mask = AttentionMask(length, length, is_causal=options.causal)
    return AttentionCall(*leaves, mask, options.head_dim**-0.5)  # pyright: ignore[reportCallIssue]


def accuracy(way: Way, options) -> dict[str, float]:
    """Relative RMS errors against fp64 on the same inputs, at a length that fp64 can afford."""
    call = draw_call(options, 512, K_BIAS, 2, 1)
    d_output = torch.randn_like(call.q_BHSD)
    output = way.run(call)
    leaves = (call.q_BHSD, call.k_BGTD, call.v_BGTE)
    gradients = torch.autograd.grad(output, leaves, d_output)
    with torch.no_grad():
        true = exact_forward(*leaves, call.mask, call.scale).output_BHSE
        true_gradients = exact_backward(d_output, *leaves, call.mask, call.scale)
        names = ("O", "dQ", "dK", "dV")
        pairs = zip(names, (output, *gradients), (true, *true_gradients), strict=True)
        return {n: ((f.double() - t).norm() / t.norm()).item() for n, f, t in pairs}


def measure(way: Way, call: AttentionCall, repetitions: int) -> dict[str, float]:
    """Seconds of the fastest forward and backward."""
    leaves = (call.q_BHSD, call.k_BGTD, call.v_BGTE)
    d_output = torch.randn_like(call.q_BHSD)
    forward, backward = [], []
    for _ in range(repetitions + 2):
        start_s = _now(call.device)
        output = way.run(call)
        middle_s = _now(call.device)
        torch.autograd.grad(output, leaves, d_output)
        forward.append(middle_s - start_s)
        backward.append(_now(call.device) - middle_s)
    return {"forward_s": min(forward[2:]), "backward_s": min(backward[2:])}


def tune(call: AttentionCall, options) -> None:
    """Take for each kernel the tiles with which it is fastest, of those in the table and _TRIED."""
    from triton.runtime.errors import OutOfResources

    from megatron_asynchzp.attention import triton_forward

    way = Way("block", True, lambda one: block_attention(one, is_fused=True).output_BHSE)
    padded = max(64, triton_forward.padded_dim(options.head_dim))
    capability = torch.cuda.get_device_capability()
    for table, direction in (
        (triton_forward.FORWARD, "forward_s"),
        (triton_forward.backward_kv_table(capability), "backward_s"),
        (triton_forward.BACKWARD_Q, "backward_s"),
    ):
        times = {}
        for tiles in dict.fromkeys((table[padded], *map(triton_forward.TileConfig._make, _TRIED))):
            with patch.dict(table, {padded: tiles}), suppress(OutOfResources):
                times[tiles] = measure(way, call, options.repetitions)[direction]
        table[padded] = min(times, key=times.__getitem__)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def bench(options) -> Iterator[dict]:
    errors_of: dict[str, dict[str, float]] = {}  # they do not depend on the length that is timed
    for length in options.lengths:
        call = draw_call(options, length, 0.0, options.heads, options.groups)
        if options.tune:
            tune(call, options)
        for way in ways(call):
            if way.name not in errors_of:
                errors_of[way.name] = accuracy(way, options)
            errors = errors_of[way.name]
            is_right = _is_right(way, errors, TOLERANCE[options.dtype])
            # fmt: off
            line = {
                "way": way.name, "length": length, "dtype": options.dtype, "is_right": is_right,
                "head_dim": options.head_dim, "heads": options.heads, "groups": options.groups,
                "batch": options.batch, "causal": options.causal, "device": _device_name(options),
                "errors_at_k_bias_10": errors,
            }
            # fmt: on
            if is_right:
                line |= measure(way, call, options.repetitions)
                line |= _tflops(line, options, length)
            yield line


def _is_right(way: Way, errors: dict[str, float], tolerance: float) -> bool:
    limits = {"O": tolerance, "dQ": tolerance, "dK": _MORE * tolerance, "dV": _MORE * tolerance}
    if not way.has_shift:
        del limits["dQ"]
    is_close = all(errors[name] <= limit for name, limit in limits.items())
    return is_close and isfinite(errors["dQ"])


def _tflops(line: dict, options, length: int) -> dict[str, float]:
    flops = 4 * options.batch * options.heads * length**2 * options.head_dim
    flops /= 2 if options.causal else 1
    record = {
        "forward_tflops": flops / line["forward_s"] / 1e12,
        "backward_tflops": 2.5 * flops / line["backward_s"] / 1e12,
    }
    peak = next((p for name, p in PEAK.items() if name in line["device"]), None)
    if peak and options.dtype != "fp32":
        record["forward_of_peak"] = record["forward_tflops"] / peak
        record["backward_of_peak"] = record["backward_tflops"] / peak
    return record


def _device_name(options) -> str:
    return torch.cuda.get_device_name() if options.device == "cuda" else options.device


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument(
        "--tune", action="store_true", help="let the kernels try their tiles first: minutes"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="a file besides the screen")
    options = parser.parse_args(argv)
    is_right = True
    for line in bench(options):
        is_right = is_right and line["is_right"]
        print(json.dumps(line), flush=True)
        if options.out:
            append(options.out, line)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
