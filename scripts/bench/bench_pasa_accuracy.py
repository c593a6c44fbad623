# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Rounding errors of attention with and without PASA's shift, against fp64 on the same 16-bit
inputs: of the output on the data and in the shape of the paper's benchmark (arXiv 2503.01873), and
of dQ with biased keys and values. Deterministic, no GPU; a quarter of an hour on one core.

    python -m scripts.bench.bench_pasa_accuracy --out runs/pasa.jsonl
    python -m scripts.report.add_record pasa_accuracy runs/pasa.jsonl
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from math import sqrt
from pathlib import Path

import torch

from megatron_asynchzp.attention.key_shift import ShiftedKeys, SnapRule, shift_keys, shift_values
from megatron_asynchzp.attention.mask import AttentionMask
from megatron_asynchzp.attention.reference.arithmetic import ALL_FP16, FP16_FP32_VECTOR, gemm
from megatron_asynchzp.attention.reference.block import block_backward, block_forward
from megatron_asynchzp.attention.shifting import INITIAL_BETAS, solve_beta
from scripts.report.records import append
from scripts.testbed.attention.exact import exact_backward, exact_forward
from scripts.testbed.attention.paper import paper_forward
from scripts.testbed.attention.paper_data import (
    PAPER_GRID,
    Inputs,
    PaperData,
    normal_inputs,
    relative_rmse,
)
from scripts.testbed.machine import machine_record

DIM = 128
SCALE = 1 / sqrt(DIM)
BIASES = ((0, 0), (3, 0), (30, 0), (10, 3), (10, 30))  # of k, of v
GRADIENT_LENGTH = 512


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=1407)
    parser.add_argument("--heads", type=int, default=28)
    parser.add_argument("--groups", type=int, default=4, help="key heads")
    centres = sorted({case.x0 for case in PAPER_GRID})
    parser.add_argument("--x0", type=int, nargs="*", default=centres, help="of the grid; or none")
    parser.add_argument("--out", type=Path, required=True, help="file to append JSON lines to")
    args = parser.parse_args(argv)
    if not set(args.x0) <= set(centres):
        parser.error(f"--x0: the paper's grid has {', '.join(map(str, centres))}")
    if min(args.tokens, args.heads, args.groups) < 1 or args.heads % args.groups:
        parser.error("--tokens, --heads and --groups are at least 1, and groups divide the heads")
    append(args.out, machine_record())
    for line in _measure(args):
        print(json.dumps(line), flush=True)
        append(args.out, line)


def _measure(args: argparse.Namespace) -> Iterator[dict]:
    if not args.x0 or 0 in args.x0:  # once, where the grid is measured in parts
        yield from gradient_lines()
    cases = [case for case in PAPER_GRID if case.x0 in args.x0]
    yield from forward_lines(cases, args.tokens, args.heads, args.groups)


def forward_lines(
    cases: Sequence[PaperData], tokens: int, heads: int, groups: int
) -> Iterator[dict]:
    """The error of the output on cells of the paper's grid, and the part that is not finite."""
    mask = AttentionMask(tokens, tokens)
    for case in cases:
        inputs = case.draw(tokens, heads=heads, groups=groups, dim=DIM).to(torch.float16)
        true = exact_forward(*inputs[:3], mask, SCALE).output_BHSE
        for way, attend in FORWARD_WAYS.items():
            found = attend(inputs, mask)
            is_finite = found.isfinite()
            error = relative_rmse(found, true) if is_finite.all() else None
            yield {
                "kind": "forward",
                "law": case.law,
                "x0": case.x0,
                "amplitude": case.amplitude,
                "way": way,
                "error": error,
                "not_finite": 1 - is_finite.double().mean().item(),
            }


def gradient_lines() -> Iterator[dict]:
    """The error of dQ on standard normal inputs plus a bias of k and of v."""
    mask = AttentionMask(GRADIENT_LENGTH, GRADIENT_LENGTH)
    drawn = normal_inputs(mask, dim=DIM)
    for k_bias, v_bias in BIASES:
        for dtype in (torch.float16, torch.bfloat16):
            inputs = drawn._replace(k=drawn.k + k_bias, v=drawn.v + v_bias).to(dtype)
            q, k, v, d_output = inputs
            true = exact_backward(d_output, q, k, v, mask, SCALE).dq_BHSD
            for way, (keys, values) in _gradient_ways(k, v).items():
                yield {
                    "kind": "gradient",
                    "k_bias": k_bias,
                    "v_bias": v_bias,
                    "dtype": "fp16" if dtype == torch.float16 else "bf16",
                    "way": way,
                    "error": relative_rmse(_dq(inputs._replace(v=values), keys, mask), true),
                }


def _gradient_ways(k: torch.Tensor, v: torch.Tensor) -> dict[str, tuple[ShiftedKeys, torch.Tensor]]:
    block = shift_keys(k, 128)
    return {
        "standard": (_unshifted(k), v),
        "block": (block, v),
        "delegate": (shift_keys(k, rule=SnapRule.RATIO), v),
        "block, values too": (block, shift_values(v).values_BGTE),
    }


def _unshifted(k: torch.Tensor) -> ShiftedKeys:
    """Keys as they are: block mode is then what FlashAttention computes."""
    nothing = k.new_zeros(*k.shape[:2], 1, k.shape[3], dtype=torch.float32)
    return ShiftedKeys(k, nothing, nothing, k.shape[2])


def _dq(inputs: Inputs, keys: ShiftedKeys, mask: AttentionMask) -> torch.Tensor:
    q, _, v, d_output = inputs
    done = block_forward(q, keys, v, mask, SCALE)
    output, lse = done.result.output_BHSE, done.shifted_lse_BHS
    return block_backward(d_output, q, keys, v, output, lse, mask, SCALE).dq_BHSD


def _by_keys(new_keys: Callable[[torch.Tensor], ShiftedKeys]) -> Callable:
    def attend(inputs: Inputs, mask: AttentionMask) -> torch.Tensor:
        return block_forward(inputs.q, new_keys(inputs.k), inputs.v, mask, SCALE).result.output_BHSE

    return attend


def _eager(inputs: Inputs, mask: AttentionMask) -> torch.Tensor:
    """Eager attention whose QK^T is stored in fp16 before it is scaled."""
    repeats = inputs.q.shape[1] // inputs.k.shape[1]
    k, v = (x.repeat_interleave(repeats, 1) for x in (inputs.k, inputs.v))
    score = gemm(inputs.q, k.mT.contiguous(), torch.float16)
    return gemm((SCALE * score.float()).softmax(-1).half(), v, torch.float16)


def _published(precision) -> Callable:
    beta = solve_beta(INITIAL_BETAS[0], head_dim=DIM)

    def attend(inputs: Inputs, mask: AttentionMask) -> torch.Tensor:
        return paper_forward(*inputs[:3], mask, SCALE, beta, precision).result.output_BHSE

    return attend


FORWARD_WAYS = {
    "standard": _by_keys(_unshifted),
    "block": _by_keys(lambda k: shift_keys(k, 128)),
    "delegate": _by_keys(lambda k: shift_keys(k, rule=SnapRule.RATIO)),
    "fp16 scores, unscaled": _eager,
    "published, all fp16": _published(ALL_FP16),
    "published, fp32 vector": _published(FP16_FP32_VECTOR),
}

if __name__ == "__main__":
    main(sys.argv[1:])
