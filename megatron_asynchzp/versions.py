# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The versions of torch and megatron-core that this package was tested with.

No dependency has an upper bound, so an install never replaces what an environment has. An untested
version gets one line when a run starts; each difference in it is refused by name where it is used.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

TORCH = ("2.11", "2.12", "2.13", "2.14", "2.15")
MEGATRON = ("0.18", "0.19", "0.20")
RELEASED = "0.19"  # the last of them that can be installed; 0.20 is a checkout


class Version(NamedTuple):
    """Major and minor number."""

    major: int
    minor: int

    @classmethod
    def of(cls, text: str) -> "Version":
        """Parse "2.13.0+cu130" or "0.19". Raises ValueError."""
        major, minor, *_ = text.split(".")
        return cls(int(major), int("".join(filter(str.isdigit, minor[:3]))))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


def untested(installed: Mapping[str, str]) -> Iterator[str]:
    """Yield one line for each package of `installed` (name -> version) with an untested version."""
    for name, tested in (("torch", TORCH), ("megatron-core", MEGATRON)):
        if name in installed and str(Version.of(installed[name])) not in tested:
            yield (
                f"{name} {installed[name]} was not tested with this version of megatron_asynchzp, "
                f"which was tested with {', '.join(tested)}"
            )
