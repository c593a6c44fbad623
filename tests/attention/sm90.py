# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the fused kernels for sm_90 on a machine without a GPU, and reads from the assembler
what each spills."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_asynchzp.attention.triton_backward import backward_kv_kernel, backward_q_kernel
from megatron_asynchzp.attention.triton_forward import forward_kernel
from megatron_asynchzp.attention.triton_tiles import (
    BACKWARD_KV,
    BACKWARD_Q,
    FORWARD,
    SHIFT_BLOCK,
    SHIFT_PARTS,
    as_options,
    padded_dim,
)

KERNELS = {
    "forward": (forward_kernel, FORWARD),
    "dk and dv": (backward_kv_kernel, BACKWARD_KV),
    "dq": (backward_q_kernel, BACKWARD_Q),
}
_FP32 = {"lse_ptr", "delta_ptr", "shift_ptr"}
_INT32 = {"start_ptr", "stop_ptr", "row_first_ptr", "row_last_ptr"}


class Usage(NamedTuple):
    spilled_bytes: int
    shared_bytes: int


def compile_for_sm90(kernel: str, dim: int, *, has_shift: bool, dtype: str = "fp16") -> Usage:
    function, table = KERNELS[kernel]
    options = as_options(table[max(64, padded_dim(dim))])
    # fmt: off
    constants = {
        "DIM": dim, "VALUE_DIM": dim, "PADDED_DIM": padded_dim(dim),
        "PADDED_VALUE_DIM": padded_dim(dim), "SHIFT_BLOCK": SHIFT_BLOCK, "HAS_SHIFT": has_shift,
        "SHIFT_PARTS": SHIFT_PARTS, "PRECISION": "tf32",
        "BLOCK_M": options["BLOCK_M"], "BLOCK_N": options["BLOCK_N"],
    }
    # fmt: on
    signature, divisible = {}, {}
    for index, name in enumerate(function.arg_names):
        signature[name] = _type_of(name, dtype, constants)
        # Pointers and strides of ordinary tensors are multiples of 16, as at a launch.
        if name.endswith(("_ptr", "_batch", "_head", "_row")) and not name.endswith("range_batch"):
            divisible[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constexprs=constants, attrs=divisible)
    launch = {name: options[name] for name in ("num_warps", "num_stages")}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)
    return _usage(compiled.asm["ptx"], compiled.metadata.shared)


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


def _usage(ptx: str, shared_bytes: int) -> Usage:
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [str(ptxas), "-v", "--gpu-name", "sm_90a", str(path), "-o", f"{path}.cubin"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", output))
    return Usage(spilled, shared_bytes)
