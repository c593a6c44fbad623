# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Writes every published table, figure and picture again from docs/results/records.

    python scripts/report/rebuild.py            # tables, figures and pictures
    python scripts/report/rebuild.py --check    # status 1 where a document differs from its record

In a document, all between two comments is written here, the rest by hand:

    <!-- table: NAME -->            and            <!-- = NAME -->1.18<!-- -->
    ...
    <!-- end -->
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.report.figures import figure
from scripts.report.published import PICTURES, table
from scripts.report.records import read_record

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
_TABLE = re.compile(r"<!-- table: (.+?) -->\n(.*?)<!-- end -->", re.DOTALL)
_FIGURE = re.compile(r"<!-- = (.+?) -->(.*?)<!-- -->", re.DOTALL)


class RebuildError(Exception):
    """A document asks for what cannot be made; the message is one line for the user."""


def documents() -> list[Path]:
    """README and all of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rebuilt(text: str) -> str:
    """`text` with its tables and figures made anew. Raises RebuildError."""
    text = _TABLE.sub(
        lambda m: f"<!-- table: {m[1]} -->\n\n{_made(table, m[1])}\n\n<!-- end -->", text
    )
    return _FIGURE.sub(lambda m: f"<!-- = {m[1]} -->{_made(figure, _joined(m[1]))}<!-- -->", text)


def _joined(name: str) -> str:
    """A name may go over the end of a line of the document."""
    return " ".join(name.split())


def _made(make, name: str) -> str:
    try:
        return make(name).strip()
    except FileNotFoundError as error:
        raise RebuildError(f"{name}: there is no record {Path(error.filename).name}") from error
    except (KeyError, ValueError, TypeError, AssertionError) as error:
        raise RebuildError(f"{name}: not in its record ({error!r})") from error


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; pictures are not made")
    parser.add_argument("--no-pictures", action="store_true", help="write tables and figures only")
    args = parser.parse_args(argv)
    differing = []
    for path in documents():
        text = path.read_text()
        try:
            new = rebuilt(text)
        except RebuildError as error:
            print(f"rebuild: {path.relative_to(ROOT)}: {error}", file=sys.stderr)
            return 1
        if new != text:
            differing.append(path)
            if not args.check:
                path.write_text(new)
    for path in differing:
        verb = "differs from its record" if args.check else "written"
        print(f"{path.relative_to(ROOT)}: {verb}", file=sys.stderr)
    if not (args.check or args.no_pictures):
        for name, picture in PICTURES.items():
            picture.draw(read_record(picture.record), RESULTS / name)
            print(f"docs/results/{name}: drawn", file=sys.stderr)
    return int(args.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
