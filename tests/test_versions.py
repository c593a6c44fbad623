# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Which versions were tested, what is said of others, and that an install replaces nothing."""

import math
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from megatron.core import package_info

from megatron_asynchzp.versions import MEGATRON, TORCH, Version, untested
from scripts.versions import __main__ as versions
from scripts.versions import cells
from scripts.versions.__main__ import Outcome
from tests.support.selection import slow_unless

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name, tested", [("torch", TORCH), ("megatron-core", MEGATRON)])
def test_versions_that_were_tested_need_no_line_whatever_follows_their_minor_number(name, tested):
    for version in tested:
        for rest in ("", ".0", ".1+cu130", ".0a0+git1234", "rc1"):
            assert not list(untested({name: version + rest}))


@pytest.mark.parametrize("name, tested", [("torch", TORCH), ("megatron-core", MEGATRON)])
@pytest.mark.parametrize("version", ["0.1.0", "0.20.0rc2", "2.1.0", "2.16.0", "2.110.0", "3.13.0"])
def test_another_version_is_one_line_with_its_name_and_what_was_tested(name, tested, version):
    (line,) = untested({name: version})
    assert line.startswith(f"{name} {version} ") and "\n" not in line
    assert ", ".join(tested) in line


def test_versions_are_compared_by_their_numbers():
    assert Version.of("2.9") < Version.of("2.10.0a0") < Version.of("3.0")


def test_the_versions_of_this_environment_are_among_those_that_are_tested():
    found = {"torch": torch.__version__, "megatron-core": package_info.__version__}
    assert not list(untested(found))


def test_no_dependency_of_a_user_has_an_upper_bound():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [one for name, extra in extras.items() if name != "dev" for one in extra]
    for one in [*project["dependencies"], *wanted]:
        assert not re.search("<|==|~=", one.partition(";")[0]), one


def _run_cell(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> list[Outcome]:
    """A cell that is this environment, with one file of tests."""
    test = folder / "test_one.py"
    test.write_text(text)
    monkeypatch.setattr(versions, "FOLDER", folder)
    monkeypatch.setattr(versions, "python_of", lambda cell: sys.executable)
    monkeypatch.setattr(versions, "replaced_by_install", lambda cell, python: [])
    monkeypatch.setattr(versions, "environment_of", lambda cell: os.environ)
    monkeypatch.setattr(cells, "TESTS", [str(test)])
    return list(versions.outcomes_of([cells.Cell()]))


_SKIPPED = "import pytest\n@pytest.mark.skip\ndef test_a(): pass"


@pytest.mark.parametrize(
    "text, is_wrong, said",
    [
        slow_unless(False, "def test_a(): pass", False, "1 passed, 0 failed"),
        ("def test_a(): pass\ndef test_b(): assert 0", True, "1 passed, 1 failed"),
        slow_unless(
            False, "import pytest\n@pytest.mark.skip\ndef test_a(): pass", True, "0 passed"
        ),
        slow_unless(False, "def test_a(: pass", True, "pytest ended with status"),
    ],
)
def test_a_cell_of_versions_is_good_where_its_tests_ran_and_passed(
    tmp_path, monkeypatch, text, is_wrong, said
):
    (outcome,) = _run_cell(tmp_path, monkeypatch, text)
    assert outcome.is_wrong is is_wrong and said in outcome.said[0]


def test_what_a_cell_runs_exists():
    assert all((ROOT / one).exists() for one in cells.TESTS)


@pytest.mark.parametrize("error, is_wrong", [(0.0, False), (1e-7, False), (1e-3, True)])
def test_a_moved_checkpoint_has_its_bits_and_its_losses(monkeypatch, error, is_wrong):
    cell = cells.Cell()._asdict()
    move = {"written": cell, "loaded": cell, "tensors": 3, "differing": [], "loss_error": error}
    monkeypatch.setattr(versions, "moves", lambda *_: iter([move]))
    (outcome,) = versions.moved_checkpoints()
    assert outcome.is_wrong is is_wrong
    monkeypatch.setattr(versions, "moves", lambda *_: iter([move | {"loss_error": math.nan}]))
    assert next(versions.moved_checkpoints()).is_wrong
