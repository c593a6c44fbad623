# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Writes every published table, figure and picture again from docs/results/records.

    python -m scripts.report.rebuild            # tables, figures and pictures
    python -m scripts.report.rebuild --check    # status 1 where a document differs from its record

In a document, all between two comments is written here, the rest by hand:

    <!-- table: NAME -->            and            <!-- = NAME -->1.18<!-- -->
    ...
    <!-- end -->
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from scripts.report import figures, published
from scripts.report.published import PICTURES, draw_picture
from scripts.report.records import EXPECTED, NotRecorded

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
_PENDING_TEXT = "(not recorded yet)"
_TABLE = re.compile(r"<!-- table: (.+?) -->\n(.*?)<!-- end -->", re.DOTALL)
_FIGURE = re.compile(r"<!-- = (.+?) -->(.*?)<!-- -->", re.DOTALL)


def documents() -> list[Path]:
    """Those of the root, and all of docs."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def rebuilt(text: str) -> tuple[str, list[str]]:
    """Return `text` with its tables and figures made anew, and a line for each problem."""
    problems: list[str] = []

    def again(make: Callable[[str], str], form: str) -> Callable[[re.Match], str]:
        def replace(match: re.Match) -> str:
            name = " ".join(match[1].split())  # it may go over the end of a line
            try:
                return form.format(name=match[1], made=make(name).strip())
            except NotRecorded as error:
                if error.name in EXPECTED:
                    return form.format(name=match[1], made=_PENDING_TEXT)
                problems.append(f"{name}: {error}")
            except (LookupError, StopIteration, ValueError, TypeError, AssertionError) as error:
                problems.append(f"{name}: not in its record ({error!r})")
            return match[0]

        return replace

    text = _TABLE.sub(
        again(published.table, "<!-- table: {name} -->\n\n{made}\n\n<!-- end -->"), text
    )
    text = _FIGURE.sub(again(figures.figure, "<!-- = {name} -->{made}<!-- -->"), text)
    return text, problems


def cited(document: Path) -> set[str]:
    """Names of the records that a document names, or has tables, figures and pictures of."""
    text = document.read_text()
    names = {published.record_of(" ".join(name.split())) for name, _ in _TABLE.findall(text)}
    names |= {figures.record_of(" ".join(name.split())) for name, _ in _FIGURE.findall(text)}
    names |= set(re.findall(r"docs/results/records/(\w+)\.jsonl", text))
    names |= {picture.record for name, picture in PICTURES.items() if f"/{name})" in text}
    return {name for name in names if name}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; pictures are not made")
    parser.add_argument("--no-pictures", action="store_true", help="write tables and figures only")
    args = parser.parse_args(argv)
    is_wrong = False
    for path in documents():
        text = path.read_text()
        new, problems = rebuilt(text)
        for problem in problems:
            print(f"rebuild: {path.relative_to(ROOT)}: {problem}", file=sys.stderr)
        if new != text and args.check:
            print(f"rebuild: {path.relative_to(ROOT)}: differs from its records", file=sys.stderr)
        elif new != text:
            path.write_text(new)
        is_wrong |= bool(problems) or (args.check and new != text)
    if not (args.check or args.no_pictures):
        drawn = [_draw(name) for name in PICTURES]  # all of them, whether or not one fails
        is_wrong |= not all(drawn)
    return int(is_wrong)


def _draw(name: str) -> bool:
    try:
        draw_picture(name, RESULTS / name)
    except NotRecorded as error:
        (RESULTS / name).unlink(missing_ok=True)
        print(f"rebuild: {name}: {error}", file=sys.stderr)
        return error.name in EXPECTED
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
