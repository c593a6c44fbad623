# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a Megatron script on Ascend NPUs: torch_npu's own mapping of torch.cuda to torch.npu first.

    torchrun ... scripts/train/on_ascend.py scripts/train/pretrain_gpt.py [Megatron's flags]

launch.sh --platform ascend does it. Not run by us on a device yet.
"""

import sys
from pathlib import Path


def main(argv: list[str]) -> None:
    if not argv or not Path(argv[0]).is_file():
        sys.exit(f"on_ascend: {argv[0] if argv else 'no script'}: no such script")
    try:
        import torch_npu.contrib.transfer_to_npu  # noqa: F401
    except ImportError as error:
        sys.exit(f"on_ascend: torch_npu cannot be imported: {error}")
    from megatron_asynchzp.launch import run_script

    run_script(Path(argv[0]), argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
