# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The combinations of versions that are tested (a cell is one), and the tests of each."""

from typing import NamedTuple


class Cell(NamedTuple):
    """Versions as pip takes them; an empty one is pip's choice."""

    torch: str = "2.13.0"
    megatron: str = "0.19.2"
    python: str = "3.12"
    transformers: str = ""

    @property
    def name(self) -> str:
        """For a folder and a line."""
        parts = [f"torch-{self.torch}", f"megatron-{self.megatron}", f"python-{self.python}"]
        if self.transformers:
            parts.append(f"transformers-{self.transformers}")
        return "_".join(parts)

    @property
    def requirements(self) -> list[str]:
        """What an install of the cell asks for beside this package."""
        wanted = [f"torch=={self.torch}", f"megatron-core[training]=={self.megatron}"]
        transformers = f"=={self.transformers}.*" if self.transformers else ""
        return [*wanted, f"transformers{transformers}"]

    @property
    def _converts(self) -> bool:
        # With transformers 4, which people have beside Megatron, `asynchzp hf` is refused.
        return self.transformers != "4"

    @property
    def extras(self) -> list[str]:
        """Extras of this package for what such an environment has already."""
        return ["megatron", "hf"] if self._converts else ["megatron"]

    @property
    def tests(self) -> list[str]:
        """Files and folders, from the root."""
        return [one for one in TESTS if self._converts or one != "tests/hf"]


class Install(NamedTuple):
    """What a page tells a user to install: `pip install ".[EXTRA]"`, beside a torch."""

    extra: str
    torch: str

    @property
    def name(self) -> str:
        """For a folder and a line."""
        return f"install-{self.extra or 'plain'}_torch-{self.torch}"


NEWEST_TORCH = Cell(torch="2.15.0")
"""What `./scripts/test.sh --all` runs beside the versions of its own environment."""

CELLS = [
    *(Cell(torch=torch) for torch in ("2.11.0", "2.12.1", "2.13.0", "2.14.1")),
    NEWEST_TORCH,
    *(
        Cell(torch=torch, megatron=megatron)
        for megatron in ("0.18.2", "0.19.0")
        for torch in ("2.13.0", "2.15.0")
    ),
    *(Cell(python=python) for python in ("3.13", "3.14")),
    *(Cell(transformers=transformers) for transformers in ("4", "5")),
]

INSTALLS = [
    Install(extra, torch)
    for torch in (Cell().torch, NEWEST_TORCH.torch)
    for extra in ("", "hf", "megatron", "quickstart")
]

# Each writes a checkpoint, which all others load.
CHECKPOINT_CELLS = [
    *(Cell(megatron=megatron) for megatron in ("0.18.2", "0.19.0", "0.19.2")),
    *(Cell(torch=torch) for torch in ("2.11.0", "2.15.0")),
    Cell(python="3.13"),
]

# A few minutes: engine, patch points, parity with stock, checkpoints, PASA, the emulated device.
TESTS = [
    "tests/test_versions.py",
    "tests/test_sharded_model.py",
    "tests/zero/test_engine_parity.py",
    "tests/mcore/patches",
    "tests/mcore/test_differences.py",
    "tests/mcore/test_parity.py",
    "tests/mcore/checkpoint/test_resuming.py",
    "tests/mcore/attention",
    "tests/attention/test_equivalence.py",
    "tests/hf",
    "tests/device/test_engine.py",
    "tests/device/test_torch.py",
]
