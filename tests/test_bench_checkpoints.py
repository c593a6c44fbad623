# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of checkpoints measures by: the check that a load brought back what was saved,
and memory; and its tables."""

from importlib import import_module

import pytest
import torch

from scripts.bench import checkpoint_turn
from scripts.bench.checkpoint_turn import fingerprint
from scripts.report.checkpoint_table import tables
from scripts.testbed.memory import ResidentMemory

MIB = 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fingerprint_sees_one_bit_and_an_exchange(dtype):
    values = torch.randn(5, 7).to(dtype)
    before = fingerprint([values])
    assert fingerprint([values.clone()]) == before
    changed = values.clone()
    changed.view(-1).view(torch.int16)[3] ^= 1
    assert fingerprint([changed]) != before
    assert fingerprint([values.flip(0)]) != before


def test_the_resident_peak_counts_what_was_freed_again():
    memory = ResidentMemory()
    block = bytearray(64 * MIB)
    del block
    peak = memory.peak()
    assert 60 * MIB < peak.beyond_nbytes < 80 * MIB
    assert ResidentMemory().peak().beyond_nbytes < 30 * MIB


def record(contender: str, *seconds: float) -> dict:
    rest = {"resident_nbytes": 2 * MIB, "total_nbytes": 100 * MIB, "tensor_nbytes": MIB}
    rest |= {"foreign_cpu": 0.25, "parts_s": {}}
    names = ("first save", "save 2", "save 3", "cold load", "load 2")
    acts = {name: rest | {"seconds": one} for name, one in zip(names, seconds, strict=True)}
    return {"contender": contender, "acts": acts, "disk_nbytes": 10 * MIB, "num_files": 6}


def test_the_tables_pool_later_saves():
    ours = record("AsyncHZP 2,2,4", 1.0, 2.0, 2.0, 1.0, 1.2)
    output = tables([record("stock DDP", 9.0, 1.0, 3.0, 2.0, 1.0), ours])
    assert "others used 25% of the machine" in output
    times = "| stock DDP | 9.00 (9.00 to 9.00) | 2.00 (1.00 to 3.00) | 2.00 (2.00 to 2.00) |"
    assert times in output
    assert "| stock DDP | 1 | 1 |" in output


def test_what_is_timed_within_a_save_and_a_load_exists():
    for module, names in checkpoint_turn.TIMED_PARTS.items():
        assert all(callable(getattr(import_module(module), name)) for name in names)
