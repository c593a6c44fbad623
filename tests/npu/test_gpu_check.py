# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The checks of scripts/gpu_check on emulated NPUs, started as on a machine with NPUs: the command
knows nothing of the emulation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu_check.process import ROOT
from scripts.gpu_check.table import CHECKS, Check
from scripts.testbed.compiler import CompileError
from scripts.testbed.device.platforms import environment


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_every_check_passes_on_emulated_npus_or_names_why_it_is_not_for_them(
    tmp_path: Path, check: Check
):
    try:
        emulated = environment(check.gpus, platform="npu")
    except CompileError as error:
        pytest.skip(f"no emulated NPU: {error}")
    path = os.pathsep.join([str(ROOT), emulated["PYTHONPATH"]])
    env = os.environ | emulated | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    env["ASYNCHZP_DEVICE_WATCH"] = "1"
    result = tmp_path / "result.json"
    # fmt: off
    command = [sys.executable, "-m", "scripts.gpu_check", "--only", check.name,
               "--json", str(result), "--markdown", str(tmp_path / "result.md")]
    # fmt: on
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.exists(), ended.stderr[-3000:]
    found = json.loads(result.read_text())
    assert found["machine"]["gpus"] == ["Ascend910B1"] * check.gpus
    [row] = found["checks"]
    if check.not_on_npus:
        assert (row["status"], row["reason"]) == ("skipped", f"not for NPUs: {check.not_on_npus}")
    else:
        assert row["status"] == "passed", row
