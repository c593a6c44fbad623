# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a rank of every row of scripts/train/rows.toml holds, by the dry run, as JSON lines.
Deterministic; two minutes on one core.

    python -m scripts.bench.count_clusters --out docs/results/records/clusters.jsonl
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from scripts.report.records import replace
from scripts.testbed.machine import machine_record


def main(argv: list[str]) -> int:
    from scripts.train import dry_run

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args(argv).out
    # Megatron refuses tensor and context parallelism below Blackwell without it; launch.sh sets it.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        status = dry_run.main(["--all", "--json", file.name])
        reports = json.loads(Path(file.name).read_text())
    replace(out, [machine_record(), *({"kind": "row"} | report for report in reports)])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
