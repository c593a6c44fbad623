# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Check: as loopback, where half of each block's gradients appear, late, on a second stream."""

from dataclasses import replace
from typing import Any

import torch

from scripts.gpu_check.loopback import (
    LONGEST_DELAY_S,
    cases,
    choose_deterministic_kernels,
    run_cases,
    variants,
)
from scripts.gpu_check.outcome import Target


def run(target: Target) -> dict[str, Any]:
    choose_deterministic_kernels()
    plain = variants(target.is_large)["plain"]
    shape = replace(plain, has_side_stream=True, late_s=LONGEST_DELAY_S[target.device])
    chosen = [(case, shape) for case in cases(["side stream"])]
    return run_cases(chosen, torch.device(target.device))
