# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A node that was started with other flags ends the start of every rank, in one line."""

import time
from argparse import Namespace

import pytest

from megatron_asynchzp.mcore.run import agreement
from scripts.testbed.launches import Launch
from tests.support.selection import slow_unless
from tests.test_launch import _OWN_SCRIPT, TOY

SOON_S = 150.0
# What the second of two ranks is given besides, and the begin of the line.
OTHER = {
    "sizes": ("--asynchzp-grad-shard-size 1", {}, "--asynchzp-grad-shard-size is 2 on rank 0"),
    "a rate": ("--lr 2e-3", {}, "--lr is 0.001 on rank 0 and 0.002 on rank 1"),
    "a norm": ("--clip-grad 0.5", {}, "--clip-grad is 1.0 on rank 0 and 0.5 on rank 1"),
    "a group": ("--tensor-model-parallel-size 2", {}, "--tensor-model-parallel-size is 1"),
    "no check": ("--no-asynchzp-check-order", {}, "--no-asynchzp-check-order is True on rank 0"),
    "a variable": ("", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "CUDA_DEVICE_MAX_CONNECTIONS is"),
}


@pytest.mark.parametrize("name", [slow_unless(name == "sizes", name) for name in OTHER])
def test_a_rank_with_other_flags_is_named_before_anything_waits(tmp_path, name):
    flags, variables, begin = OTHER[name]
    line = f"{TOY} --use-asynchzp --asynchzp-device cpu"
    start_s = time.monotonic()
    # The first rank of a second node.
    of_last = (flags, variables | {"LOCAL_RANK": "0"})
    run = Launch(tmp_path, _OWN_SCRIPT, line, 2, of_last=of_last)
    ended = run.end(SOON_S)
    assert time.monotonic() - start_s < SOON_S
    assert [one.status for one in ended] == [2, 2], ended[0].text[-2000:]
    for one in ended:
        assert one.own_lines[-1].startswith(f"megatron_asynchzp: {begin}"), one.own_lines[-1]
        assert "Traceback" not in one.text


def test_of_datasets_in_other_places_the_weights_and_the_number_are_compared(monkeypatch):
    told = []
    monkeypatch.setattr(agreement, "check_same_settings", lambda flags, *_: told.append(flags))
    for paths in (
        ["0.3", "/a/x", "7e-1", "/a/y"],
        ["0.3", "/b/x", "7e-1", "/b/other"],
        ["0.4", "/a/x", "7e-1", "/a/y"],
        ["0.3", "/a/x"],
        ["/a/x", "/a/y", "0.3", "7e-1"],
    ):
        agreement.refuse_other_flags(Namespace(data_path=paths, rank=len(told), lr=1e-3))
    first, elsewhere, *others = told
    assert first == elsewhere and first not in others


@pytest.mark.slow
def test_places_and_reports_may_differ_between_nodes(tmp_path):
    line = f"{TOY} --use-asynchzp --asynchzp-device cpu"
    flags = f"--tensorboard-dir {tmp_path}/a --wandb-exp-name b --profile-step-start 3"
    of_last = (flags, {"NVTE_DEBUG": "1"})
    ended = Launch(tmp_path, _OWN_SCRIPT, line, 2, of_last=of_last).end(SOON_S)
    assert [one.status for one in ended] == [0, 0], ended[0].text[-2000:]
