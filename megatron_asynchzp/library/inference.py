# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Leaves torch.inference_mode, because a later step cannot use tensors that were made in it."""

from typing import Any

import torch


class outside_inference(torch.inference_mode):
    """Context and decorator that leaves torch.inference_mode, and nothing else.

    It is on each public method that reaches the engine; generators leave it at each step.
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


@outside_inference()
def make_writable(optimizer: torch.optim.Optimizer) -> None:
    """Replace the states and settings that were made in inference mode, by an update or a load."""
    tables: list[dict[str, Any]] = [*optimizer.state.values(), *optimizer.param_groups]
    for table in tables:
        for key, value in table.items():
            if isinstance(value, torch.Tensor) and value.is_inference():
                table[key] = value.clone()
