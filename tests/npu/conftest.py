# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks on emulated NPUs, with torch_npu's own wheel; skipped, with the reason, where it or the
libraries below it cannot be had."""

from collections.abc import Iterator

import pytest

from scripts.testbed.compiler import CompileError
from scripts.testbed.device.worlds import DeviceWorlds


@pytest.fixture(scope="session")
def npu_worlds() -> Iterator[DeviceWorlds]:
    try:
        served = DeviceWorlds(platform="npu")
    except CompileError as error:
        pytest.skip(f"no emulated NPU: {error}")
    with served:
        yield served
