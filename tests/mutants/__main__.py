# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Breaks the code on purpose and shows which test notices:

python -m tests.mutants                all mutants; ends with status 1 where one is not caught
python -m tests.mutants NAME...        some of them
python -m tests.mutants --write        all, and replaces docs/results/mutants.md and its record
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tests.mutants.catalogue import MUTANTS
from tests.mutants.catalogue.mutant import Mutant
from tests.mutants.run import ROOT, MutantError, Outcome, Verdict, run_mutants

COMMAND = "python -m tests.mutants --write"
TABLE = ROOT / "docs" / "results" / "mutants.md"
RECORD = ROOT / "docs" / "results" / "records" / "mutants.jsonl"
_INTRODUCTION = """# The tests notice

Faults are put into a copy of the code on purpose, one at a time, for each law and each mechanism
of the [architecture](../architecture.md); one fast test, which passed on the unharmed copy, has to
fail because of each. The record says what each breaks and names its test. A fast test checks that
each fault still fits the code; the slow tests run them all.
"""


def choose(names: Sequence[str]) -> list[Mutant]:
    """Those of these names, or all. Raises MutantError for a name that is none."""
    by_name = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := [name for name in names if name not in by_name]:
        raise MutantError(f"{', '.join(unknown)}: no such mutant")
    return [by_name[name] for name in names] or MUTANTS


def rows_of(outcomes: Sequence[Outcome], date: str) -> list[dict]:
    """The record: one JSON object for each mutant."""
    return [
        {
            "command": COMMAND,
            "date": date,
            "mutant": outcome.mutant.name,
            "breaks": outcome.mutant.breaks,
            "file": outcome.mutant.path,
            "test": outcome.mutant.test,
            "verdict": outcome.verdict,
            "seconds": round(outcome.seconds, 1),
        }
        for outcome in outcomes
    ]


def merge(old: Sequence[dict], new: Sequence[dict]) -> list[dict]:
    """`new` in place of the rows of the same mutants, in the order of the catalogue."""
    by_name = {row["mutant"]: row for row in [*old, *new]}
    return [by_name[mutant.name] for mutant in MUTANTS if mutant.name in by_name]


def write(new: Sequence[dict]) -> None:
    """Bring the record and the page up to date."""
    old = RECORD.read_text().splitlines() if RECORD.is_file() else []
    rows = merge([json.loads(line) for line in old], new)
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text("".join(json.dumps(row) + "\n" for row in rows))
    TABLE.write_text(table_of(rows))


def verdict_of(row: dict) -> Verdict:
    """Of one mutant's row of the record; older ones, which have none, are of mutants caught."""
    return Verdict(row.get("verdict", Verdict.CAUGHT))


def summary(verdicts: Sequence[Verdict]) -> str:
    count = Counter(verdicts)
    text = f"{count[Verdict.CAUGHT]} of {len(verdicts)} caught"
    return f"{text}, {late} timed out" if (late := count[Verdict.TIMED_OUT]) else text


def table_of(rows: Sequence[dict]) -> str:
    """The Markdown page of a record: how many faults of each law, and of each room of
    the package, were caught."""
    lines = [
        _INTRODUCTION,
        f"{max(row['date'] for row in rows)} · `{COMMAND}` · {summary([*map(verdict_of, rows)])} · "
        "[record](records/mutants.jsonl)\n",
        "| broken in | caught |",
        "|---|---:|",
    ]
    of_place: dict[str, list[dict]] = {}
    for row in rows:
        of_place.setdefault(_place_of(row), []).append(row)
    for place, broken in sorted(of_place.items(), key=lambda item: (item[0][0] == "`", item[0])):
        count = [verdict_of(row) for row in broken].count(Verdict.CAUGHT)
        lines.append(f"| {place} | {count} of {len(broken)} |")
    return "\n".join(lines) + "\n"


def _place_of(row: dict) -> str:
    """The law that the mutant breaks, or the room that it is in."""
    law, colon, _ = row["breaks"].partition(":")
    if colon and law.startswith("law "):
        return law
    folders = Path(row["file"]).parts[1:-1]
    return f"`{folders[0]}/`" if folders else "`megatron_asynchzp/`"


def report(outcome: Outcome) -> None:
    verdict, mutant = outcome.verdict, outcome.mutant
    output = verdict if verdict is Verdict.CAUGHT else verdict.upper()
    print(f"{mutant.name:32} {output}: {mutant.test}  {outcome.seconds:.0f} s", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description="Breaks the code and shows which test notices."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to run; default: all")
    parser.add_argument("--write", action="store_true", help="bring page and record up to date")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="tests run together")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    try:
        mutants = choose(args.names)
        outcomes = run_mutants(mutants, args.at_once, report)
    except MutantError as error:
        print(f"tests.mutants: {error}", file=sys.stderr)
        return 2
    if args.write:
        write(rows_of(outcomes, datetime.now(UTC).date().isoformat()))
    verdicts = [outcome.verdict for outcome in outcomes]
    print(f"mutants: {summary(verdicts)}")
    return int(Verdict.MISSED in verdicts)


if __name__ == "__main__":
    sys.exit(main())
