# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles PASA's fused kernels for GPUs on a machine without one: registers of a thread, bytes
that they spill and shared memory of a block.

    python -m scripts.bench.pasa_kernels --out runs/kernels.jsonl
    python -m scripts.report.add_record pasa_kernels runs/kernels.jsonl
"""

import argparse
from itertools import product
from pathlib import Path

from scripts.report.records import append
from scripts.testbed.attention.compiled import KERNELS, compiled
from scripts.testbed.machine import machine_record


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--dims", type=int, nargs="*", default=[64, 128, 256], help="channels")
    parser.add_argument("--sm", type=int, nargs="*", default=[80, 90, 100], help="architectures")
    parser.add_argument("--out", type=Path, required=True, help="file to append JSON lines to")
    args = parser.parse_args()
    append(args.out, machine_record())
    for kernel, dim, sm in product(KERNELS, args.dims, args.sm):
        used = compiled(kernel, dim, sm=sm, has_shift=True)
        print(f"{kernel}, {dim} channels, sm_{sm}: {used}", flush=True)
        append(
            args.out, {"kind": "kernel", "kernel": kernel, "dim": dim, "sm": sm, **used._asdict()}
        )


if __name__ == "__main__":
    main()
