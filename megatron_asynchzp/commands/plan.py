# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Finds the shard sizes, prefetch depth, micro-batch size and recomputation of the fastest step.

    asynchzp plan --cluster h100 --ranks 256 -- pretrain_gpt.py <your flags>

It starts no ranks and needs no device. Exit status: 0; 1 if no plan fits into the memory; 2 for a
command that cannot be planned.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_asynchzp.commands import plan_table
from megatron_asynchzp.commands.launch_words import (
    DEFAULT_SCRIPT,
    check_script,
    parse_before_dashes,
)
from megatron_asynchzp.errors import ConfigurationError, OneLineParser, no_file_at, require
from megatron_asynchzp.mcore.flags.arguments import schedule_of
from megatron_asynchzp.mcore.process.refusal import refused_in_one_line
from megatron_asynchzp.planner import explain
from megatron_asynchzp.planner.activations import Recompute, RunShape
from megatron_asynchzp.planner.cluster import GIB, Cluster
from megatron_asynchzp.planner.cluster_files import cluster_names, load_cluster
from megatron_asynchzp.planner.search import Outcome, Progress
from megatron_asynchzp.planner.space import VARIED, Space

EXIT_TOO_LARGE = 1
_OURS = ("--use-asynchzp",)  # the plan is for a run with it, of a stock command line too
_KEPT = ("micro-batch-size", "recompute")
_DEPTHS = (1, 2)  # to try, in addition to that of the flags


def parse_args(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    parser = OneLineParser(
        prog="asynchzp plan",
        usage="%(prog)s --cluster NAME_OR_FILE [flags] -- SCRIPT [flags of SCRIPT]",
        description="Find the sizes with which a Megatron command line is fastest on a cluster.",
    )
    names = ", ".join(cluster_names())
    add = parser.add_argument
    add("--cluster", required=True, metavar="NAME_OR_FILE", help=f"{names}, or a file of yours")
    add("--ranks", type=int, metavar="N", help="ranks of the run (default: the cluster's)")
    add("--vary", nargs="+", default=[], choices=VARIED, help="parallel sizes to choose too")
    add("--keep", nargs="+", default=[], choices=_KEPT, help="settings that stay as given")
    add("--rows", type=int, default=10, metavar="N", help="plans in the table (default 10)")
    add("--picture", type=Path, metavar="PNG", help="time against memory, and the best timeline")
    add("--trace", type=Path, metavar="JSON", help="the best plan's step, for Perfetto")
    asked, command = parse_before_dashes(parser, argv)
    if not command:
        parser.error(
            "give the training command after --, as in: -- pretrain_gpt.py --num-layers 32"
        )
    for flag, number in (("--ranks", asked.ranks), ("--rows", asked.rows)):
        if number is not None and number < 1:
            parser.error(f"{flag} {number}: give a number of at least 1")
    for path, suffix in ((asked.picture, ".png"), (asked.trace, ".json")):
        if path is not None and path.suffix.lower() != suffix:
            parser.error(f"{path}: name a {suffix} file")
        if path is not None and (fault := no_file_at(path)):
            raise ConfigurationError(f"{path}: {fault}")
    return asked, command


def space_of(setting: RunShape, args: Namespace, asked: Namespace, cluster: Cluster) -> Space:
    from megatron_asynchzp.mcore.run import planned

    free: dict[str, Any] = {"vary": tuple(asked.vary)}
    schedule = schedule_of(args)
    if not schedule.is_inline:
        free["depths"] = tuple(dict.fromkeys((schedule.prefetch_depth, *_DEPTHS)))
    if "recompute" not in asked.keep:
        free["recomputes"] = (setting.recompute, Recompute(), Recompute("full"))
    if "micro-batch-size" not in asked.keep:
        free["micro_batch_sizes"] = None
    return planned.space_of(args, cluster, setting, **free)


def setting_of(command: Sequence[str], cluster: Cluster) -> tuple[RunShape, Namespace]:
    """Return the model of a command in a pretended world of the cluster's ranks, or refuse it."""
    from megatron_asynchzp.commands import pretended_world

    pretended_world.patch_megatron()
    from megatron_asynchzp.mcore.run import planned  # after it, as it imports Megatron

    # Megatron asks for it with some parallel sizes; no device is used here.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    world = cluster.num_ranks, cluster.ranks_per_node
    args, _ = pretended_world.parse_command([*command, *_OURS], *world)
    return planned.setting_of(args), args


@refused_in_one_line()
def main(argv: list[str]) -> int:
    """Plan and print; return the exit status. Ends the process if the command cannot be planned."""
    asked, command = parse_args(argv)
    if asked.picture is not None:
        require("matplotlib", "--picture")
    cluster = load_cluster(asked.cluster)
    if asked.ranks is not None:
        cluster = cluster.with_ranks(asked.ranks)
    for line in cluster.doubts:
        print(f"megatron_asynchzp: {asked.cluster}: {line}", file=sys.stderr)
    if (script := Path(command[0])).name != DEFAULT_SCRIPT:
        check_script(script)
    setting, args = setting_of(command, cluster)
    space = space_of(setting, args, asked, cluster)
    print(f"{command[0]}: {plan_table.model(setting.model)}", flush=True)
    from megatron_asynchzp.mcore.run import planned

    with _progress() as progress:
        outcome = planned.find(space, progress)
    if outcome.best is None:
        print(f"megatron_asynchzp: {_nothing_fits(outcome, space, asked.cluster)}", file=sys.stderr)
        return EXIT_TOO_LARGE
    _print(outcome, space, asked, args)
    return 0


def _print(outcome: Outcome, space: Space, asked: Namespace, args: Namespace) -> None:
    best = outcome.best
    assert best is not None
    print(plan_table.setting(space, outcome))
    print(plan_table.plans(outcome, space, asked.rows))
    print(explain.choice(outcome))
    print(f"Add: {' '.join(plan_table.flags(best, space))}")
    print(f"- {explain.hierarchy(outcome, best)}")
    lines = [*explain.comparisons(outcome, best), explain.stay(outcome, best), explain.limit(best)]
    lines.append(explain.saving(best.costing, best.step_s, args.async_save, args.save_interval))
    for line in filter(None, (*lines, explain.missed(outcome, space))):
        print(f"- {line}")
    if asked.trace is not None:
        from megatron_asynchzp.commands import plan_picture

        plan_picture.write_trace(best, asked.trace)
    if asked.picture is not None:
        from megatron_asynchzp.commands import plan_picture

        plan_picture.draw(outcome, space, asked.picture)


def _nothing_fits(outcome: Outcome, space: Space, file: str) -> str:
    smallest, device = outcome.smallest, space.cluster.device
    assert smallest is not None
    sizes, needed = smallest.plan.sizes, smallest.costing.memory.total / GIB
    return (
        f"{file}: device.memory_gib: none of {outcome.num_plans} plans fits into "
        f"{device.memory_gib:g} GiB less {device.reserved_gib:g}; the smallest, "
        f"({sizes.param}, {sizes.grad}, {sizes.optim}), needs {needed:.1f} GiB; "
        "use more ranks, or --vary tp pp cp"
    )


@contextmanager
def _progress() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import Progress as Bars

    is_shown = sys.stderr.isatty()
    with Bars(console=Console(stderr=True), transient=True, disable=not is_shown) as bars:
        tasks = {}

        def show(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total)
            bars.update(tasks[phase], completed=done)

        yield show


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
