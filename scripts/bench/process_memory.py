# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the memory of this process as the kernel sees it: resident now, and its highest since a
moment. Must not know what is measured. Linux only.
"""

import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


@dataclass(frozen=True)
class ResidentPeak:
    """Bytes resident before something ran, and at its highest."""

    rest_nbytes: int
    peak_nbytes: int

    @property
    def beyond_nbytes(self) -> int:
        return self.peak_nbytes - self.rest_nbytes


class ResidentMemory:
    """Watches this process from its creation on. What malloc keeps for later is given back before,
    or what follows could hide in it."""

    def __init__(self):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR.write_text(_RESET_PEAK)
        self._rest_nbytes = _status("VmRSS")

    def peak(self) -> ResidentPeak:
        return ResidentPeak(self._rest_nbytes, max(self._rest_nbytes, _status("VmHWM")))


def _status(field: str) -> int:
    line = next(one for one in _STATUS.read_text().splitlines() if one.startswith(f"{field}:"))
    return int(line.split()[1]) << 10
