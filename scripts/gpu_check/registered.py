# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Check: memory in flight that is registered with NCCL trains like any other, and leaves nothing.

What only GPUs show: NCCL's symmetric kernels, and what a step gains.
"""

import json
import sys
from typing import Any

from scripts.gpu_check.outcome import CheckFailed, Target
from scripts.gpu_check.parity import TOLERANCE
from scripts.gpu_check.process import run_command
from scripts.testbed.differences import worst_difference

_LIMIT_S = 150.0
SYMMETRIC = "ncclSymk"
"""What the names of NCCL's symmetric kernels begin with."""


def run(target: Target) -> dict[str, Any]:
    record, limit_s = target.folder / "registered_ranks.json", target.longest_s(_LIMIT_S)
    record.unlink(missing_ok=True)
    ranks = min(8, target.num_gpus)
    # fmt: off
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node", str(ranks), "-m", "scripts.gpu_check.registered_run",
               str(record), str(int(target.is_large))]
    # fmt: on
    ended = run_command(command, target.folder / "registered_ranks.log", limit_s)
    if ended.status != 0 or not record.exists():
        raise CheckFailed(ended.describe(limit_s))
    return judge(json.loads(record.read_text()))


def judge(record: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a record of registered_run; raises CheckFailed."""
    plain, registered = record["plain"], record["registered"]
    apart = worst_difference(registered["losses"], plain["losses"])
    symmetric = [name for name in registered["kernels"] if name.startswith(SYMMETRIC)]
    figures = {
        "losses apart": apart,
        "symmetric kernels": symmetric or "the profiler shows no kernel",
        "step ratio": registered["step_s"] / plain["step_s"],
        "seconds to register": registered["wake_s"] - plain["wake_s"],
        "bytes asleep": registered["asleep"][-1],
    }
    faults = []
    if not apart <= TOLERANCE:
        faults.append(f"losses are {apart:.1e} apart, more than {TOLERANCE:g}")
    if not registered["lines"] or any("gave a window" not in line for line in registered["lines"]):
        faults.append(f"not every group has a window: {'; '.join(registered['lines'])}")
    if registered["kernels"] and not symmetric:
        faults.append(f"no kernel is called {SYMMETRIC}...: {', '.join(registered['kernels'])}")
    if len(set(registered["asleep"])) != 1:
        faults.append(f"reserved bytes asleep change: {registered['asleep']}")
    if not record["replays"]:
        faults.append("a graph that gathers into a window brings other values when it is replayed")
    if faults:
        raise CheckFailed("; ".join(faults), figures)
    return figures
