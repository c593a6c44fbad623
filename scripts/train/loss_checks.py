# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The checks of a loss that Megatron leaves to the training script."""

from functools import partial
from typing import Any

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args

_MANY_TIMES = 10  # as in Megatron's own script


def check_loss(loss: torch.Tensor) -> None:
    """Hand the loss of a micro-batch to the rerun machine, as far as the flags ask for it."""
    args: Any = get_args()
    machine = get_rerun_state_machine()
    is_large = partial(machine.is_unexpectedly_large, threshold=_MANY_TIMES, context="loss")
    checks: list[tuple[Any, str, bool]] = []
    if args.check_for_nan_in_loss_and_grad:
        checks += [(torch.isnan, "NaN", True), (torch.isinf, "infinity", True)]
    if args.check_for_spiky_loss:
        checks += [(is_large, "unexpectedly large", False)]
    for is_bad, what, is_fatal in checks:
        machine.validate_result(
            result=loss,
            rejection_func=is_bad,
            message=f"the loss of this micro-batch is {what}",
            tolerance=0.0,  # the forward pass is deterministic
            fatal=is_fatal,
        )
