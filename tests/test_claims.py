# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What is claimed follows from what was recorded: from README and the table of results to the pages
of results, from these to their records, and every link between documents."""

import json
import math
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.report import rebuild
from scripts.report.published import PICTURES
from scripts.report.records import EXPECTED, FOLDER, read, read_record

ROOT = rebuild.ROOT
README, RESULTS = ROOT / "README.md", rebuild.RESULTS
CLAIMS = RESULTS / "README.md"
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e-\d+)?(?![\w-])")
_MADE = re.compile(r"<!-- table: (.+?) -->.*?<!-- end -->", re.DOTALL)
_MODULE = re.compile(r"-m ((?:scripts|tests)[\w.]+)")
_PATH = re.compile(r"(?:\./)?((?:scripts|tests)/[\w./-]+)")


def prose(text: str) -> str:
    """Without comments, which are not shown."""
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def claims() -> list[tuple[Path, str, str, str]]:
    """What is claimed, with its figures and its source: the rows of the table of the results, and
    the items of README."""
    table = [line for line in prose(CLAIMS.read_text()).splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table[1:]]
    section = prose(README.read_text().split("## What has been measured")[1].split("\n## ")[0])
    items = re.findall(r"^- (.*?)(?=^- |^$)", section, re.MULTILINE | re.DOTALL)
    assert len(rows) > 10 and len(items) > 3
    return [*((CLAIMS, *row) for row in rows), *((README, item, "", item) for item in items)]


def linked_pages(text: str, document: Path) -> list[Path]:
    """Markdown files that `text`, of `document`, links to."""
    targets = [target.split("#")[0] for target in _LINK.findall(text)]
    return [(document.parent / target) for target in targets if target.endswith(".md")]


def anchors(page: Path) -> set[str]:
    """Of every heading, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken_links(document: Path) -> list[str]:
    broken = []
    for target in _LINK.findall(re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        page = (document.parent / name) if name else document
        if not page.exists() or (anchor and anchor not in anchors(page)):
            broken.append(target)
    return broken


def named_paths(text: str) -> list[str]:
    """Files of scripts/ and tests/ that `text` may name, as paths or by -m."""
    modules = [module.rstrip(".").replace(".", "/") for module in _MODULE.findall(text)]
    files = (f"{name}{ending}" for name in modules for ending in (".py", "/__main__.py"))
    return [*(path.rstrip(".") for path in _PATH.findall(text)), *files]


def existing_paths(text: str) -> list[str]:
    return [name for name in named_paths(text) if (ROOT / name).is_file()]


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)


def tables_without_a_source(text: str) -> list[str]:
    """First rows of tables by hand of which neither all rows nor the text above them, from the last
    heading on, name a script or a test."""
    by_hand, bad = _MADE.sub("", text), []
    for found in re.finditer(r"(?:^\|.*\n)+", by_hand, re.MULTILINE):
        rows = found[0].splitlines()[2:]
        above = re.split(r"^#+ ", by_hand[: found.start()], flags=re.MULTILINE)[-1]
        if "<!-- = " in found[0] or existing_paths(above):
            continue
        if not all(existing_paths(row) for row in rows):
            bad.append(rows[0])
    return bad


def figures_not_on_the_page(result: str, pages: list[Path]) -> set[str]:
    output = {number for page in pages for number in _NUMBER.findall(prose(page.read_text()))}
    return set(_NUMBER.findall(re.sub(r"`[^`]*`", "", result))) - output


@pytest.mark.parametrize("row", claims(), ids=lambda row: f"{row[0].parent.name} {row[1][:40]}")
def test_a_claim_links_to_pages_that_have_its_figures_and_to_a_command_that_exists(row):
    document, claim, result, how = row
    pages = linked_pages(how, document)
    assert pages and all(page.is_file() for page in pages), how
    assert not figures_not_on_the_page(_LINK.sub("", f"{claim} {result}"), pages)
    for name in _PATH.findall(how):
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda p: p.stem)
def test_every_table_of_the_results_is_made_from_a_record_or_names_a_test(page):
    assert not tables_without_a_source(page.read_text())


def test_documents_are_what_their_records_give(capsys):
    assert rebuild.main(["--check"]) == 0, capsys.readouterr().err


def _numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(one)
    elif isinstance(value, int | float):
        yield value


def test_every_record_is_small_and_has_a_command_that_exists_and_a_date_and_no_path_of_a_machine():
    names = [file.stem for file in FOLDER.glob("*.jsonl")]
    assert names
    for name in names:
        text = (FOLDER / f"{name}.jsonl").read_text()
        assert len(text) < 500_000 and not re.search(r"/(work|tmp|root|home)/", text), name
        lines = [json.loads(line, parse_constant=float) for line in text.splitlines()]
        for line in lines:
            # A link of the test-bed may be infinitely fast.
            results = {key: value for key, value in line.items() if key != "profile"}
            assert all(map(math.isfinite, _numbers_in(results))), name
        dated = [line for line in lines if "command" in line]
        assert dated and read_record(name).lines, name
        for line in dated:
            assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", line["date"]), name
            assert "commit" in line or existing_paths(line["command"]), line["command"]


def test_a_command_that_went_is_at_the_commit_that_its_record_names():
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("the history is not here")
    lines = [line for file in FOLDER.glob("*.jsonl") for line in read([file])]
    gone = {(line["commit"], line["command"]) for line in lines if "commit" in line}
    assert gone
    for commit, command in gone:
        files = git("ls-tree", "-r", "--name-only", commit, "scripts", "tests").stdout.splitlines()
        assert set(named_paths(command)) & set(files), (commit, command)


def test_every_record_has_a_place_and_every_picture_of_the_results_a_record():
    names = {file.stem for file in FOLDER.glob("*.jsonl")}
    assert names <= EXPECTED
    shown = {path.name for path in RESULTS.glob("*.png")}
    assert shown == {name for name in PICTURES if PICTURES[name].record in names | {""}}


@pytest.mark.parametrize("document", rebuild.documents(), ids=lambda d: str(d.relative_to(ROOT)))
def test_every_link_between_documents_leads_somewhere(document):
    assert not broken_links(document)


def test_every_page_is_reachable_from_the_index_and_from_the_readme():
    pages = set((ROOT / "docs").rglob("*.md"))
    assert len(pages) > 20
    for start in (ROOT / "docs" / "index.md", README):
        found, pending = {start}, [start]
        while pending:
            page = pending.pop()
            new = {one.resolve() for one in linked_pages(page.read_text(), page)} - found
            pending += [one for one in new if one.is_file()]
            found |= new
        assert not pages - found, start


# ---- the checks themselves


def test_a_changed_figure_or_table_is_seen():
    text = (RESULTS / "schedules.md").read_text()
    assert rebuild.rebuilt(text) == (text, [])
    digit = re.search(r"<!-- = [^>]*-->(\d)", text)
    assert digit is not None
    other = text[: digit.start(1)] + str((int(digit[1]) + 1) % 10) + text[digit.end(1) :]
    assert other != text and rebuild.rebuilt(other) == (text, [])
    row = text.index("| threaded | ")
    shorter = text[:row] + text[text.index("\n", row) + 1 :]
    assert shorter != text and rebuild.rebuilt(shorter) == (text, [])
    unknown = "<!-- = step; 2x2; no such row; late -->1<!-- -->"
    new, (problem,) = rebuild.rebuilt(unknown)
    assert new == unknown and "no such row" in problem


def test_a_figure_a_link_and_a_table_without_a_source_are_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A title\n12 ms <!-- 13 --> [a](#a-title) [b](#no) [c](none.md)")
    assert figures_not_on_the_page("12 ms, 13, `99`", [page]) == {"13"}
    assert broken_links(page) == ["#no", "none.md"]
    table = "Made by {}.\n\n| a |\n|---|\n| 3 ms |\n"
    assert not tables_without_a_source(table.format("tests/test_claims.py"))
    assert tables_without_a_source(table.format("tests/test_nothing.py")) == ["| 3 ms |"]


def test_the_table_of_bytes_at_rest_is_the_formula_above_it():
    text = prose(README.read_text())
    [params] = re.findall(r"N = (\S+),", text)
    rows = re.findall(r"^\| .* \| (\d+), (\d+), (\d+) \| ([\d.]+) \|", text, re.MULTILINE)
    assert len(rows) == 5
    for *sizes, gib in rows:
        param, grad, optim = map(int, sizes)
        nbytes = float(params) * (2 / param + 4 / grad + 12 / optim)
        assert gib == f"{nbytes / 2**30:.1f}", sizes
