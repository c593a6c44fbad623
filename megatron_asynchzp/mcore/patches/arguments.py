# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Where Megatron reads and validates its arguments."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

import torch

from megatron_asynchzp.mcore.flags.arguments import DryRunStop, add_asynchzp_arguments
from megatron_asynchzp.mcore.flags.checks import check_is_rank, confirm_args, prepare_args
from megatron_asynchzp.mcore.flags.command_line import check_single_flags
from megatron_asynchzp.mcore.flags.pasa import PASA, add_pasa_arguments
from megatron_asynchzp.mcore.flags.rule_table import refuse_unsupported
from megatron_asynchzp.mcore.patches.patch import replaces
from megatron_asynchzp.mcore.process.platform import apply_platform_defaults
from megatron_asynchzp.mcore.run.planned import choose_sizes
from megatron_asynchzp.mcore.run.settings import Run


@replaces(
    "megatron.training.arguments.add_megatron_arguments",
    "parser",
    why="scripts that are not ours must understand our flags",
    drop_when="Megatron reads argument providers from entry points",
)
def add_arguments(original: Callable, parser: ArgumentParser) -> ArgumentParser:
    check_single_flags(sys.argv[1:])  # --yaml-cfg would drop our flags with all others
    return add_pasa_arguments(add_asynchzp_arguments(original(parser)))


@replaces(
    "megatron.training.arguments.validate_args",
    "args defaults",
    why="what asynchzp does not support is refused, and what it replaces is switched off, before "
    "Megatron's own checks act on it",
    drop_when="Megatron calls a hook of the plugin before and after its checks",
)
def validate_args(original: Callable, args: Namespace, defaults: dict = {}):  # noqa: B006, as in Megatron
    is_asynchzp = getattr(args, "use_asynchzp", False)
    if getattr(args, "use_pasa_attention", False):
        refuse_unsupported(args, PASA)
    if is_asynchzp and not torch.distributed.is_initialized():
        check_is_rank()
    lines = prepare_args(args) if is_asynchzp else []
    lines += apply_platform_defaults(args)
    result = original(args, defaults)
    if is_asynchzp:
        confirm_args(args)
        lines += choose_sizes(args)
    if args.rank == 0:
        for line in lines:
            print(f"megatron_asynchzp: {line}", flush=True)
    if getattr(args, "asynchzp_dry_run", None) is not None:
        raise DryRunStop(args)
    Run.begin(args)
    return result
