# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The versions of other packages that this one was tested with. No dependency has an upper bound:
an install never replaces what an environment has. A version that is not listed gets one line when a
run starts; what differs in it is refused where it is used, by name."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

TORCH = ("2.11", "2.12", "2.13", "2.14", "2.15")
MEGATRON = ("0.18", "0.19")


class Version(NamedTuple):
    """Major and minor number, as they are compared."""

    major: int
    minor: int

    @classmethod
    def of(cls, text: str) -> "Version":
        """Parse "2.13.0+cu130" or "0.19". Raises ValueError."""
        major, minor, *_ = text.split(".")
        return cls(int(major), int("".join(filter(str.isdigit, minor[:3]))))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


def untested(found: Mapping[str, str]) -> Iterator[str]:
    """One line for each package of `found` (name -> version) whose version was not tested."""
    for name, tested in (("torch", TORCH), ("megatron-core", MEGATRON)):
        if name in found and str(Version.of(found[name])) not in tested:
            yield (
                f"{name} {found[name]} was not tested with this version of megatron_asynchzp, "
                f"which was tested with {', '.join(tested)}"
            )
