# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Judges a training command with --use-asynchzp; starts no ranks and needs no device.

    asynchzp migrate [--cluster h100] [--ranks 256] train.sh | recipe.yaml | ds_config.json
    asynchzp migrate [--cluster h100] [--ranks 256] -- torchrun ... pretrain_gpt.py <your flags>

It prints refusals, lost features, changes with the same effect, and the shard sizes that other
flags become. Exit status: 0 if the command starts; 1 if something is refused; 2 if it is no
training command.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_asynchzp.commands import deepspeed, plan_table, recipes
from megatron_asynchzp.commands.launch_words import DEFAULT_SCRIPT, parse_before_dashes
from megatron_asynchzp.errors import ConfigurationError, OneLineParser
from megatron_asynchzp.mcore.process.refusal import refused_in_one_line
from megatron_asynchzp.planner import explain
from megatron_asynchzp.planner.cluster import Cluster
from megatron_asynchzp.planner.cluster_files import cluster_names, load_cluster

if TYPE_CHECKING:
    from megatron_asynchzp.commands.verdict import StartVerdict

EXIT_REFUSED = 1
_RANKS_PER_NODE = 8
_OURS = "--use-asynchzp"


def parse_args(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    parser = OneLineParser(
        prog="asynchzp migrate",
        usage="%(prog)s [--cluster NAME_OR_FILE] [--ranks N] FILE | -- TRAINING COMMAND",
        description="List what --use-asynchzp changes or refuses in a training command.",
    )
    add, names = parser.add_argument, ", ".join(cluster_names())
    add("--cluster", metavar="NAME_OR_FILE", help=f"predict times on it: {names}, or your file")
    add("--ranks", type=int, metavar="N", help="ranks of the run (default: its launcher's)")
    add("file", nargs="?", help="a shell script, a recipe, a DeepSpeed JSON")
    asked, command = parse_before_dashes(parser, argv)
    if asked.ranks is not None and asked.ranks < 1:
        parser.error(f"--ranks {asked.ranks}: give a number of at least 1")
    if (asked.file is None) == (not command):
        parser.error("give one file, or the training command after --")
    return asked, command or [asked.file]


@refused_in_one_line()
def main(argv: list[str]) -> int:
    """Judge and print; return the exit status. Ends the process if no training command is given."""
    asked, words = parse_args(argv)
    cluster = load_cluster(asked.cluster) if asked.cluster else None
    if cluster is not None and asked.ranks is not None:
        cluster = cluster.with_ranks(asked.ranks)
    if words[0].endswith(".json"):
        return deepspeed.migrate(words[0], asked.ranks or (cluster and cluster.num_ranks))
    source = recipes.read_source(words)
    # Only now: the checks above need neither torch nor Megatron.
    from megatron_asynchzp.commands import pretended_world

    pretended_world.patch_megatron()
    from megatron_asynchzp.commands import verdict  # after it, as it imports Megatron

    flags = recipes.Flags(pretended_world.megatron_flags())
    command = recipes.read_command(source, words[0], flags)
    ranks, per_node = command.world
    ranks = asked.ranks or ranks or (cluster.num_ranks if cluster else None)
    is_assumed = ranks is None
    ranks = ranks or pretended_world.fewest_ranks(command.flags)
    if cluster is not None:
        cluster = cluster.with_ranks(ranks)
        per_node = cluster.ranks_per_node
    per_node = min(per_node or _RANKS_PER_NODE, ranks)
    script = command.script or DEFAULT_SCRIPT
    judged = verdict.judge_command([script, *command.flags], ranks, per_node)
    if is_assumed and any(" ranks" in line.text for line in judged.refused):
        raise ConfigurationError(
            f"{words[0]} does not say how many ranks it starts, and {ranks}, the fewest, cannot: "
            f"{judged.refused[0].text}; add --ranks N, the ranks of your run"
        )
    headline = f"does not start with {_OURS}" if judged.refused else f"starts with {_OURS}"
    headline += ", weakened" if judged.lost and not judged.refused else ""
    print(f"{script} on {ranks} rank{'s' * (ranks > 1)}, {per_node} a node: {headline}")
    if is_assumed:
        print(
            f"- nothing says how many ranks it starts: {ranks} assumed; give yours with --ranks N"
        )
    print("".join(f"- {line}\n" for line in command.assumed), end="")
    print("".join(_groups(judged)), end="")
    status = EXIT_REFUSED if judged.refused else 0
    if judged.args is not None:
        try:
            _print_shardings(judged, command.flags, ranks, per_node, cluster)
        except (ConfigurationError, ValueError) as error:  # the planner has no formula for it
            print(f"Bytes are not known: {error}")
    return status


def _print_shardings(
    judged: "StartVerdict", flags: list[str], ranks: int, per_node: int, cluster: Cluster | None
) -> None:
    from megatron_asynchzp.commands import pretended_world
    from megatron_asynchzp.commands.verdict import shardings
    from megatron_asynchzp.mcore.run import planned

    assert judged.args is not None
    given = pretended_world.given(flags)
    given.world_size = ranks
    model = plan_table.model(planned.model_of(judged.args))
    print(f"{'Without what is refused' if judged.refused else 'Model'}: {model}")
    rows = shardings(judged.args, given, cluster, per_node)
    columns = ["sharding", "P, G, O", "GiB a rank at rest", "at its peak"]
    columns += [f"step s on {cluster.name}"] if cluster else []
    print(plan_table.grid(columns, [row.cells[: len(columns)] for row in rows]))
    print(">= leaves out what yours holds beside its states, activations and logits")
    yours, times = rows[0], [row.step_s for row in rows[1:] if row.step_s]
    if yours.step_s and times:
        gain = yours.step_s / min(times) - 1
        print(
            f"{explain.worth(gain)}: {gain:+.2%} against {yours.title}; asynchzp plan looks at "
            "other sizes"
        )
    if ours_s := rows[1].step_s:
        own = judged.args.async_save, judged.args.save_interval
        saving = explain.saving(rows[1].costing, ours_s, *own)
        print("".join(f"Saves: {line}\n" for line in [saving] if line), end="")


def _groups(judged: "StartVerdict") -> Iterator[str]:
    lost = {rule.setting: f"{rule.flag}: {rule.reason}" for rule in judged.lost}
    told = [line for line in judged.logged if line not in judged.environment]
    others = [line for line in told if line.partition(" = ")[0] not in lost]
    groups = {
        "Needed in the environment, and judged with it": judged.environment,
        "Refused": [line.text for line in judged.refused],
        "Switched off, and nothing else gives it": lost.values(),
        "Set otherwise, with the same effect": others,
    }
    for title, lines in groups.items():
        if lines:
            yield "".join((f"{title}:\n", *(f"  {line}\n" for line in lines)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
