# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The tests notice: every mutant fits the code and names a test; run, each is caught; and the
published table is that of the record."""

import ast

import pytest

from tests.mutants import run
from tests.mutants.catalogue import MUTANTS
from tests.mutants.page import (
    GENERATED,
    RECORD,
    TABLE,
    page_of,
    read_record,
    rows_of,
    table_of,
    verdict_of,
)
from tests.mutants.run import ROOT, Mutant, MutantError, Verdict, mutated, run_mutants


def test_every_law_has_a_mutant_and_each_mutant_a_name_of_its_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
    laws = [mutant.breaks.partition(":")[0] for mutant in MUTANTS]
    assert {f"law {number}" for number in range(1, 8)} <= set(laws)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place_of_code_and_names_a_fast_test(mutant):
    text = mutated(mutant)
    assert text != (ROOT / mutant.path).read_text()
    ast.parse(text)
    file, function = mutant.test_function
    tree = ast.parse((ROOT / file).read_text())
    (found,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function]
    marks = [ast.unparse(decorator) for decorator in found.decorator_list]
    assert "pytest.mark.slow" not in marks


def test_a_snippet_that_is_not_there_or_twice_is_an_error():
    for old, count in (("no such code", 0), ("SPDX", 2)):
        mutant = Mutant("wrong", "", "engine/comm/arena.py", old, "", "")
        with pytest.raises(MutantError, match=f"'{old}' {count} times, not once"):
            mutated(mutant)


def test_the_published_table_is_that_of_its_record_and_has_every_mutant_caught():
    rows = read_record(RECORD)
    assert TABLE.read_text() == page_of(rows, read_record(GENERATED))
    assert all(verdict_of(row) is not Verdict.MISSED for row in rows)
    ran = [(row["mutant"], row["file"], row["test"]) for row in rows]
    assert ran == [(mutant.name, mutant.path, mutant.test) for mutant in MUTANTS]


def test_a_test_that_does_not_end_is_told_from_one_that_fails(monkeypatch):
    ends = {"caught": 1, "late": None, "missed": 0, "no test": 4}

    def run_tests(tests: list[str], tree: object, mutant: Mutant | None = None) -> object:
        return ends[mutant.name] if mutant else 0, ""

    monkeypatch.setattr(run, "run_tests", run_tests)
    mutants = [Mutant(name, "", "engine/comm/arena.py", "class Arena", "", "t::t") for name in ends]
    outcomes = run_mutants(mutants)
    assert [one.verdict for one in outcomes] == ["caught", "timed out", "not caught", "not caught"]
    assert "1 of 4 caught, 1 timed out" in table_of(rows_of(outcomes, "2027-01-01"))


@pytest.mark.slow
def test_every_mutant_is_caught_by_its_test_which_passes_without_it():
    outcomes = run_mutants(MUTANTS)
    missed = [one for one in outcomes if one.verdict is Verdict.MISSED]
    assert not missed, "\n".join(f"{one.mutant.name}: {one.text}" for one in missed)
