# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The checks of scripts/gpu_check on the emulated device, started as on a machine with GPUs: the
command knows nothing of the emulation."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu_check.table import CHECKS
from scripts.testbed.device.worlds import DeviceWorlds
from tests.support.selection import slow_unless

ROOT = Path(__file__).resolve().parents[2]
ON_ONE = [check.name for check in CHECKS if check.gpus == 1]
FAST = ["side_stream", "synchronisations"]


def run(folder: Path, num_devices: int, names: list[str], *laws: str) -> dict[str, dict]:
    """The rows of the result, by check."""
    result = folder / "result.json"
    # fmt: off
    command = [sys.executable, "-m", "scripts.testbed.device", "--devices", str(num_devices), *laws,
               "--", "-m", "scripts.gpu_check", "--only", ",".join(names),
               "--json", str(result), "--markdown", str(folder / "result.md")]
    # fmt: on
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.exists(), ended.stderr[-3000:]
    found = json.loads(result.read_text())
    assert found["machine"]["gpus"] == ["emulated CUDA device"] * num_devices
    rows = {row["check"]: row for row in found["checks"]}
    assert list(rows) == names
    assert ended.returncode == any(row["status"] == "failed" for row in rows.values())
    return rows


@pytest.mark.parametrize(
    ("num_devices", "names"),
    [
        slow_unless(True, 1, FAST, id="1, fast"),
        slow_unless(False, 1, [name for name in ON_ONE if name not in FAST], id="1"),
        slow_unless(False, 2, ["parity_2"], id="2"),
        slow_unless(False, 4, ["parity_4"], id="4"),
        slow_unless(False, 4, ["model_parallel"], id="4, model parallel"),
    ],
)
def test_every_check_passes_on_the_emulated_device(
    worlds: DeviceWorlds, tmp_path: Path, num_devices: int, names: list[str]
):
    rows = run(tmp_path, num_devices, names)
    assert [row for row in rows.values() if row["status"] != "passed"] == []
