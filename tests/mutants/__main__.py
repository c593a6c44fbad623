# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Breaks the code on purpose and shows which test notices:

python -m tests.mutants                all mutants; ends with status 1 where one is not caught
python -m tests.mutants NAME...        some of them
python -m tests.mutants --write        all, and replaces docs/results/mutants.md and its record
python -m tests.mutants --page         none, and writes that page again from its record
python -m tests.mutants --generate 30 --since COMMIT
                                       mutants that a machine makes of lines that changed since
                                       then; a journal has those that ran before; --tests tests/zero
                                       looks for tests in some folders alone
"""

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

from tests.mutants.catalogue import MUTANTS
from tests.mutants.catalogue.mutant import Mutant
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.generated import Journal, generate, run_generated
from tests.mutants.lines_run import read_lines_run, watch
from tests.mutants.page import NOTICED, count_caught, rows_of, summary, write, write_generated
from tests.mutants.run import (
    ROOT,
    MutantError,
    Outcome,
    Verdict,
    prepared_tree,
    run_mutants,
    warm_up,
)

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
FOLDER = _CACHE / "megatron_asynchzp" / "mutants"
# They look at texts, or run no code of the package.
_NO_LINES = ("architecture", "mutants", "test_documents.py", "test_claims.py", "test_site.py",
             "test_installs.py", "test_packaging.py", "test_environment.py")  # fmt: skip


def choose(names: Sequence[str]) -> list[Mutant]:
    """Those of these names, or all. Raises MutantError for a name that is none."""
    by_name = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := [name for name in names if name not in by_name]:
        raise MutantError(f"{', '.join(unknown)}: no such mutant")
    return [by_name[name] for name in names] or MUTANTS


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
    parser.add_argument("--page", action="store_true", help="write the page from its record")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="tests run together")
    parser.add_argument("--generate", type=int, metavar="N", help="mutants of changed lines")
    parser.add_argument("--since", metavar="COMMIT", help="lines that changed since this commit")
    parser.add_argument("--seed", type=int, default=0, help="chooses the generated mutants")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="folders or files of tests")
    return parser.parse_args()


def run_machine(args: argparse.Namespace) -> int:
    """Generate mutants and run them; returns 1 where one is neither noticed nor equivalent."""
    if args.since is None:
        print("tests.mutants: --generate needs --since COMMIT", file=sys.stderr)
        return 2
    paths = [
        path.relative_to(ROOT)
        for place in sorted({(ROOT / name).resolve() for name in args.tests})
        for path in ([place] if place.is_file() else sorted(place.rglob("test_*.py")))
    ]
    files = [str(path) for path in paths if path.parts[1] not in _NO_LINES]
    mutants = generate(ROOT, args.generate, args.since, args.seed)
    with prepared_tree() as tree:
        lines_run, missing = read_lines_run(FOLDER, tree, files)
        for folder, group in groupby(missing, key=os.path.dirname):
            print(f"noting which lines the tests of {folder} run", flush=True)
            watch(FOLDER, tree, list(group))
        lines_run, _ = read_lines_run(FOLDER, tree, files)
        journal = Journal(FOLDER / "journal.jsonl")
        rows = run_generated(mutants, tree, lines_run, journal, args.at_once, report_row)
    rows = [
        row | ({"why": EQUIVALENT[row["key"]]} if row["key"] in EQUIVALENT else {}) for row in rows
    ]
    if args.write:
        command = f"python -m tests.mutants --generate {args.generate} --since {args.since}"
        write_generated(rows, command, datetime.now(UTC).date().isoformat())
    left = [row for row in rows if row["verdict"] not in NOTICED and "why" not in row]
    print(f"generated mutants: {count_caught(rows)} of {len(rows)} caught, {len(left)} survivors")
    return int(bool(left))


def report_row(row: dict) -> None:
    """Print what became of a generated mutant."""
    place = f"{row['file']}:{row['line']}"
    print(f"{row['key']:13} {row['verdict']:12} {place:45} {row['operator']:18}", end=" ")
    print(f"{row['seconds']:4.0f} s  {row['test']}", flush=True)


def main() -> int:
    args = parse_arguments()
    warm_up()
    if args.generate:
        return run_machine(args)
    if args.page:
        write([])
        return 0
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
