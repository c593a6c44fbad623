# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the records of mutants, of the catalogue and generated, and the page of both."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.mutants.catalogue import MUTANTS
from tests.mutants.catalogue.mutant import PACKAGE, room_of
from tests.mutants.run import ROOT, Outcome, Verdict

COMMAND = "python -m tests.mutants --write"
TABLE = ROOT / "docs" / "results" / "mutants.md"
RECORD = ROOT / "docs" / "results" / "records" / "mutants.jsonl"
GENERATED = RECORD.with_name("generated_mutants.jsonl")
_INTRODUCTION = """# The tests notice

Each fault of the catalogue breaks one law or one mechanism of the
[architecture](../architecture.md) in a copy of the code. One fast test, which passes on the
unharmed copy, has to fail on it. The record names the test. A fast test checks that each fault
still fits the code; the slow tests run them all.
"""
_GENERATED = """
## Generated

A program makes small faults in lines that changed since a commit (an edge of a comparison, an
operator, a constant by one, a condition, a call left out, two arguments swapped, an early end, an
empty branch). It runs the fast tests that run the line, for up to half a minute. A mutant that no
test can notice counts as equivalent (reasons: `tests/mutants/equivalent.py`). The second table
lists those that no test caught.
"""


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
    rows = merge(read_record(RECORD), new)
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text("".join(json.dumps(row) + "\n" for row in rows))
    TABLE.write_text(page_of(rows, read_record(GENERATED)))


def write_generated(rows: Sequence[dict], command: str, date: str) -> None:
    """Add to the record of the generated mutants, and bring the page up to date.

    Mutants of lines that were written anew since stay with what became of them.
    """
    told = {"command": command, "date": date}
    known = {row["key"]: row for row in read_record(GENERATED)}
    known |= {row["key"]: told | row for row in rows}
    GENERATED.write_text("".join(json.dumps(known[key]) + "\n" for key in sorted(known)))
    TABLE.write_text(page_of(read_record(RECORD), read_record(GENERATED)))


def read_record(path: Path) -> list[dict]:
    """Return the rows of a record; none where there is none."""
    return [*map(json.loads, path.read_text().splitlines())] if path.is_file() else []


def page_of(rows: Sequence[dict], generated: Sequence[dict]) -> str:
    """Return the Markdown page of both records."""
    return table_of(rows) + (generated_table_of(generated) if generated else "")


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
    return f"`{room_of(row['file'].removeprefix(f'{PACKAGE}/'))}/`"


def generated_table_of(rows: Sequence[dict]) -> str:
    """Return the part of the page for generated mutants: the share of each room, and survivors."""
    last = max(rows, key=lambda row: row["date"])
    lines = [
        _GENERATED,
        f"{last['date']} · `{last['command']}` · {_share(rows)} · "
        f"[record](records/{GENERATED.name})\n",
        "| room | mutants | caught | equivalent | not caught |",
        "|---|---:|---:|---:|---:|",
    ]
    rooms: dict[str, list[dict]] = {}
    for row in rows:
        rooms.setdefault(room_of(row["file"]), []).append(row)
    for room, own in sorted(rooms.items()):
        caught, equivalent = count_caught(own), sum("why" in row for row in own)
        left = len(own) - caught - equivalent
        lines.append(f"| `{room}/` | {len(own)} | {caught} | {equivalent} | {left} |")
    lines += ["", "| not caught | in |", "|---|---|"]
    for row in sorted(rows, key=lambda row: (row["file"], row["line"])):
        if row["verdict"] not in NOTICED and "why" not in row:
            change = f"`{_short(row['old'])}` → `{_short(row['new'])}`"
            lines.append(f"| {change} | `{row['function'] or row['file']}` |")
    return "\n".join(lines) + "\n"


NOTICED = (Verdict.CAUGHT, Verdict.TIMED_OUT)


def count_caught(rows: Sequence[Mapping]) -> int:
    """Return how many a test noticed: it failed, or did not end."""
    return sum(row["verdict"] in NOTICED for row in rows)


def _share(rows: Sequence[dict]) -> str:
    num = sum("why" not in row for row in rows)
    caught = count_caught(rows)
    share = f"{caught} of {num} caught ({caught / max(num, 1):.0%})"
    at_first = count_caught([row for row in rows if "first_verdict" not in row])
    return f"{share}, {at_first} before tests were added; {len(rows) - num} equivalent"


def _short(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|").replace("`", "'")
    return line if len(line) <= 90 else f"{line[:87]}..."
