# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The dry run of the launcher: `python -m megatron_asynchzp.launch SCRIPT ... --asynchzp-dry-run`.

Exit status: 0; 1 if a rank needs more than --asynchzp-device-gb; 2 for a run that cannot start.
"""

import os
import sys
from argparse import ArgumentError, ArgumentParser, Namespace
from pathlib import Path

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.arguments import add_dry_run_arguments

EXIT_TOO_LARGE = 1
_RANKS_PER_NODE = 8


def asked_of(arguments: list[str]) -> Namespace | None:
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_dry_run_arguments(parser)
    try:
        asked, _ = parser.parse_known_args(arguments)
    except ArgumentError as error:
        raise ConfigurationError(f"{error.argument_name}: {error.message}") from error
    if asked.asynchzp_dry_run is None:
        return None
    ranks, device_gb, fault = asked.asynchzp_dry_run, asked.asynchzp_device_gb, ""
    if ranks < 0:
        fault = f"--asynchzp-dry-run {ranks}: give a number of ranks above 0"
    elif device_gb is not None and not device_gb > 0:
        fault = f"--asynchzp-device-gb {device_gb:g}: give the GiB of one device"
    if fault:
        raise ConfigurationError(fault)
    return asked


def dry_run(script: Path, arguments: list[str], asked: Namespace) -> int:
    if os.environ.get("RANK", "0") != "0":  # started with torchrun all the same
        return 0
    # Only now: a wrong flag is reported without importing Megatron.
    from megatron_asynchzp.commands import memory_tables, pretended_world, stages

    ranks = asked.asynchzp_dry_run or int(os.environ.get("WORLD_SIZE", 0))
    ranks = ranks or pretended_world.fewest_ranks(arguments)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", _RANKS_PER_NODE))
    run = stages.dry_run_of_script(script, arguments, ranks, min(per_node, ranks))
    print(memory_tables.describe_run(run))
    print(memory_tables.tables(run))
    print(f"{run.parameters:,} parameters")
    if asked.asynchzp_device_gb is None:
        return 0
    device_nbytes = asked.asynchzp_device_gb * memory_tables.GIB
    print(memory_tables.verdict(run, device_nbytes), flush=True)
    if advice := memory_tables.budgets_to_keep(run, device_nbytes):
        print(advice, flush=True)
    fits = run.left_of(device_nbytes) >= 0
    if not fits:
        print(f"megatron_asynchzp: {memory_tables.verdict(run, device_nbytes)}", file=sys.stderr)
    return 0 if fits else EXIT_TOO_LARGE
