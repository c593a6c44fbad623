# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Counts a process's memory: bytes of its CPU tensors, live and at their peak, and resident bytes.

The count of tensors is exact, over all threads; the kernel counts resident bytes (Linux only).

Without a C++ compiler there is no count of tensors (None), and no substitute: resident size and
profilers are off by a factor on engines with threads.
"""

import ctypes
import gc
import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from scripts.testbed.compiler import CompileError, compiled_once, find_compiler, run_compiler

_SOURCE = Path(__file__).with_name("counting_allocator.cpp")


class MemoryCount:
    """The counting allocator, installed; a process has one."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        for name in ("live", "peak"):
            getattr(library, f"asynchzp_{name}").restype = ctypes.c_int64
        library.asynchzp_install()

    @property
    def live_nbytes(self) -> int:
        """Of all tensors allocated since the installation and not freed yet."""
        return self._library.asynchzp_live()

    @property
    def peak_nbytes(self) -> int:
        """The highest live_nbytes since the installation or reset_peak."""
        return self._library.asynchzp_peak()

    def reset_peak(self) -> None:
        self._library.asynchzp_reset_peak()

    def uninstall(self) -> None:
        """Count no new tensors; those counted already leave the count when they are freed."""
        self._library.asynchzp_uninstall()


def install_memory_count() -> MemoryCount | None:
    """Count every CPU tensor allocated from now on."""
    try:
        return MemoryCount(ctypes.CDLL(str(compiled_library())))
    except CompileError as error:
        print(f"memory is not counted: {error}", flush=True)
        return None


def compiled_library() -> Path:
    """The shared library for this torch, compiled at the first use (a few seconds).

    Raises CompileError.
    """
    made_of = f"{torch.__version__} {_SOURCE.read_text()}"
    digest = hashlib.sha256(made_of.encode()).hexdigest()[:16]
    return compiled_once(f"counting_allocator-{digest}.so", _compile)


def _compile(library: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    # fmt: off
    run_compiler(find_compiler(), [
        "-std=c++20", "-O2", "-shared", "-fPIC", _SOURCE, "-o", library,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-lc10",
    ])
    # fmt: on


# ---- the process, as the kernel sees it

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
    """Watches this process from its creation on."""

    def __init__(self):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR.write_text(_RESET_PEAK)
        self._rest_nbytes = resident_nbytes()

    def peak(self) -> ResidentPeak:
        return ResidentPeak(self._rest_nbytes, max(self._rest_nbytes, _status("VmHWM")))


def resident_nbytes() -> int:
    """Of this process, now."""
    return _status("VmRSS")


def _status(field: str) -> int:
    line = next(one for one in _STATUS.read_text().splitlines() if one.startswith(f"{field}:"))
    return int(line.split()[1]) << 10
