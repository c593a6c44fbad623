# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron with Transformer Engine's own layers and fused optimizers, over the stand-in for its
extension, on the emulated device: as stock DDP trains it, in bf16 and in FP8."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from scripts.testbed.device.delays import Delays
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.megatron_flags import MIXTURE_OF_EXPERTS, size_flags
from scripts.testbed.megatron_runs import RunRecord, Steps, gpt_args, on_device, run_pretrain

pytestmark = pytest.mark.slow

# fmt: off
RECIPES = {
    "bf16": ["--bf16"],
    "tensorwise": ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"],
    "delayed": ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "delayed",
                "--fp8-amax-history-len", "4", "--fp8-amax-compute-algo", "max"],
    "blockwise": ["--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "blockwise"],
    "tensorwise of fp32": ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"],
    "mxfp8": ["--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"],
}
BASE = gpt_args("--train-iters", "4", "--hidden-size", "128",
                "--attention-backend", "unfused", "--no-bias-swiglu-fusion")
GROUPED_EXPERTS = [*MIXTURE_OF_EXPERTS, "--moe-grouped-gemm"]
# fmt: on
BLACKWELL = {"ASYNCHZP_DEVICE_MAJOR": "10"}
# Each law of delay with other sizes.
OURS = [
    (Delays(), (2, 2, 2)),
    (Delays("uniform", 1), (2, 2, 2)),
    (Delays("slow-stream", 2), (1, 1, 2)),
    (Delays("slow-rank", 3), (1, 2, 2)),
    (Delays("on-demand", 4, 200), (2, 2, 2)),
]


class Run(NamedTuple):
    """fp8: whether a layer quantised anything; copies: bytes of quantised weights at the end."""

    steps: Steps
    fp8: bool
    copies: int
    log: str


def quantised(model_chunks: list, optimizer: Any) -> tuple[bool, int]:
    layers = [layer for chunk in model_chunks for layer in chunk.modules()]
    kept = [one for layer in layers for one in getattr(layer, "_fp8_workspaces", {}).values()]
    parts = [part for one in kept for part in vars(one).values() if isinstance(part, torch.Tensor)]
    return any(getattr(layer, "fp8", False) for layer in layers), sum(p.nbytes for p in parts)


def train(argv: Sequence[str]) -> Run:
    with on_device(uses_te=True):
        record: RunRecord = run_pretrain([*argv], inspect=quantised)
    return Run(record.losses_and_norms, *record.inspected, record.log)


def train_beside(line: Sequence[str]) -> list[Run]:
    """Stock DDP, and each of OURS."""
    from scripts.testbed.device import inside

    found = [train(line)]
    for law, sizes in OURS:
        inside.set_delays(law, dist.get_rank(), dist.get_world_size())
        found.append(train([*line, *size_flags(sizes)]))
    return found


def env_of(recipe: str) -> dict[str, str]:
    return BLACKWELL if recipe == "mxfp8" else {}


def equal(ours: Steps, stock: Steps) -> bool:
    """Losses bit for bit; norms, whose squares are summed by fragments, within 1e-6."""
    return [loss for loss, _ in ours] == [loss for loss, _ in stock] and all(
        mine == pytest.approx(other, rel=1e-6) for (_, mine), (_, other) in zip(ours, stock)
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_are_those_of_stock_ddp_bit_for_bit_under_every_law_of_delay(
    te_worlds: DeviceWorlds, recipe: str
):
    line = [*BASE, *RECIPES[recipe]]
    stock, *ours = te_worlds.run(train_beside, 2, line, timeout_s=590, env=env_of(recipe))[0]
    assert stock.fp8 == (recipe != "bf16")
    assert len(stock.steps) == 4 and len({loss for loss, _ in stock.steps}) == 4
    for run in ours:
        assert run.fp8 == stock.fp8
        assert equal(run.steps, stock.steps)
