# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks on the emulated device for the tests of this folder; skipped, with the reason, where it
cannot be built."""

from collections.abc import Iterator

import pytest

from scripts.testbed.compiler import CompileError
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.te.environment import te_folder


@pytest.fixture(scope="session")
def worlds() -> Iterator[DeviceWorlds]:
    try:
        served = DeviceWorlds()
    except CompileError as error:
        pytest.skip(f"no emulated device: {error}")
    with served:
        yield served


@pytest.fixture(scope="session")
def te_worlds() -> Iterator[DeviceWorlds]:
    """With Transformer Engine's own Python, and Megatron that has found it."""
    try:
        te_folder()
        served = DeviceWorlds(["scripts.testbed.te.preload"])
    except CompileError as error:
        pytest.skip(str(error))
    with served:
        yield served
