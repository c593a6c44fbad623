# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a run would be, without running it: the whole command line through Megatron's own parser
and validation for the row's number of ranks, its groups, and the bytes that each rank will hold.
Needs no device and no other rank; takes seconds. Usually through scripts/train/launch.sh:

    scripts/train/launch.sh table2-36b-hzp --dry-run [-- more Megatron flags]
    scripts/train/launch.sh --all                # one line per row

Exit status: 0; 1 where states and memory in flight do not fit into a device; 2 for a row that cannot run.
"""

import argparse
import functools
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.train.rows import PLATFORMS, Row, RowError, load_row, platform_default, row_names

GIB = 2**30
_EXIT_TOO_LARGE, _EXIT_REFUSED = 1, 2


@dataclass(frozen=True)
class Machine:
    """Where a row is to run."""

    platform: str
    ranks_per_node: int
    device_memory_gib: float

    @classmethod
    def of(cls, asked: argparse.Namespace) -> "Machine":
        def default(name: str) -> int:
            return platform_default(asked.platform, name)

        return cls(
            asked.platform,
            asked.ranks_per_node or default("ranks_per_node"),
            asked.device_memory_gib or default("device_memory_gib"),
        )


@dataclass(frozen=True)
class Measured:
    """What a command line gives. kinds: the groups of rank 0 (mesh.GroupKind); stages: the
    StageStates of each pipeline stage; lines: what --use-asynchzp changed."""

    args: argparse.Namespace
    lines: list[str]
    kinds: list
    stages: list


def measure(flags: tuple[str, ...], ranks: int, ranks_per_node: int) -> Measured:
    """Raises Refused for what cannot run."""
    # Here and not above: a wrong name of a row is reported without importing Megatron.
    from scripts.train import pretended_world

    pretended_world.patch_megatron()
    from scripts.train import mesh, states

    args, lines = pretended_world.parse(list(flags), ranks, ranks_per_node)
    sizes = states.shard_sizes(args) if args.use_asynchzp else None
    measured = Measured(args, lines, [], [])
    for stage in pretended_world.stages(args):
        if not measured.kinds:
            measured.kinds.extend(mesh.group_kinds(stage, args, sizes))
        measured.stages.append(states.stage_states(stage, args, ranks_per_node))
    return measured


class Report:
    """What is printed of one row; raises RowError (Refused) while it is made.

    extra: more Megatron flags; ranks: in place of the row's; measure: the function above.
    """

    def __init__(
        self, row: Row, machine: Machine, extra: list[str], ranks: int | None, measure: Callable
    ):
        self.row, self.machine = row, machine
        self.ranks = ranks or row.ranks
        self.ranks_per_node = min(machine.ranks_per_node, self.ranks)
        self.flags = row.flags(machine.platform, extra)
        measured = measure(tuple(self.flags), self.ranks, self.ranks_per_node)
        self.args, self.lines = measured.args, measured.lines
        self.kinds, self.stages = measured.kinds, measured.stages

    @property
    def parameters(self) -> int:
        return sum(stage.whole_numel for stage in self.stages)

    @property
    def largest_gib(self) -> float:
        """States and memory in flight of the rank that holds most."""
        return max(stage.total for stage in self.stages) / GIB

    @property
    def fits(self) -> bool:
        return self.largest_gib <= self.machine.device_memory_gib

    def verdict(self) -> str:
        held, there = self.largest_gib, self.machine.device_memory_gib
        if not self.fits:
            return (
                f"{self.row.name}: does not fit: a rank holds {held:.1f} GiB of states and in "
                f"flight, a device has {there:g}"
            )
        return (
            f"{self.row.name}: states and memory in flight fit: {held:.1f} of {there:g} GiB on the "
            f"fullest rank; {there - held:.1f} remain for activations, temporaries and the libraries, of "
            "which no estimate is included"
        )

    def as_json(self) -> dict:
        """For tests and tables: sizes in ranks, bytes per rank by state and stage."""
        return {
            "row": self.row.name,
            "ranks": self.ranks,
            "parameters": self.parameters,
            "expected_parameters": self.row.parameters,
            "fits": self.fits,
            "groups": {kind.name: [kind.size, kind.count] for kind in self.kinds},
            "stages": [
                {
                    "ranks": stage.num_ranks,
                    "numel": stage.numel,
                    "formula": stage.formula,
                    "allocated": stage.allocated,
                    "in_flight": stage.in_flight,
                }
                for stage in self.stages
            ],
        }

    # ---- text

    def text(self) -> str:
        row, args = self.row, self.args
        micro_batches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
        parts = [
            f"{row.name}: {row.model}, {row.paper}",
            f"{self.ranks} ranks, {self.ranks_per_node} per node ({self.machine.platform});"
            f" {args.data_parallel_size} data-parallel replicas, {micro_batches} micro-batches of "
            f"{args.micro_batch_size} x {args.seq_length} tokens per step",
            *row.notes,
            "",
            "Megatron's flags",
            *_wrapped(self.flags),
            "",
            *(f"set by --use-asynchzp: {line}" for line in self.lines),
            self._mesh_table(),
            self.stages[0].start_table,
            self._stages_table(),
            f"{self.parameters:,} parameters (the paper says {row.parameters / 1e9:g}B)",
            *([self.verdict()] if self.fits else []),  # else it is the error
        ]
        return "\n".join(parts)

    def _mesh_table(self) -> str:
        # fmt: off
        rows = [
            (kind.name, kind.shares, str(kind.size), str(kind.count), _some(kind.first),
             kind.link(self.ranks_per_node))
            for kind in self.kinds
        ]
        # fmt: on
        columns = ("groups", "share", "ranks", "how many", "the first", "link")
        return _table("Mesh", columns, rows)

    def _stages_table(self) -> str:
        # fmt: off
        columns = ("stage", "ranks", "parameters on a rank", "params", "grads", "main params",
                   "moments", "in flight", "all, GiB")
        # fmt: on
        rows = []
        for stage in self.stages:
            held = [stage.allocated[state] for state in stage.formula] + [
                sum(stage.in_flight.values())
            ]
            numbers = [f"{nbytes / GIB:.2f}" for nbytes in (*held, stage.total)]
            numel = f"{stage.numel['dense']:,}"
            if stage.numel["expert"]:
                numel += f" + {stage.numel['expert']:,} of experts"
            rows.append((str(stage.index), str(stage.num_ranks), numel, *numbers))
        of = "before sharding over data-parallel ranks"
        return _table(f"GiB per rank, by pipeline stage (parameters: {of})", columns, rows)


def _wrapped(flags: list[str]) -> list[str]:
    """Each flag with its values together, in lines that fit a terminal."""
    lines, line = [], ""
    for number, word in enumerate(flags):
        is_flag = word.startswith("--")
        end = next((i for i, w in enumerate(flags[number + 1 :]) if w.startswith("--")), None)
        unit = " ".join(flags[number:] if end is None else flags[number : number + 1 + end])
        if not is_flag:
            continue
        if line and len(line) + len(unit) > 110:
            lines.append(line)
            line = ""
        line += f"  {unit}"
    return [*lines, line]


def _some(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= 4:
        return " ".join(map(str, ranks))
    return f"{ranks[0]} {ranks[1]} ... {ranks[-1]}"


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    console = Console(file=io.StringIO(), width=118)
    console.print(table)
    return console.file.getvalue()


def _summary(report: Report) -> str:
    states = max(sum(stage.allocated.values()) for stage in report.stages) / GIB
    fits = "fits" if report.fits else "does not fit"
    return (
        f"{report.row.name:20} {report.parameters / 1e9:7.2f}B {report.ranks:5} ranks  states "
        f"{states:6.2f} GiB  with what is in flight {report.largest_gib:6.2f} GiB  {fits}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train.dry_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("row", nargs="?", metavar="ROW")
    parser.add_argument("--all", action="store_true", help="one line for each row")
    parser.add_argument("--platform", choices=PLATFORMS, default="cuda")
    parser.add_argument("--ranks", type=int, help="in place of the row's")
    parser.add_argument("--ranks-per-node", type=int, help="default: the platform's")
    parser.add_argument("--device-memory-gib", type=float, help="default: the platform's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    return parser


def main(argv: list[str]) -> int:
    """Print one row, or all of them; returns the exit status."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = _parser()
    asked = parser.parse_args(argv[:cut])
    if (asked.row is None) != asked.all:
        parser.error("give the name of a row, or --all")
    if any(number is not None and number < 1 for number in (asked.ranks, asked.ranks_per_node)):
        parser.error("--ranks and --ranks-per-node are at least 1")
    machine, reports, is_refused = Machine.of(asked), [], False
    once = functools.cache(measure)  # rows of different tables are often the same run
    for name in row_names() if asked.all else [asked.row]:
        try:
            report = Report(load_row(name), machine, argv[cut + 1 :], asked.ranks, once)
        except RowError as error:
            print(f"scripts/train: {error}", file=sys.stderr)
            is_refused = True
            continue
        reports.append(report)
        print(_summary(report) if asked.all else report.text(), flush=True)
    if asked.json and reports:
        asked.json.write_text(json.dumps([report.as_json() for report in reports], indent=1) + "\n")
    if too_large := [report for report in reports if not report.fits]:
        print(f"scripts/train: {too_large[0].verdict()}", file=sys.stderr)
        return _EXIT_TOO_LARGE
    return _EXIT_REFUSED if is_refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
