# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""This process as if a documented install alone had been made: what it does not ask for is
missing."""

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_OURS = ("megatron_asynchzp", "tests", "scripts")


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _asked_by(one: Requirement) -> Iterable[str]:
    if one.name in _OURS:
        return [line for extra in one.extras for line in PROJECT["optional-dependencies"][extra]]
    try:
        return metadata.requires(one.name) or ()
    except metadata.PackageNotFoundError:
        return ()  # of another platform


def _needed(extras: Iterable[str]) -> set[str]:
    """Distributions that `pip install .[EXTRAS]` installs: the dependencies, and theirs."""
    ours = [f"megatron_asynchzp[{extra}]" for extra in extras]
    found, left = set[str](), [Requirement(line) for line in (*PROJECT["dependencies"], *ours)]
    while left:
        needed = left.pop()
        if str(needed) in found:
            continue
        found |= {str(needed), _key(needed.name)}
        for one in map(Requirement, _asked_by(needed)):
            marker = one.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in ("", *needed.extras)):
                left.append(one)
    return found


def forget_other_packages(*extras: str) -> None:
    """From now on what an install with these extras does not bring cannot be imported. What was
    imported of it is forgotten, and so is this package."""
    needed = _needed(extras)
    if "triton" not in extras:
        needed -= {"triton"}  # torch brings it, on some platforms alone
    owners = metadata.packages_distributions()
    missing = {name for name, of in owners.items() if not needed & set(map(_key, of))} - {*_OURS}
    assert "pytest" in missing
    for name in list(sys.modules):
        if name.partition(".")[0] in {*missing, "megatron_asynchzp"}:
            del sys.modules[name]
    sys.modules.update(dict.fromkeys(missing))  # pyright: ignore[reportArgumentType, reportCallIssue]
