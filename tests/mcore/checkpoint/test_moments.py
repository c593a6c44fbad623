# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints keep Adam's moments in the dtype in which the run stores them, for any shard sizes;
a run with another dtype converts them: from bf16 exactly, to bf16 rounded to nearest."""

from pathlib import Path

import pytest
import torch

from scripts.testbed.megatron_flags import BF16
from tests.support.checkpoints import Job, find_differences, read_tensors
from tests.support.world import on_ranks

pytestmark = pytest.mark.slow

# fmt: off
ROUNDED = (*BF16, "--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16",
           "--exp-avg-sq-dtype", "bf16", "--main-grads-dtype", "bf16")
# fmt: on
_MOMENTS = ("optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")


def _moments(tensors: dict) -> dict[str, torch.Tensor]:
    return {key: value for key, value in tensors.items() if key.startswith(_MOMENTS)}


def _converted(source: dict, target: dict) -> list[str]:
    """Moments of `target` that are not those of `source` in its dtype; anything else that differs.
    The steps between are none."""
    wrong = [
        key
        for key, value in _moments(source).items()
        if not torch.equal(value.to(target[key].dtype), target[key])
    ]
    rest = {key: value for key, value in source.items() if not key.startswith(_MOMENTS)}
    return wrong + find_differences(rest, target)


def save_and_move(folder: Path) -> dict[str, object]:
    """bf16 moments on 2 ranks: moved into other sizes, into fp32, and from fp32."""
    rounded, other = Job((2, 1, 2), ROUNDED), Job((1, 2, 2), ROUNDED)
    exact = Job((1, 1, 2), tuple(BF16))
    rounded.train_and_save(folder / "rounded")
    other.load_and_save(folder / "rounded", folder / "moved")
    exact.load_and_save(folder / "rounded", folder / "widened")
    exact.train_and_save(folder / "exact")
    rounded.load_and_save(folder / "exact", folder / "narrowed")
    names = ("rounded", "moved", "widened", "exact", "narrowed")
    read = {name: read_tensors(folder / name) for name in names}
    return {
        "dtypes": {name: {v.dtype for v in _moments(read[name]).values()} for name in names},
        "moved": find_differences(read["rounded"], read["moved"]),
        "widened": _converted(read["rounded"], read["widened"]),
        "narrowed": _converted(read["exact"], read["narrowed"]),
    }


def test_moments_in_bf16_are_resharded_and_converted(tmp_path):
    for found in on_ranks(save_and_move, 2, tmp_path):
        bf16, fp32 = {torch.bfloat16}, {torch.float32}
        expected = {"rounded": bf16, "moved": bf16, "widened": fp32, "exact": fp32}
        assert found["dtypes"] == expected | {"narrowed": bf16}
        assert found["moved"] == found["widened"] == found["narrowed"] == []
