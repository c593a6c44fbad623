# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The package's language and size stay within limits, which only go down."""

from pathlib import Path

from tests.architecture.counts import counts

ROOT = Path(__file__).parents[2]
LIMITS = {
    "lines": 40090,
    "docstring words": 36247,
    "docstring lines": 3342,
    "raise ConfigurationError": 252,
    "context variables": 3,
    "assignments of __class__": 9,
    "reads of stack frames": 3,
    "methods of StepScheduler and HZPRuntime": 59,
    "methods of HZPUnit": 43,
    "functions called refuse_*": 28,
    "class names with two meanings": 0,
    '"what is"': 0,
    '"of what"': 0,
    '"of which"': 0,
    '"somebody, nobody, whoever"': 0,
    '"beside"': 1,
    '"of one"': 6,
    '"None where"': 0,
    "variables called one": 18,
    "variables called found": 13,
    "variables called other": 6,
    "variables called what": 0,
    "variables called where": 2,
}
SAMPLE = '''"""What is here, of which nobody knows."""
import sys
from contextvars import ContextVar

kept = ContextVar("kept")  # one of what is kept


class HZPUnit:
    """None where it is of one."""

    def refuse_one(self, other):
        """Refuse."""
        found = sys._getframe(1)
        found.__class__ = HZPUnit
        raise ConfigurationError("beside what is beside")


class Other:
    class HZPUnit:
        pass
'''


def test_no_count_of_the_package_is_above_its_limit():
    found = counts(ROOT)
    assert found.keys() == LIMITS.keys()
    over = {name: count for name, count in found.items() if count > LIMITS[name]}
    assert not over, f"above the limit: {over}"


def test_words_and_constructs_are_counted_in_docstrings_comments_and_code(tmp_path: Path):
    package = tmp_path / "megatron_asynchzp" / "room"
    package.mkdir(parents=True)
    (package / "file.py").write_text(SAMPLE)
    found = {name: count for name, count in counts(tmp_path).items() if count}
    assert found == {
        "lines": 20,
        "docstring words": 14,
        "docstring lines": 3,
        "raise ConfigurationError": 1,
        "context variables": 1,
        "assignments of __class__": 1,
        "reads of stack frames": 1,
        "methods of HZPUnit": 1,
        "functions called refuse_*": 1,
        "class names with two meanings": 1,
        '"what is"': 2,
        '"of what"': 1,
        '"of which"': 1,
        '"somebody, nobody, whoever"': 1,
        '"of one"': 1,
        '"None where"': 1,
        "variables called found": 1,
        "variables called other": 1,
    }
