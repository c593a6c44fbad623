# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a mutant is."""

from dataclasses import dataclass

PACKAGE = "megatron_asynchzp"


@dataclass(frozen=True)
class Mutant:
    """One deliberate fault.

    name: for the command line; breaks: the law or promise that no longer holds; file: in the
    package, or of scripts/ with that; old, new: text that occurs exactly once in the file, and what
    replaces it; test: the pytest address of the one test that must fail.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    test: str

    @property
    def path(self) -> str:
        return self.file if self.file.startswith("scripts/") else f"{PACKAGE}/{self.file}"

    @property
    def test_function(self) -> tuple[str, str]:
        """File and function of the test, without parameters."""
        file, _, function = self.test.partition("::")
        return file, function.partition("[")[0]


def room_of(file: str) -> str:
    """The room that holds `file`, a path below the package: two folders deep within the engine."""
    *folders, _ = file.split("/")
    return "/".join(folders[: 2 if folders[:1] == ["engine"] else 1]) or PACKAGE
