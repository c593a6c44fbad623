# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Check: Transformer Engine's layers compute in FP8 or FP4 over sharded parameters as over stock's.

What only a GPU shows: that the real kernels make the same codes of a weight whenever it is
gathered, in forward and again in backward, and of one that travelled as codes; and the cost of a
step and of stock's, which keeps its codes. The stand-in on a CPU has the grid of each format, but
computes products in fp32 and runs no kernel.
"""

import importlib
import os
from importlib.util import find_spec
from typing import Any, NamedTuple

from scripts.gpu_check.megatron_runs import require_equal, run_pretrain, training_flags
from scripts.gpu_check.outcome import CheckFailed, CheckSkipped, Target
from scripts.testbed.megatron_flags import shape_flags, size_flags

STEPS, MICRO_BATCHES = 12, 2
# One update moves a weight by a step of its grid or by none.
TOLERANCE, FIRST_LOSS_TOLERANCE = 2e-2, 1e-5
_RUN_LIMIT_S = 120.0
_LIKE_ON_ALL_DEVICES = ("--bf16", "--attention-backend", "unfused", "--no-bias-swiglu-fusion")


class Recipe(NamedTuple):
    """One recipe of FP8 or FP4."""

    flags: tuple[str, ...]
    capability: tuple[int, int]
    own: tuple[str, ...] = ()


# fmt: off
RECIPES = {
    "tensorwise": Recipe(("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"), (8, 9),
                         ("--fp8-param-gather",)),
    "delayed": Recipe(("--fp8-format", "hybrid", "--fp8-recipe", "delayed",
                       "--fp8-amax-history-len", "4", "--fp8-amax-compute-algo", "max"), (8, 9)),
    "blockwise": Recipe(("--fp8-format", "e4m3", "--fp8-recipe", "blockwise"), (9, 0),
                        ("--fp8-param-gather",)),
    "mxfp8": Recipe(("--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"), (10, 0),
                    ("--fp8-param-gather",)),
    "nvfp4": Recipe(("--fp4-format", "e2m1", "--fp4-recipe", "nvfp4"), (10, 0),
                    ("--fp4-param-gather",)),
}
# fmt: on


def run(target: Target, number: int) -> dict[str, Any]:
    """number: of the recipe."""
    name, recipe = list(RECIPES.items())[number]
    _need(recipe.capability)
    ranks = min(2, target.num_gpus)
    # Layers whose sides are multiples of the largest block.
    wide = [] if target.is_large else shape_flags(layers=2, hidden=128, seq_length=128)
    base = training_flags(
        target, STEPS, MICRO_BATCHES * ranks, *recipe.flags, *wide, *_LIKE_ON_ALL_DEVICES
    )
    own = [*base, *recipe.own, *size_flags((ranks, ranks, ranks))]
    num_codes = compare_codes(name) if name in ("mxfp8", "nvfp4") else 0
    stock = run_pretrain(target, f"{name}_stock", ranks, base, _RUN_LIMIT_S)
    ours = run_pretrain(target, f"{name}_ours", ranks, own, _RUN_LIMIT_S)
    first = require_equal("first loss", ours.losses[:1], stock.losses[:1], FIRST_LOSS_TOLERANCE)
    return {
        "ranks": ranks,
        "codes compared": num_codes,
        "first loss apart": first,
        "losses apart": require_equal("losses", ours.losses, stock.losses, TOLERANCE),
        "stock step ms": 1e3 * stock.step_s,
        "step ratio": ours.step_s / stock.step_s,
    }


def compare_codes(name: str) -> int:
    """Return how many codes and scales of a weight the GPU makes again after a gather as codes.

    Raises CheckFailed if it makes others.
    """
    if preload := os.environ.get("GPU_CHECK_PRELOAD"):
        importlib.import_module(preload)
    import torch
    from transformer_engine.pytorch.tensor import mxfp8_tensor, nvfp4_tensor
    from transformer_engine_torch import DType

    from megatron_asynchzp.engine.comm.block_formats import BlockFormat, Mxfp8, Nvfp4

    if name == "mxfp8":
        quantizer: Any = mxfp8_tensor.MXFP8Quantizer(DType.kFloat8E4M3)
        forms: tuple[BlockFormat, ...] = Mxfp8(1, 32), Mxfp8(32, 1)
    else:
        quantizer = nvfp4_tensor.NVFP4Quantizer(with_2d_quantization=True)
        forms = Nvfp4(16, 16), Nvfp4(16, 16)
    made = torch.Generator().manual_seed(1)
    # Sides of which scales have no padding. Codes of rows and of columns have other values.
    sides = [torch.randint(-4, 1, (side,), generator=made) for side in (512, 1024)]
    weight = torch.randn(512, 1024, generator=made) * 2.0 ** (sides[0][:, None] + sides[1])
    weight, count = weight.bfloat16().cuda(), 0
    for direction, form in zip(("rowwise", "columnwise"), forms, strict=True):
        pair = quantizer(weight), quantizer(_gathered(weight, form))
        for part in ("data", "scale_inv"):
            before, after = (getattr(x, f"_{direction}_{part}").view(torch.uint8) for x in pair)
            if apart := int((before != after).sum()):
                raise CheckFailed(f"{form}: {apart} of {before.numel()} {direction} {part} differ")
            count += before.numel()
    return count


def _gathered(weight: Any, form: Any) -> Any:
    """Return a weight as a gather brings it that one rank sends itself."""
    from megatron_asynchzp.engine.comm.collectives import run_steps
    from megatron_asynchzp.engine.comm.low_precision_gather import LowPrecisionGather
    from megatron_asynchzp.engine.sharding.layout import FlatLayout

    layout, full = FlatLayout.build([("weight", weight.shape)], 1), weight.new_empty(weight.numel())
    gather = LowPrecisionGather(layout, 1, [0], form, lambda: True)
    run_steps(gather.steps(weight.view(-1), 0, full, []))
    return full.view(weight.shape)


def _need(least: tuple[int, int]) -> None:
    if find_spec("transformer_engine") is None:
        raise CheckSkipped('needs Transformer Engine: pip install "transformer_engine[pytorch]"')
    import torch

    found = torch.cuda.get_device_capability()
    if found < least:
        wanted, there = (".".join(map(str, one)) for one in (least, found))
        raise CheckSkipped(f"needs a GPU of compute capability {wanted}, this one has {there}")
