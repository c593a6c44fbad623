# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Which part of the optimizer states is on the host between two updates: Megatron's flags of its
hybrid optimizer."""

from argparse import Namespace

from megatron_asynchzp.errors import ConfigurationError

_OF_HYBRID = {
    "use_torch_optimizer_for_cpu_offload": "updates are on the device, by the optimizer of a run "
    "without offloading",
    "overlap_cpu_optimizer_d2h_h2d": "copies always run beside the updates of other units",
}


def take_offload(args: Namespace) -> list[str]:
    """Move the part to `asynchzp_offload` (0 for none) and switch Megatron's own optimizer off;
    returns the lines to log. Raises ConfigurationError for a part that cannot be.

    args: before Megatron's validation.
    """
    args.asynchzp_offload = 0.0
    if not args.optimizer_cpu_offload:
        return []
    fraction = args.optimizer_offload_fraction
    if not 0 <= fraction <= 1:
        raise ConfigurationError(
            f"--optimizer-offload-fraction {fraction:g} is no part of the optimizer states; give a "
            "number from 0 to 1"
        )
    args.optimizer_cpu_offload, args.asynchzp_offload = False, fraction
    lines = [
        f"optimizer_cpu_offload = False: {fraction:.0%} of the optimizer states, in whole units, "
        "are in pinned memory of the host between two updates, and are updated on the device "
        "(--optimizer-cpu-offload)"
    ]
    for name, why in _OF_HYBRID.items():
        if getattr(args, name, False):
            setattr(args, name, False)
            lines.append(f"{name} = False: {why} (--{name.replace('_', '-')})")
    return lines


def offload_of(args: Namespace) -> float:
    """The part that `take_offload` has found; 0 for a run without --use-asynchzp."""
    return getattr(args, "asynchzp_offload", 0.0)
