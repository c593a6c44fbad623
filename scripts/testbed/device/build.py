# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the emulated device against the headers in the installed wheels, once: half a minute or
less; `python -m scripts.testbed.device.build` does that ahead of time. It must not import torch:
the libraries have to be there before torch is."""

import hashlib
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from scripts.testbed.compiler import CompileError, compiled_once, find_compiler, run_compiler
from scripts.testbed.device.delays import Delays

_HERE = Path(__file__).parent
_OPERATIONS = "operations.cpp"
_WHEELS = ("torch", "nvidia-cuda-runtime", "nvidia-nccl-cu13", "triton")
# As libcuda, so that what is linked against the driver finds it loaded.
_LINK = ("-shared", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic", "-lpthread", "-lrt", "-ldl")
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden")


class Libraries(NamedTuple):
    """runtime: preloaded, below torch; operations: beside it; it loads them when torch is there."""

    runtime: Path
    operations: Path


def environment(num_devices: int = 1, delays: Delays = Delays()) -> dict[str, str]:
    """Variables of a process on the emulated devices; what it starts is on them too.

    Raises CompileError.
    """
    return {
        "LD_PRELOAD": str(built_libraries().runtime),
        "ASYNCHZP_DEVICES": str(num_devices),
        "ASYNCHZP_DEVICE_DELAYS": f"{delays.law} {delays.seed} {delays.longest_us}",
        # Kernels that are compiled for a device cannot run here; Triton's are interpreted.
        "TORCHDYNAMO_DISABLE": "1",
        "TRITON_INTERPRET": "1",
        # The NCCL groups that torch 2.15 makes by default let a stream go on without an event where
        # their watchdog, a thread, has seen the collective end: an order that is not on a stream,
        # which the watch over races would have to learn from threads.
        "TORCH_DIST_USE_NCCL2": "0",
    }


def built_libraries() -> Libraries:
    """The libraries for the installed wheels, compiled at the first use.

    Raises CompileError.
    """
    compiler, wheels = find_compiler(), _Wheels.found()
    name = f"device-{_digest(compiler)}"
    folder = compiled_once(name, lambda out: _Build(compiler, wheels, out.parent).run(out))
    return Libraries(folder / "runtime.so", folder / "operations.so")


def _digest(compiler: str) -> str:
    sources = sorted([*_HERE.glob("*.cpp"), *_HERE.glob("*.hpp"), Path(__file__)])
    compiled_by = _output([compiler, "--version"]).splitlines()[0]
    parts = [compiled_by, *(f"{name} {version(name)}" for name in _WHEELS)]
    text = "\n".join([*parts, *(path.read_text() for path in sources)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Wheels(NamedTuple):
    """Where the installed wheels have their headers and libraries."""

    torch: Path
    cuda: Path
    nccl: Path
    compiler_headers: Path

    @classmethod
    def found(cls) -> "_Wheels":
        site = Path(sysconfig.get_paths()["purelib"])
        # Triton brings the headers of the compiler (crt/), which the runtime's headers include.
        wheels = cls(
            site / "torch",
            site / "nvidia/cu13",
            site / "nvidia/nccl",
            site / "triton/backends/nvidia/include/crt",
        )
        for name in _WHEELS:
            try:
                version(name)
            except PackageNotFoundError as error:
                raise CompileError(f"{name} is missing: not torch's wheel for CUDA 13") from error
        for path in wheels:
            if not path.is_dir():
                raise CompileError(f"{path} is missing")
        return wheels

    def exported(self) -> Iterable[Path]:
        """The libraries whose place the emulated device takes."""
        yield self.cuda / "lib/libcudart.so.13"
        yield self.nccl / "lib/libnccl.so.2"

    def driver_names(self) -> set[str]:
        """Functions of the driver: its library is in no wheel, its header and its users are."""
        header = (self.cuda / "include/cuda.h").read_text()
        declared = set(re.findall(r"\b(cu[A-Z]\w+)\s*\(", header))
        renamed = set(re.findall(r"#define\s+\w+\s+(cu[A-Z]\w+)\s*$", header, re.MULTILINE))
        used = _symbols(self.torch / "lib/libcaffe2_nvrtc.so", "--undefined-only")
        return declared | renamed | {name for name in used if re.match(r"cu[A-Z]", name)}


class _Build(NamedTuple):
    compiler: str
    wheels: _Wheels
    scratch: Path

    def run(self, out: Path) -> None:
        """Leaves both libraries in `out`."""
        out.mkdir()
        (self.scratch / "crt").symlink_to(self.wheels.compiler_headers)
        sources = sorted(set(_HERE.glob("*.cpp")) - {_HERE / _OPERATIONS})
        with ThreadPoolExecutor(2) as pool:
            operations = pool.submit(self._compile_operations, out / "operations.so")
            objects = [self._compiled(source) for source in sources]
            objects.append(self._compiled(self._refusals(objects)))
            run_compiler(self.compiler, [*objects, *_LINK, "-o", out / "runtime.so"])
            operations.result()

    def _compile_operations(self, library: Path) -> None:
        include = self.wheels.torch / "include"
        headers = [f"-I{include}", f"-I{include}/torch/csrc/api/include"]
        # fmt: off
        linked = [f"-L{self.wheels.torch / 'lib'}", "-lc10", "-lc10_cuda", "-ltorch_cpu"]
        run_compiler(self.compiler, [
            *_FLAGS, *self._headers(), *headers, _HERE / _OPERATIONS, *linked,
            "-shared", "-o", library,
        ])
        # fmt: on

    def _compiled(self, source: Path) -> Path:
        target = self.scratch / f"{source.stem}.o"
        run_compiler(self.compiler, [*_FLAGS, *self._headers(), "-c", source, "-o", target])
        return target

    def _headers(self) -> list[str]:
        folders = (_HERE, self.scratch, self.wheels.cuda / "include", self.wheels.nccl / "include")
        return [f"-I{folder}" for folder in folders]

    def _refusals(self, objects: Sequence[Path]) -> Path:
        """A source with every function that is not emulated: it ends the process with its name."""
        asked = set(self.wheels.driver_names())
        for library in self.wheels.exported():
            names = _symbols(library, "--defined-only")
            asked |= {name for name in names if re.match(r"(__cuda|cuda|p?nccl)[A-Z]", name)}
        here = {
            name for one in objects for name in _symbols(one, "--defined-only", is_dynamic=False)
        }
        functions = [
            f'EXPORT void {name}() {{ device::end("{name} is not emulated"); }}'
            for name in sorted(asked - here)
        ]
        source = self.scratch / "refusals.cpp"
        source.write_text("\n".join(['#include "report.hpp"', *functions, ""]))
        return source


def _symbols(library: Path, which: str, is_dynamic: bool = True) -> set[str]:
    if shutil.which("nm") is None:
        raise CompileError("no nm; install binutils")
    lines = _output(["nm", *(["-D"] if is_dynamic else []), which, str(library)]).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if line.strip()}


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    try:
        built_libraries()
    except CompileError as error:
        sys.exit(f"no emulated device: {error}")
