# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What ranks compare of their settings, and how a difference is told."""

import functools

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp.engine.comm.agreement import PATH, check_same_settings, text_of
from megatron_asynchzp.errors import ConfigurationError
from scripts.testbed.ranks import run_ranks


def test_values_are_the_same_text_in_every_process():
    assert text_of(torch.nn.functional.relu) == "relu" and text_of(torch.optim.Adam.step)
    assert text_of(functools.partial(print, 1)) == "partial"
    assert text_of(["/a/b", (1, "c")]) == f"[{PATH}, [1, c]]"
    assert "0x" not in text_of(object())


LONG = "a" * 100


def told_difference() -> str:
    value = LONG + ("x" if dist.get_rank() else "y") + LONG
    settings = {"same": "1", "layers": value}
    with pytest.raises(ConfigurationError) as refused:
        check_same_settings(settings, None, torch.device("cpu"), "start again")
    return str(refused.value)


def test_of_long_values_the_part_around_the_first_difference_is_told():
    """60 characters, half of them before it."""
    part = "...{}{}{}..."
    ours, theirs = (part.format("a" * 30, own, "a" * 29) for own in "yx")
    expected = f"layers is {ours} on rank 0 and {theirs} on rank 1; start again"
    assert run_ranks(told_difference, 2) == [expected] * 2
