# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Attention stands alone: nothing heavy or device-specific is loaded with it, and the ZeRO engine
does not import it. What it imports itself is in tests/architecture."""

import subprocess
import sys

from tests.architecture.test_floors import imported_modules, sources

_HEAVY = ("megatron", "triton", "torch_npu", "flash_attn", "transformer_engine", "matplotlib")


def test_importing_attention_loads_no_vendor_no_triton_and_no_megatron():
    code = (
        "import sys; import torch; before = set(sys.modules); "
        "from megatron_asynchzp.attention import pasa, delegate, vendors, npu, inspect, capture; "
        f"print([m for m in {_HEAVY} if m in set(sys.modules) - before])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "[]"


def test_the_engine_and_the_planner_do_not_import_attention():
    for path, part in sources():
        if part in ("sharding", "comm", "zero", "planner"):
            modules = imported_modules(path)
            assert not any(one.startswith("megatron_asynchzp.attention") for one in modules), path
