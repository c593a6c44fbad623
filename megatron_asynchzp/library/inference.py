# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Leaves torch.inference_mode, because a later step cannot use tensors that were made in it."""

from typing import Any

import torch


class outside_inference(torch.inference_mode):
    """Context and decorator that leaves torch.inference_mode, and nothing else.

    Each method through which a caller reaches the engine has it; generators leave it at each step.
    """

    def __init__(self, mode: bool = False):
        super().__init__(mode)
        self._leaves = False

    def __enter__(self) -> None:
        self._leaves = torch.is_inference_mode_enabled()
        if self._leaves:
            super().__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._leaves:
            super().__exit__(*error)
