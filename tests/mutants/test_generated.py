# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The machine's mutants: each operator makes its fault, keys stay when code moves, the tests of a
line are those that ran it, and an interrupted run goes on where it was."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.mutants import generated
from tests.mutants.generated import NO_TEST, Journal, generate, run_generated
from tests.mutants.lines_run import keys_of_lines, read_lines_run, watch
from tests.mutants.operators import find_changes
from tests.mutants.page import generated_table_of
from tests.mutants.run import MutantError, Verdict, mutated


@pytest.mark.parametrize(
    ("operator", "old", "new"),
    [
        ("comparison", "is_less = a < b < c", ["(a <= b < c)", "(a < b <= c)"]),
        ("comparison", "if a is not b: f()", ["if (a is b)"]),
        ("arithmetic", "a = b - c % d", ["(b + c % d)", "(c // d)"]),
        ("arithmetic", "total += b", ["total -= b"]),
        ("constant", "a = b[3]", ["b[4]"]),
        ("constant", "a = 0.5 * b", ["1.5 * b"]),
        ("constant", "a = 1e9 * b", ["2000000000.0 * b"]),
        ("boolean", "a = b and not c", ["(b or not c)", "b and c"]),
        ("boolean", "a = f(is_all=True)", ["is_all=False"]),
        ("boolean", "if é.ready(): f()", ["if (not é.ready())"]),
        ("dropped call", "é.wait(); g()", ["pass; g()", "é.wait(); pass"]),
        ("dropped call", "async def f():\n    await g()", ["    pass"]),
        ("swapped arguments", "f(a, b, 1)", ["f(b, a, 1)"]),
        ("early end", "def f(a):\n    a.g()\n    a.h()", ["    a.g()\n    return"]),
        ("early end", "for a in b:\n    continue", ["    break"]),
        ("empty branch", "if a:\n    f()\nelse:\n    g()", ["    pass\nelse", "else:\n    pass"]),
        ("arithmetic", "a = 'text' + b", []),
        ("swapped arguments", "isinstance(a, b)", []),
        ("constant", "def f(a: Literal[1]): raise E(f'{a + 1}')", []),
    ],
)  # fmt: skip
def test_each_operator_makes_its_faults_and_nothing_else(operator, old, new):
    changes = [change for change in find_changes(old, "a.py") if change.operator == operator]
    assert len(changes) == len(new)
    for change, text in zip(changes, new, strict=True):
        assert text in change.apply(old)
        compile(change.apply(old), "a.py", "exec")


def test_a_mutant_has_the_same_key_where_its_line_has_moved():
    body = "def f(a, b):\n    return a + 1 if a < b else b\n"
    moved = "# A comment.\nimport os\n\n\n" + body.replace("f(a, b)", "f(a: int, b: int)")
    keys, after = ([one.key for one in find_changes(text, "a.py")] for text in (body, moved))
    assert keys == after and len(set(keys)) == len(keys) >= 3
    assert keys != [one.key for one in find_changes(body.replace("a < b", "b > a"), "a.py")]


SOURCE = """\
def larger(a, b):
    return a if a > b else b


def never(a):
    return a + 1


LIMIT = 3
"""
TESTS = """\
from megatron_asynchzp.room.numbers import LIMIT, larger


def test_of_equals():
    assert larger(2, 2) == 2


def test_of_others():
    assert larger(LIMIT, 2) == 3
"""


@pytest.fixture
def package(tmp_path) -> Path:
    """A repository in which one file has changed since its only commit."""
    tree = tmp_path / "tree"
    source = tree / "megatron_asynchzp" / "room" / "numbers.py"
    source.parent.mkdir(parents=True)
    source.write_text("# Nothing yet.\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tree)]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "First"]):
        subprocess.run([*git, *words], check=True)
    source.write_text(SOURCE)
    shutil.copytree(Path(generated.__file__).parent, tree / "tests" / "mutants")
    (tree / "tests" / "test_numbers.py").write_text(TESTS)
    return tree


def test_the_tests_of_a_line_ran_it_and_an_interrupted_run_goes_on(package, tmp_path, monkeypatch):
    cache, files = tmp_path / "cache", ["tests/test_numbers.py"]
    assert read_lines_run(cache, package, files)[1] == files
    watch(cache, package, files)
    lines_run, missing = read_lines_run(cache, package, files)
    assert missing == []
    mutants = generate(package, 100, "HEAD")
    assert {mutant.room for mutant in mutants} == {"room"}
    names = {}
    for mutant in mutants:
        assert mutated(mutant.mutant, package) != SOURCE
        tests = mutant.find_tests(lines_run)
        names[mutant.change.line] = {test.address.partition("::")[2] for test in tests}
    # A line of a module runs for whoever imports it, for whom any test of the file stands.
    assert names == {2: {"test_of_equals", "test_of_others"}, 6: set(), 9: names[2]}
    ran: list[list[str]] = []

    def run_tests(tests, tree, mutant=None, limit_s=0.0, options=("-x",)):
        ran.append(list(tests))
        if mutant is not None and len(ran) == 2:
            raise KeyboardInterrupt  # in the midst of the second one
        return (
            (0, "") if mutant is None or "LIMIT" in mutant.new else (1, f"FAILED {tests[-1]} - x")
        )

    monkeypatch.setattr(generated, "run_tests", run_tests)
    journal, rows = tmp_path / "journal.jsonl", []
    with pytest.raises(KeyboardInterrupt):
        run_generated(mutants, package, lines_run, Journal(journal), 1, rows.append)
    num_before = len(journal.read_text().splitlines())
    assert 0 < num_before < 3
    run_generated(mutants, package, lines_run, Journal(journal), 1, rows.append)
    assert {row["line"]: row["verdict"] for row in rows} == {
        2: Verdict.CAUGHT, 6: NO_TEST, 9: Verdict.MISSED,
    }  # fmt: skip
    assert len({row["key"] for row in rows}) == len(rows) == 3  # none ran again
    assert len(ran) == 4 and len(ran[-1]) == 1  # at last what caught one, on the unharmed tree
    assert all(row.get("confirmed") for row in Journal(journal).rows.values() if row["line"] == 2)


def test_a_test_that_fails_on_the_unharmed_tree_catches_nothing(package, tmp_path, monkeypatch):
    test = "tests/test_numbers.py::test_of_equals"
    monkeypatch.setattr(generated, "run_tests", lambda *_, **__: (1, f"FAILED {test} - x"))
    mutants, journal = generate(package, 100, "HEAD"), Journal(tmp_path / "journal.jsonl")
    lines_run, _ = read_lines_run(tmp_path / "cache", package, [])
    run = {"outcome": "passed", "seconds": 1.0, "keys": keys_of_lines(SOURCE, "numbers.py")[2]}
    lines_run.add({"tests": {test: run}, "shares": False})
    with pytest.raises(MutantError, match="test_of_equals"):
        run_generated(mutants, package, lines_run, journal, 1, lambda _: None)
    assert all(row["verdict"] != Verdict.CAUGHT for row in journal.rows.values())


def test_the_page_has_the_share_of_each_room_and_every_mutant_that_is_not_caught():
    row = {
        "key": "a", "room": "engine/comm", "file": "engine/comm/a.py", "line": 3, "function": "f",
        "old": "a | b", "new": "a & b", "verdict": "caught", "date": "2027-01-01",
        "command": "c",
    }  # fmt: skip
    missed = row | {"key": "b", "verdict": "not caught"}
    since = row | {"key": "d", "first_verdict": "not caught", "test": "tests/t.py::test_it[1]"}
    page = generated_table_of([row, missed, missed | {"key": "c", "why": "b is 0"}, since])
    assert "2 of 3 caught (67%), 1 before tests were added; 1 equivalent · [record]" in page
    assert "| `engine/comm/` | 4 | 2 | 1 | 1 |" in page
    assert page.count("| `a \\| b` → `a & b` | `f` |") == 1
