# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a check is given, and what it answers."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"

_CORES = {"cuda": "multi_processor_count", "npu": "cube_core_num"}
_LARGE = 16  # of them
_SMALL = 10  # times as long


class CheckFailed(Exception):
    """What a check was to show is not so; the message is one line.

    figures: what was measured until then.
    """

    def __init__(self, reason: str, figures: dict[str, Any] | None = None):
        super().__init__(" ".join(reason.split()))
        self.figures = figures or {}


class CheckSkipped(Exception):
    """The check cannot run here; the message is the reason, in one line."""


@dataclass(frozen=True)
class Target:
    """Where a check runs.

    device: "cuda", "npu" or "cpu"; num_gpus: how many GPUs or NPUs there are; folder: for logs and
    traces; is_large: whether a device has the multiprocessors (cube cores of an NPU) for models of
    some size. On a small one, as on a CPU, models are small, and times are reported, not judged.
    """

    device: str
    num_gpus: int
    folder: Path
    is_large: bool = False

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    def longest_s(self, limit_s: float) -> float:
        """Seconds after which is ended what takes `limit_s` at most on a large device."""
        return limit_s * (1 if self.is_large else _SMALL)

    def need_gpus(self, number: int) -> None:
        """Raise CheckSkipped where there are fewer."""
        if self.num_gpus < number:
            what = "GPUs" if self.is_cuda else f"{self.device.upper()}s"
            raise CheckSkipped(f"needs {number} {what}, this machine has {self.num_gpus}")

    @classmethod
    def of_this_machine(cls, folder: Path) -> "Target":
        import torch

        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None or found.type not in _CORES:
            return cls("cpu", 0, folder)
        module = torch.get_device_module(found)
        is_large = getattr(module.get_device_properties(0), _CORES[found.type]) >= _LARGE
        return cls(found.type, module.device_count(), folder, is_large)

    def as_text(self) -> str:
        return json.dumps({**asdict(self), "folder": str(self.folder)})

    @classmethod
    def from_text(cls, text: str) -> "Target":
        target = cls(**json.loads(text))
        return replace(target, folder=Path(target.folder))


@dataclass
class Outcome:
    """The row of one check. seconds: what it took; figures: what it measured, by name."""

    check: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """For the screen."""
        shown = f"{self.check:16} {self.status:8} {self.seconds:6.1f} s"
        return f"{shown}  {self.reason}".rstrip()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
