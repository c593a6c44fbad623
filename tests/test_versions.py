# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Which versions were tested, what is said of others, and that an install replaces nothing."""

import re
import tomllib
from pathlib import Path

import pytest
import torch
from megatron.core import package_info

from megatron_asynchzp.versions import MEGATRON, TORCH, Version, untested

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name, tested", [("torch", TORCH), ("megatron-core", MEGATRON)])
def test_versions_that_were_tested_need_no_line_whatever_follows_their_minor_number(name, tested):
    for version in tested:
        for rest in ("", ".0", ".1+cu130", ".0a0+git1234", "rc1"):
            assert not list(untested({name: version + rest}))


@pytest.mark.parametrize("name, tested", [("torch", TORCH), ("megatron-core", MEGATRON)])
@pytest.mark.parametrize("version", ["0.1.0", "0.21.0rc2", "2.1.0", "2.16.0", "2.110.0", "3.13.0"])
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
