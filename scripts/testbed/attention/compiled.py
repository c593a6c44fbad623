# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the fused kernels for GPUs on a machine without one."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_asynchzp.attention.triton_backward import backward_kv_kernel, backward_q_kernel
from megatron_asynchzp.attention.triton_forward import (
    BACKWARD_Q,
    FORWARD,
    as_options,
    backward_kv_table,
    forward_kernel,
    padded_dim,
)

KERNELS = {
    "forward": (forward_kernel, lambda capability: FORWARD),
    "dk and dv": (backward_kv_kernel, backward_kv_table),
    "dq": (backward_q_kernel, lambda capability: BACKWARD_Q),
}
_FP32 = {"lse_ptr", "delta_ptr", "shift_ptr"}
_INT32 = {"start_ptr", "stop_ptr", "row_first_ptr", "row_last_ptr"}


class Usage(NamedTuple):
    registers: int
    spilled_bytes: int
    shared_bytes: int


def compiled(kernel: str, dim: int, *, sm: int, has_shift: bool, dtype: str = "fp16") -> Usage:
    """Of `kernel` for GPUs of compute capability sm / 10."""
    function, table_of = KERNELS[kernel]
    options = as_options(table_of(divmod(sm, 10))[max(64, padded_dim(dim))])
    # fmt: off
    constants = {
        "DIM": dim, "VALUE_DIM": dim, "PADDED_DIM": padded_dim(dim),
        "PADDED_VALUE_DIM": padded_dim(dim), "HAS_SHIFT": has_shift, "PRECISION": "tf32",
        "BLOCK_M": options["BLOCK_M"], "BLOCK_N": options["BLOCK_N"],
    }
    # fmt: on
    signature, divisible = {}, {}
    for index, name in enumerate(function.arg_names):
        signature[name] = _type_of(name, dtype, constants)
        # Pointers and strides of ordinary tensors are multiples of 16, as at a launch.
        if name.endswith(("_ptr", "_batch", "_head", "_row")):
            divisible[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constexprs=constants, attrs=divisible)
    launch = {name: options[name] for name in ("num_warps", "num_stages")}
    kernel_of_sm = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=launch)
    return _usage(kernel_of_sm.asm["ptx"], kernel_of_sm.metadata.shared, sm)


def _type_of(name: str, dtype: str, constants: dict) -> str:
    if name in constants:
        return "constexpr"
    if name in _FP32:
        return "*fp32"
    if name in _INT32:
        return "*i32"
    if name.endswith("_ptr"):
        return f"*{dtype}"
    return "fp32" if name.startswith("scale") else "i32"


def _usage(ptx: str, shared_bytes: int, sm: int) -> Usage:
    name = "ptxas-blackwell" if sm >= 100 else "ptxas"
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    arch = f"sm_{sm}" + ("a" if sm >= 90 else "")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [str(ptxas), "-v", "--gpu-name", arch, str(path), "-o", f"{path}.cubin"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", output))
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", output))
    return Usage(registers, spilled, shared_bytes)
