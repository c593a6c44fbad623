# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Frameworks on the emulated device: with AsyncHZP they train what stock DDP trains on the CPU, and
no delay changes a bit of it.

Stock DDP of the distributed optimizer copies parameters on one stream and frees them on another,
which the emulated device does not forgive.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from scripts.testbed.compiler import CompileError
from scripts.testbed.device.delays import Delays
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.megatron_runs import on_device
from tests.door import bridge_run, swift_run, test_bridge, test_swift
from tests.door.environment import SIZES, check_equal, folder_of

LAWS = [Delays(), Delays("uniform", 1), Delays("slow-stream", 2)]

FROM_SOURCE = {"is_initialized_from_source": True}  # a device draws other weights than a CPU


@contextmanager
def worlds_with(packages: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceWorlds]:
    """Ranks that find the packages first."""
    monkeypatch.syspath_prepend(str(folder_of(packages.split())))
    try:
        served = DeviceWorlds(["scripts.testbed.te.preload"])
    except CompileError as error:
        pytest.skip(str(error))

    with served:
        yield served


def sft(out: Path, words: list[str]) -> None:
    # ms-swift destroys the process group of the world, which the world does by itself.
    with on_device(uses_te=True), mock.patch.object(dist, "destroy_process_group"):
        swift_run.train(out, words)


@pytest.mark.slow
def test_ms_swift_trains_with_the_same_bits_under_every_law(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kind = ["--tuner_type", "full", "--finetune", "true"]
    with worlds_with(test_swift.PACKAGES, monkeypatch) as worlds:

        def run(law: Delays) -> dict[str, Any]:
            out = tmp_path / f"{law.law}.json"
            words = test_swift.command(tmp_path, law.law, *kind, "--ddp_backend", "nccl")
            worlds.run(sft, 2, out, words, delays=law, timeout_s=500, env=SIZES)
            return json.loads(out.read_text())

        first, *others = map(run, LAWS)
    folder = folder_of(test_swift.PACKAGES.split())
    stock = test_swift.sft(folder, tmp_path, "stock", *kind, ours=False)
    check_equal(stock, first)
    assert [other["steps"] for other in others] == [first["steps"]] * len(others)


def train_under(laws: list[Delays], source: str) -> list[dict[str, Any]]:
    """What a recipe of Megatron Bridge trains under each law."""
    from scripts.testbed.device import inside

    runs = []
    with on_device(uses_te=True):
        bridge_run.prepare_bridge()
        for law in laws:
            inside.set_delays(law, dist.get_rank(), dist.get_world_size())
            runs.append(bridge_run.train("llama", "ours", source, **FROM_SOURCE))
    return runs


@pytest.mark.slow
def test_megatron_bridge_trains_with_the_same_bits_under_every_law(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = test_bridge.model_of(tmp_path, "llama")
    with worlds_with(test_bridge.PACKAGES, monkeypatch) as worlds:
        runs = worlds.run(train_under, 2, LAWS, source, timeout_s=400, env=SIZES)
    first, *others = runs[-1]
    stock = test_bridge.training(tmp_path, "llama", "stock", **FROM_SOURCE)
    [stock] = test_bridge.call(tmp_path, stock)
    check_equal(stock, first)
    assert [other["steps"] for other in others] == [first["steps"]] * len(others)
