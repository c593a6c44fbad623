# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks on emulated NPUs, with torch_npu's own wheel; skipped, with the reason, where it or the
libraries below it cannot be had."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from scripts.testbed.compiler import CompileError
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.train import on_ascend


@pytest.fixture(scope="session")
def npu_worlds() -> Iterator[DeviceWorlds]:
    try:
        served = DeviceWorlds(platform="npu")
    except CompileError as error:
        pytest.skip(f"no emulated NPU: {error}")
    with served:
        yield served


def after_install(fn: Callable, *args: Any) -> Any:
    on_ascend.install()  # torch.cuda is torch.npu from here on
    return fn(*args)


class StartScriptWorlds:
    """Worlds whose ranks begin with what the start script brings."""

    def __init__(self, worlds: DeviceWorlds):
        self._worlds = worlds

    def run(self, fn: Callable, world_size: int, *args: Any, **options: Any) -> list[Any]:
        return self._worlds.run(partial(after_install, fn), world_size, *args, **options)


@pytest.fixture
def by_start_script(npu_worlds: DeviceWorlds) -> StartScriptWorlds:
    return StartScriptWorlds(npu_worlds)
