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
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_asynchzp.hf.export_model import export_model
from megatron_asynchzp.hf.import_model import import_model
from megatron_asynchzp.mcore.checkpoint import load_guard, save_guard
from scripts.testbed.megatron_flags import BF16, UNTIED, size_flags
from scripts.testbed.megatron_runs import gpt_args, run_pretrain
from scripts.testbed.memory import install_memory_count
from tests.support.model_starts import differing, start
from tests.support.selection import slow_unless
from tests.support.world import on_ranks

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("c++")), reason="needs a C++ compiler"
)


@contextmanager
def measured(count: Any, guard: Any, name: str, peaks: list[int], beyond: list[int] | None = None):
    """Note how far above its start each call of guard.`name` gets, in bytes; and how far above both
    its start and its end."""
    original: Callable = getattr(guard, name)

    @wraps(original)
    def measuring(*args: Any) -> Any:
        before = count.live_nbytes
        count.reset_peak()
        result = original(*args)
        peaks.append(count.peak_nbytes - before)
        if beyond is not None:
            beyond.append(count.peak_nbytes - max(before, count.live_nbytes))
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
    with measured(count, save_guard, "guard_save_checkpoint", saves):
        run_pretrain([*argv, "--train-iters", "4", "--save", str(folder)])
    with measured(count, load_guard, "guard_load_checkpoint", loads):
        load = ("--load", str(folder), "--override-opt_param-scheduler")
        run = run_pretrain([*argv, *load], inspect=sizes_of)
    count.uninstall()
    return saves, loads, run.inspected


@pytest.mark.parametrize(
    "flags", [slow_unless(False, [], id="fp32"), slow_unless(True, BF16, id="bf16")]
)
def test_no_rank_allocates_more_than_its_shards_and_a_unit(flags, tmp_path):
    for saves, loads, (own, unit, everything) in on_ranks(save_and_load, 2, flags, tmp_path):
        assert len(saves) == 2 and len(loads) == 1
        output = f"save {saves}, load {loads}, shards {own}, unit {unit}, all {everything}"
        print(output)
        assert max(saves + loads) <= own + unit < 0.8 * everything, output


# --- loading, whatever wrote the checkpoint -----------------------------------------------------

# fmt: off
_LLAMA = ["--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear",
          "--position-embedding-type", "rope", *UNTIED, "--hidden-size", "128", "--num-layers", "6",
          "--lr-warmup-iters", "0", "--ckpt-format", "torch_dist", "--global-batch-size", "2"]
# fmt: on
_WEIGHTS_ONLY = ["--no-load-optim", "--no-load-rng", "--finetune"]


def largest_piece(folder: Path) -> int:
    """Bytes of the largest piece of a tensor that is stored as one in the newest checkpoint."""
    newest = max(path for path in folder.iterdir() if path.is_dir() and path.name != "locks")
    entries = FileSystemReader(newest).read_metadata().state_dict_metadata.values()
    return max(
        chunk.sizes.numel() * entry.properties.dtype.itemsize
        for entry in entries
        if isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks
    )


def load_from(source: str, flags: list[str], folder: Path) -> tuple:
    """Write a checkpoint as `source` and load it; bytes beyond those before and after, of the
    largest unit and piece; parameters that differ from those that stock Megatron loads."""
    argv = [*gpt_args(*_LLAMA, *flags), "--train-iters", "1"]
    ours = size_flags((dist.get_world_size(),) * 3)
    writer = [*ours] if source == "ours" else ["--use-distributed-optimizer"]
    writer += ["--dist-ckpt-optim-fully-reshardable"] if source == "stock" else []
    run_pretrain([*argv, *writer, "--save", str(folder / "written"), "--save-interval", "1"])
    load = ["--load", str(folder / "written")]
    if source == "hf":
        if dist.get_rank() == 0:
            export_model(folder / "written", folder / "hf")
            import_model(folder / "hf", folder / "imported")
        dist.barrier()
        load = ["--load", str(folder / "imported"), *_WEIGHTS_ONLY]
    count, extra = install_memory_count(), []
    with measured(count, load_guard, "guard_load_checkpoint", [], extra):
        loaded = start([*argv, *ours, *load, "--override-opt_param-scheduler"])
    count.uninstall()
    stock = start([*argv, *load, *_WEIGHTS_ONLY])
    (beyond,) = extra
    buffer = largest_piece(Path(load[1]))
    return beyond, loaded.memory.largest_unit, buffer, differing(loaded.weights, stock.weights)


@pytest.mark.parametrize("flags", [BF16, pytest.param([], marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    "source", [slow_unless(one == "stock", one) for one in ("ours", "stock", "hf")]
)
def test_loading_takes_a_unit_and_a_read_buffer_beside_the_states(source, flags, tmp_path):
    for beyond, unit, buffer, different in on_ranks(load_from, 2, source, flags, tmp_path):
        assert different == []
        assert 0 < beyond <= 1.05 * (unit + buffer), (beyond, unit, buffer)
