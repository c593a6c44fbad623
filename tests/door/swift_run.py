# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs ms-swift's own `megatron sft`, or `megatron rlhf`, and notes loss and norm of each step.

torchrun ... -m tests.door.swift_run OUT.json [arguments of megatron sft]. Nothing of swift is
changed but for the note.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.door.te_cpu import counted_peak, memory_of, prepare


def train(out: Path, arguments: list[str]) -> None:
    """Call `megatron sft`, or with --rlhf_type `megatron rlhf`. For all ranks of a world."""
    import torch
    import torch.distributed as dist
    from swift.megatron import megatron_rlhf_main, megatron_sft_main  # pyright: ignore[reportMissingImports]
    from swift.megatron.trainers import base  # pyright: ignore[reportMissingImports]

    steps: list[tuple[float, float]] = []
    train_step = base.BaseMegatronTrainer.train_step

    def noting(self: Any, *args: Any) -> Any:
        metrics, norm, updated = train_step(self, *args)
        pairs = [
            torch.atleast_1d(metric["loss"]) for metric in metrics or [{"loss": torch.zeros(2)}]
        ]
        # The sum over tokens and their number; of preferences, the mean.
        total = sum(
            pair if len(pair) == 2 else torch.cat([pair, pair.new_ones(1)]) for pair in pairs
        )
        dist.all_reduce(total)
        steps.append((float(total[0] / total[1]), float(norm)))
        if dist.get_rank() == 0:
            notes: dict[str, Any] = {"steps": steps, "peaks": peaks}
            notes["wrapper"] = type(self.wrapped_models[0]).__name__
            if notes["wrapper"] != "DistributedDataParallel":
                notes["memory"] = memory_of(self.wrapped_models)
            out.write_text(json.dumps(notes))
        return metrics, norm, updated

    base.BaseMegatronTrainer.train_step = noting
    with counted_peak(base, "get_mcore_model") as peaks:
        (megatron_rlhf_main if "--rlhf_type" in arguments else megatron_sft_main)(arguments)


if __name__ == "__main__":
    prepare()
    train(Path(sys.argv[1]), sys.argv[2:])
