# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Checks whether Megatron and --use-asynchzp accept a command line, before any rank starts.

    python -m megatron_asynchzp.commands.validation NODES RANKS_PER_NODE SCRIPT [arguments]

NODES is a number or a range MIN:MAX, for a run whose nodes come and go.

It is a process of its own, as a script that runs up to Megatron's validation may change its
environment. Exit status: 0; 2 with one line if the command line is refused.
"""

import math
import sys
import traceback
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron_asynchzp.errors import ConfigurationError, MissingPackage, raise_first
from megatron_asynchzp.mcore.flags.checks import check_sizes, faults_of_tokens
from megatron_asynchzp.mcore.process.refusal import EXIT_USAGE

# What Megatron's own validation raises for a wrong command line; a parser exits, and so does the
# check of a script that imports the adaptor.
_REFUSALS = (AssertionError, ValueError, RuntimeError, SystemExit)
_VALIDATES = (("megatron", "training", "arguments.py"), ("argparse.py",), ("process", "refusal.py"))


def refusal(script: Path, flags: list[str], nodes: range, ranks_per_node: int) -> str | None:
    """Return the line that every rank would end with, None if the run would train or is unknown."""
    # A script that fails before Megatron has read its arguments may need what only torchrun gives.
    sys.path.insert(0, str(script.resolve().parent))  # a Megatron checkout beside the script counts
    try:
        # Only now: it imports Megatron, which that may be.
        from megatron_asynchzp.commands import pretended_world
        from megatron_asynchzp.mcore.process.platform import reason_for_cpu

        pretended_world.patch_megatron()
        _check_numbers_of_nodes(flags, nodes, ranks_per_node)
        on_cpu = ["--asynchzp-device", "cpu"] if reason_for_cpu(flags) else []
        ranks = nodes[-1] * ranks_per_node
        words = [*flags, *on_cpu, "--asynchzp-dry-run", str(ranks)]
        args, _ = pretended_world.parse_script(script, words, ranks, ranks_per_node)
        if args.use_asynchzp:
            raise_first(faults_of_tokens(args))
            _check_memory_in_flight(script, args)
    except ConfigurationError as error:
        return str(error) if _is_of_the_command_line(error) else None
    return None


def _check_numbers_of_nodes(flags: list[str], nodes: range, ranks_per_node: int) -> None:
    """Refuse sizes or a batch that some number of nodes cannot have, before a node is gone."""
    from megatron_asynchzp.commands import pretended_world

    if len(nodes) == 1:
        return
    args = pretended_world.given(flags)
    if not args.use_asynchzp or args.use_checkpoint_args:
        return
    for number in nodes:
        args.world_size = number * ranks_per_node
        try:
            check_sizes(args, ranks_per_node)
        except ConfigurationError as error:
            advice = _batch_for_all(args, [count * ranks_per_node for count in nodes])
            raise ConfigurationError(
                f"with {number} of {nodes[0]} to {nodes[-1]} nodes: {error}{advice}"
            ) from error


def _batch_for_all(args: Namespace, worlds: Sequence[int]) -> str:
    """Return advice for a batch that all of `worlds` can have, "" if the batch is not at fault."""
    sizes = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    model_size = math.prod(sizes) * args.context_parallel_size
    batch, micro = args.global_batch_size, args.micro_batch_size
    if not batch or not micro or any(world % model_size for world in worlds):
        return ""
    whole = math.lcm(*(micro * world // model_size for world in worlds))
    return "" if batch % whole == 0 else f" (of {whole} for every number of nodes)"


def _check_memory_in_flight(script: Path, args: Namespace) -> None:
    """Refuse a bound below a step's need, for Megatron's own scripts, whose model is known."""
    from megatron_asynchzp.commands.pretended_world import OF_FLAGS

    if args.asynchzp_memory_in_flight_gb is None or script.name not in OF_FLAGS:
        return
    from megatron_asynchzp.mcore.run import planned

    try:
        costing = planned.costing_of(args)
    except ConfigurationError:
        return  # a layer without a formula in the planner
    with planned.naming_the_flag():
        for stage in range(costing.plan.parallel.pp):
            costing.stage_memory(stage)


def _is_of_the_command_line(error: ConfigurationError) -> bool:
    cause = error.__cause__ or error
    if isinstance(error, MissingPackage):
        return True
    if isinstance(cause, ConfigurationError):
        from megatron_asynchzp.commands.pretended_world import NotValidated

        return not isinstance(cause, NotValidated)
    frames = traceback.extract_tb(cause.__traceback__)
    paths = [Path(frame.filename).parts for frame in frames]
    is_validated = any(path[-len(end) :] == end for path in paths for end in _VALIDATES)
    is_built = any(frame.name == "build_as_megatron" for frame in frames)
    return isinstance(cause, _REFUSALS) and (is_validated or is_built)


def main(argv: list[str]) -> int:
    nodes, per_node, script, *flags = argv
    fewest, _, most = nodes.partition(":")
    counts = range(int(fewest), int(most or fewest) + 1)
    line = refusal(Path(script), flags, counts, int(per_node))
    if line is None:
        return 0
    print(f"megatron_asynchzp: {line}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
