# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""This process as if the package alone had been installed: what it does not ask for is missing."""

import re
import sys
import tomllib
from importlib import metadata
from importlib.abc import MetaPathFinder
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _needed() -> set[str]:
    """Distributions that `pip install .` installs: the dependencies, and theirs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found, left = set[str](), [Requirement(line) for line in project["dependencies"]]
    while left:
        needed = left.pop()
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        if (key := _key(needed.name)) not in found:
            found.add(key)
            try:
                left += map(Requirement, metadata.requires(needed.name) or ())
            except metadata.PackageNotFoundError:
                pass  # of another platform
    return found


class _Missing(MetaPathFinder):
    def __init__(self) -> None:
        needed = _needed()
        owners = metadata.packages_distributions()
        self._missing = {
            module for module, names in owners.items() if not needed & set(map(_key, names))
        } - {"megatron_asynchzp"}

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in self._missing:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def forget_other_packages() -> None:
    """From now on other packages cannot be imported; those that were are forgotten."""
    finder = _Missing()
    assert "pytest" in finder._missing
    for name in list(sys.modules):
        if name.partition(".")[0] in finder._missing:
            del sys.modules[name]
    sys.meta_path.insert(0, finder)
