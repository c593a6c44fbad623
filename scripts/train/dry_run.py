# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a run would be, without running it: the whole command line through Megatron's own parser
and validation for the row's number of ranks, its groups, and the memory that each rank needs.
Needs no device and no other rank; takes seconds. Usually through scripts/train/launch.sh:

    scripts/train/launch.sh table2-36b-hzp --dry-run [-- more Megatron flags]
    scripts/train/launch.sh --all                # one line per row

Exit status: 0; 1 where a rank needs more than a device has; 2 for a row that cannot run.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_asynchzp.errors import ConfigurationError
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


def _measure(*run: Any) -> Any:
    # Here and not above: a wrong name of a row is reported without importing Megatron.
    from megatron_asynchzp.commands import stages

    return stages.dry_run_of_flags(*run)


class Report:
    """What is printed of one row; raises ConfigurationError while it is made.

    extra: more Megatron flags; ranks: in place of the row's; measure: dry_run_of_flags.
    """

    def __init__(
        self, row: Row, machine: Machine, extra: list[str], ranks: int | None, measure: Callable
    ):
        self.row, self.machine = row, machine
        ranks = ranks or row.ranks
        self.flags = row.flags(machine.platform, extra)
        self.found = measure(tuple(self.flags), ranks, min(machine.ranks_per_node, ranks))

    @property
    def memory(self):
        """Of the rank that needs most."""
        return self.found.fullest.memory

    @property
    def device_nbytes(self) -> float:
        return self.machine.device_memory_gib * GIB

    @property
    def fits(self) -> bool:
        return self.memory.left_of(self.device_nbytes) >= 0

    def verdict(self) -> str:
        from megatron_asynchzp.commands import memory_tables

        return f"{self.row.name}: {memory_tables.verdict(self.found, self.device_nbytes)}"

    def as_json(self) -> dict:
        """For tests and tables: sizes in ranks, bytes per rank by state and stage."""
        return {
            "row": self.row.name,
            "ranks": self.found.args.world_size,
            "parameters": self.found.parameters,
            "expected_parameters": self.row.parameters,
            "fits": self.fits,
            "groups": {kind.name: [kind.size, kind.count] for kind in self.found.kinds},
            "stages": [_stage_as_json(stage) for stage in self.found.stages],
        }

    def text(self) -> str:
        from megatron_asynchzp.commands import memory_tables

        row, found = self.row, self.found
        parts = [
            f"{row.name}: {row.model}, {row.paper} ({self.machine.platform})",
            memory_tables.describe_run(found),
            *row.notes,
            "",
            "Megatron's flags",
            *_wrapped(self.flags),
            "",
            memory_tables.tables(found),
            f"{found.parameters:,} parameters ({row.parameters / 1e9:g}B in the paper)",
            *([self.verdict()] if self.fits else []),  # else it is the error
        ]
        return "\n".join(parts)


def _stage_as_json(stage: Any) -> dict:
    memory = stage.memory
    return {
        "ranks": stage.num_ranks,
        "numel": stage.numel,
        "formula": stage.formula,
        "allocated": dict(memory.at_rest),
        "in_flight": dict(memory.in_flight),
        "whole_unit": memory.whole_unit,
        "activations": asdict(memory.activations),
        "start": memory.start,
        "total": memory.total,
    }


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


def _summary(report: Report) -> str:
    memory, found = report.memory, report.found
    fits = "fits" if report.fits else "does not fit"
    return (
        f"{report.row.name:20} {found.parameters / 1e9:7.2f}B {found.args.world_size:5} ranks"
        f"  states {memory.states / GIB:6.2f}  start {memory.start / GIB:6.2f}  in all "
        f"{memory.total / GIB:6.2f} GiB  {fits}"
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
    once = functools.cache(_measure)  # rows of different tables are often the same run
    for name in row_names() if asked.all else [asked.row]:
        try:
            report = Report(load_row(name), machine, argv[cut + 1 :], asked.ranks, once)
        except (RowError, ConfigurationError) as error:
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
