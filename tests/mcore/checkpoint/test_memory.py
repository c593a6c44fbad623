# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Saving and loading take no more memory than a rank's shards once more, and one unit: nobody holds
a whole model, in Megatron's own pretrain() and by the count of every tensor."""

import shutil
from collections.abc import Callable
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_asynchzp.testbed.megatron_runs import BF16, gpt_args, run_pretrain
from megatron_asynchzp.testbed.memory import install_memory_count
from tests.support.world import on_ranks

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("c++")), reason="needs a C++ compiler"
)


@contextmanager
def measured(count: Any, name: str, peaks: list[int]):
    """Note how far above its start each call of guard.`name` gets, in bytes."""
    from megatron_asynchzp.mcore.checkpoint import guard

    original: Callable = getattr(guard, name)

    @wraps(original)
    def measuring(*args: Any) -> Any:
        before = count.live_nbytes
        count.reset_peak()
        result = original(*args)
        peaks.append(count.peak_nbytes - before)
        return result

    with mock.patch.object(guard, name, measuring):
        yield


def sizes_of(chunks: list, optimizer: Any) -> tuple[int, int, int]:
    """Bytes of this rank's shards in a checkpoint, of the largest unit, of all ranks' shards."""
    units = [unit for chunk in chunks for unit in chunk.units]
    own = sum(unit.model_param.view(unit.optim_range).nbytes for unit in units)
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for fragment, state in one.optimizer.state.items():
            own += sum(value.nbytes for value in state.values() if value.shape == fragment.shape)
    own += sum(unit.main_param.storage.nbytes for unit in units if not unit.is_main_param_aliased)
    largest = max(unit.layout.padded_numel * unit.dtype.itemsize for unit in units)
    return own, largest, own * dist.get_world_size()


def save_and_load(flags: list[str], folder: Path) -> tuple:
    count, saves, loads = install_memory_count(), [], []
    argv = gpt_args("--use-asynchzp", "--num-layers", "4", *flags, "--save-interval", "2")
    with measured(count, "guard_save_checkpoint", saves):
        run_pretrain([*argv, "--train-iters", "4", "--save", str(folder)])
    with measured(count, "guard_load_checkpoint", loads):
        load = ("--load", str(folder), "--override-opt_param-scheduler")
        run = run_pretrain([*argv, *load], inspect=sizes_of)
    count.uninstall()
    return saves, loads, run.inspected


@pytest.mark.parametrize("flags", [[], BF16], ids=["fp32", "bf16"])
def test_no_rank_allocates_more_than_its_shards_and_a_unit(flags, tmp_path):
    for saves, loads, (own, unit, everything) in on_ranks(save_and_load, 2, flags, tmp_path):
        assert len(saves) == 2 and len(loads) == 1
        output = f"save {saves}, load {loads}, shards {own}, unit {unit}, all {everything}"
        print(output)
        assert max(saves + loads) <= own + unit < 0.8 * everything, output
