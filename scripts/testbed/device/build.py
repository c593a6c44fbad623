# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the emulated device against the headers in the installed wheels, once.

That takes half a minute; `python -m scripts.testbed.device.build` does it ahead of time. It must
not import torch: the libraries have to be there before torch is.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from scripts.testbed.compiler import CompileError, compiled_once, find_compiler, run_compiler

_HERE = Path(__file__).parent
OPERATIONS = _HERE / "operations.cpp"
_WHEELS = ("torch", "nvidia-cuda-runtime", "nvidia-nccl-cu13", "triton")
# As libcuda, so that libraries that are linked against the driver find it loaded.
SONAME = "-Wl,-soname,libcuda.so.1"
LINK = ("-shared", "-Wl,-Bsymbolic", "-lpthread", "-lrt", "-ldl")
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden")


class Libraries(NamedTuple):
    """runtime: preloaded, below torch; operations: beside it; it loads them when torch is there."""

    runtime: Path
    operations: Path


def environment() -> dict[str, str]:
    """Variables of a process in which torch finds CUDA devices. Raises CompileError."""
    return {"LD_PRELOAD": str(built_libraries().runtime)}


def built_libraries() -> Libraries:
    """The libraries for the installed wheels, compiled at the first use.

    Raises CompileError.
    """
    folder = cuda_folder()
    return Libraries(folder / "runtime.so", folder / "operations.so")


def cuda_folder() -> Path:
    """With the libraries, and in `objects` what every platform is linked from."""
    compiler, wheels = find_compiler(), Wheels.found()
    sources = [*_sources(_HERE), *_sources(_HERE / "cuda"), Path(__file__)]
    name = f"device-{digest(compiler, _WHEELS, sources)}"
    return compiled_once(name, lambda out: Build(compiler, wheels, out.parent).run(out))


def _sources(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.cpp"), *folder.glob("*.hpp")])


def digest(compiler: str, wheels: Iterable[str], sources: Iterable[Path]) -> str:
    """The sources of a library. wheels: names of distributions."""
    compiled_by = _output([compiler, "--version"]).splitlines()[0]
    parts = [compiled_by, *(f"{name} {version(name)}" for name in wheels)]
    text = "\n".join([*parts, *(path.read_text() for path in sources)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Wheels(NamedTuple):
    """Where the installed wheels have their headers and libraries."""

    torch: Path
    cuda: Path
    nccl: Path
    compiler_headers: Path

    @classmethod
    def found(cls) -> "Wheels":
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
        used = symbols(self.torch / "lib/libcaffe2_nvrtc.so", "--undefined-only")
        return declared | renamed | {name for name in used if re.match(r"cu[A-Z]", name)}


class Build(NamedTuple):
    """Compiles for one platform; scratch: a folder that goes when all is made."""

    compiler: str
    wheels: Wheels
    scratch: Path

    def run(self, out: Path) -> None:
        """Leaves CUDA's libraries in `out`."""
        objects = out / "objects"
        objects.mkdir(parents=True)
        with ThreadPoolExecutor(2) as pool:
            linked = ["-lc10_cuda", "-ltorch_cuda"]
            operations = pool.submit(self.operations, out / "operations.so", _HERE / "cuda", linked)
            shared = [
                self.compiled(one, objects) for one in _HERE.glob("*.cpp") if one != OPERATIONS
            ]
            mine = [self.compiled(one) for one in (_HERE / "cuda").glob("*.cpp")]
            mine.append(self.refusals(self._asked(), [*shared, *mine]))
            run_compiler(self.compiler, [*shared, *mine, *LINK, SONAME, "-o", out / "runtime.so"])
            operations.result()

    def operations(self, library: Path, platform: Path, linked: Sequence[str | Path]) -> None:
        """The operations of the folder with platform.hpp."""
        include = self.wheels.torch / "include"
        # fmt: off
        run_compiler(self.compiler, [
            *_FLAGS, f"-I{platform}", *self._headers(), f"-I{include}",
            f"-I{include}/torch/csrc/api/include", OPERATIONS, f"-L{self.wheels.torch / 'lib'}",
            "-lc10", "-ltorch_cpu", *linked, "-shared", "-o", library,
        ])
        # fmt: on

    def compiled(self, source: Path, folder: Path | None = None) -> Path:
        """The object of a source, in `folder` or the scratch."""
        target = (folder or self.scratch) / f"{source.stem}.o"
        run_compiler(self.compiler, [*_FLAGS, *self._headers(), "-c", source, "-o", target])
        return target

    def _headers(self) -> list[str]:
        # What the runtime's headers include of the compiler's.
        with suppress(FileExistsError):  # two threads compile
            (self.scratch / "crt").symlink_to(self.wheels.compiler_headers)
        folders = (_HERE, self.scratch, self.wheels.cuda / "include", self.wheels.nccl / "include")
        return [f"-I{folder}" for folder in folders]

    def _asked(self) -> set[str]:
        asked = set(self.wheels.driver_names())
        for library in self.wheels.exported():
            names = symbols(library, "--defined-only")
            asked |= {name for name in names if re.match(r"(__cuda|cuda|p?nccl)[A-Z]", name)}
        return asked

    def refusals(self, asked: set[str], objects: Sequence[Path]) -> Path:
        """Return the object with every function that is asked for and not emulated."""
        here = {
            name for one in objects for name in symbols(one, "--defined-only", is_dynamic=False)
        }
        functions = [
            f'EXPORT void {name}() {{ device::end("{name} is not emulated"); }}'
            for name in sorted(asked - here)
        ]
        source = self.scratch / "refusals.cpp"
        source.write_text("\n".join(['#include "report.hpp"', *functions, ""]))
        return self.compiled(source)


def symbols(library: Path, which: str, is_dynamic: bool = True) -> set[str]:
    """Names in a library or an object. which: a flag of nm."""
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
