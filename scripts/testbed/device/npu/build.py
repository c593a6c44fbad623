# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Fetches torch_npu's wheel into a folder of its own, and compiles the stand-ins for CANN.

No other process finds the folder. `python -m scripts.testbed.device.npu.build` makes both ahead of
time. It must not import torch.
"""

import os
import re
import sys
from importlib.metadata import version
from pathlib import Path

from scripts.testbed.compiler import (
    CompileError,
    compiled_once,
    fetch_package,
    find_compiler,
    run_compiler,
)
from scripts.testbed.device.build import (
    LINK,
    Build,
    Libraries,
    Wheels,
    cuda_folder,
    digest,
    symbols,
)

_HERE = Path(__file__).parent
_LIBRARY = "libascendcl.so"
# What torch_npu is linked to; all of it is in one library.
_OTHERS = ("opapi", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "hcomm")
# What torch_npu's header of its allocator includes and is not compiled with.
_REPLACED = (
    "logging/LogContext.h",
    "core/npu/NPUGraphsUtils.h",
    "core/npu/NPUGuard.h",
    "core/npu/NPUStream.h",
    "core/npu/register/OptionsManager.h",
    "distributed/HCCLUtils.hpp",
)


def torch_npu_folder() -> Path:
    """Return the folder with torch_npu for the installed torch, from its package on the registry.

    Nothing of it is part of this project. Raises CompileError if neither the cache nor the registry
    has it.
    """
    wanted = os.environ.get("ASYNCHZP_TORCH_NPU") or version("torch").split("+")[0]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return compiled_once(
        f"torch-npu-{wanted}-{python}",
        lambda out: fetch_package("torch_npu", wanted, out, "--only-binary", ":all:"),
    )


def environment() -> dict[str, str]:
    """Variables of a process in which torch finds emulated NPUs. Raises CompileError."""
    runtime = built_libraries().runtime
    older = os.environ.get("LD_LIBRARY_PATH")
    paths = [str(torch_npu_folder()), *filter(None, sys.path)]
    return {
        "LD_PRELOAD": str(runtime),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(runtime.parent), older])),
        "PYTHONPATH": os.pathsep.join(paths),
    }


def built_libraries() -> Libraries:
    """The libraries for the wheel in torch_npu_folder, compiled at the first use.

    Raises CompileError.
    """
    compiler, shared, wheel = find_compiler(), cuda_folder(), torch_npu_folder()
    sources = [*sorted(_HERE.glob("*.?pp")), _HERE / "exported.map", Path(__file__)]
    name = f"{shared.name}-{wheel.name}-{digest(compiler, (), sources)}"
    folder = compiled_once(name, lambda out: _build(compiler, shared / "objects", wheel, out))
    return Libraries(folder / _LIBRARY, folder / "operations.so")


def _build(compiler: str, objects: Path, wheel: Path, out: Path) -> None:
    out.mkdir()
    build = Build(compiler, Wheels.found(), out.parent)
    shared = sorted(objects.glob("*.o"))
    own = [build.compiled(source) for source in sorted(_HERE.glob("*.cpp"))]
    own.append(build.refusals(_asked(wheel / "torch_npu"), [*shared, *own]))
    exported = f"-Wl,--version-script={_HERE / 'exported.map'}"
    library = out / _LIBRARY
    soname = f"-Wl,-soname,{_LIBRARY}"
    run_compiler(compiler, [*shared, *own, *LINK, soname, exported, "-o", library])
    for name in _OTHERS:
        (out / f"lib{name}.so").symlink_to(_LIBRARY)
    build.operations(
        out / "operations.so", _HERE, _headers_and_libraries(wheel / "torch_npu", build, out)
    )


def _headers_and_libraries(wheel: Path, build: Build, out: Path) -> list[str]:
    stand_ins = build.scratch / "stand_ins"
    for name in _REPLACED:
        path = stand_ins / "torch_npu/csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('#include "stand_ins.hpp"\n')
    # fmt: off
    return [
        f"-I{stand_ins}", f"-I{wheel / 'include'}", f"-L{wheel / 'lib'}", "-ltorch_npu", f"-L{out}",
        "-lascendcl", "-Wl,--allow-shlib-undefined",
    ]
    # fmt: on


def _asked(wheel: Path) -> set[str]:
    """Functions of CANN that the wheel's libraries are linked to."""
    libraries = [
        wheel / "lib/libtorch_npu.so",
        wheel / "lib/libtensorpipe.so",
        *wheel.glob("_C*.so"),
    ]
    names = {name for one in libraries if one.exists() for name in symbols(one, "--undefined-only")}
    return {name for name in names if re.match(r"(acl|Hccl|rt[A-Z]|Msprof)", name)}


if __name__ == "__main__":
    try:
        print(built_libraries().runtime)
    except CompileError as error:
        sys.exit(f"no emulated NPU: {error}")
