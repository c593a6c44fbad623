# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/megatron.md from the flags, refusals and patches in the code."""

import re
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megatron_asynchzp.mcore.flags.arguments import add_asynchzp_arguments
from megatron_asynchzp.mcore.flags.pasa import PASA, add_pasa_arguments
from megatron_asynchzp.mcore.flags.rule_table import RULES
from megatron_asynchzp.mcore.flags.rules import OURS, Rule, Verdict
from megatron_asynchzp.mcore.patches.patch import Patch
from megatron_asynchzp.mcore.patches.table import PATCHES

DROPPED = {
    "drop the flag",
    "drop the flag, or train without --use-asynchzp",
    "drop one of the two flags",
}
PAGE = Path(__file__).parents[2] / "docs" / "megatron.md"


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines]


def _flags(add_arguments: Callable[[ArgumentParser], ArgumentParser]) -> list[str]:
    rows, told = [], set[str]()
    for action in add_arguments(ArgumentParser(add_help=False))._actions:
        rule = (action.help or "").partition("; ")[2].partition(" Default: ")[0]
        text = f"{action.help}".replace(f"; {rule}", "; as above.") if rule in told else action.help
        told |= {rule} - {""}
        values = f" {{{','.join(action.choices)}}}" if action.choices else ""
        metavar = f" {action.metavar}" if action.metavar else values
        rows.append((f"`{action.option_strings[0]}{metavar}`", text))
    return _table(("flag", "meaning"), rows)


def _file_of(patch: Patch) -> str:
    path = patch.call.__module__.partition(".mcore.patches.")[2].replace(".", "/")
    return f"mcore/patches/{path}.py"


def _refusals(refusals: Sequence[Rule]) -> list[str]:
    """Write a row for the flags with one reason.

    The remedy to drop the flag stands above the table, and is left out if a row has no other.
    """
    reasons: dict[str, list[Rule]] = {}
    for refusal in refusals:
        if refusal.verdict is not Verdict.REFUSE:
            continue
        reasons.setdefault(refusal.reason, []).append(refusal)
    rows = []
    for reason, found in reasons.items():
        flags = ", ".join(f"`{one.flag}` {one.condition}".rstrip() for one in found)
        remedies = dict.fromkeys(one.remedy for one in found)
        rows.append((flags, reason, "" if remedies.keys() <= DROPPED else "; ".join(remedies)))
    return _table(("flag", "reason", "instead"), rows)


def _changes(rules: Sequence[Rule]) -> list[str]:
    """A row for each reason, or for all reasons of the same arguments."""
    pairs = [
        (f"`{r.setting}`" + ("" if r.value is False else f" = {r.value}"), r.reason)
        for r in rules
        if r.verdict is not Verdict.REFUSE
    ]
    reasons: dict[str, list[str]] = {}
    for names, reason in _shared(pairs):
        reasons.setdefault(names, []).append(reason)
    rows = ((names, "; or ".join(found)) for names, found in reasons.items())
    return _table(("argument", "because"), rows)


def _shared(rows: Iterable[tuple[str, ...]]) -> Iterable[tuple[str, ...]]:
    """Rows that differ in their first cell alone become one."""
    firsts: dict[tuple[str, ...], list[str]] = {}
    for first, *rest in rows:
        firsts.setdefault(tuple(rest), []).append(first)
    return ((", ".join(names), *rest) for rest, names in firsts.items())


def tables() -> dict[str, list[str]]:
    """The lines of every table, by the name in its marker."""
    patches = _shared((f"`{p.target}`", f"`{_file_of(p)}`") for p in PATCHES)
    return {
        "flags": _flags(add_asynchzp_arguments),
        "attention flags": _flags(add_pasa_arguments),
        "patches": _table(("what is replaced", "with its reason, in"), patches),
        "switched off": _changes(RULES[OURS]),
        "refusals": _refusals(RULES[OURS]),
        "attention refusals": _refusals(RULES[PASA]),
    }


def with_tables(page: str) -> str:
    """`page` with every table as the code has it. Raises KeyError for an unknown marker."""
    made = tables()

    def written(found: re.Match) -> str:
        lines = "\n".join(made.pop(found[1]))
        return f"<!-- code: {found[1]} -->\n{lines}\n<!-- end -->"

    page = re.sub(r"<!-- code: (.+?) -->\n.*?<!-- end -->", written, page, flags=re.DOTALL)
    if made:
        raise KeyError(f"no marker for {', '.join(made)}")
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
