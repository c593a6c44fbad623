# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The outcomes as one JSON file and one Markdown table."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.gpu_check.outcome import FAILED, PASSED, SKIPPED, Outcome
from scripts.testbed.machine import machine_record

_MAX_CELL = 1500


def describe_machine() -> dict[str, Any]:
    """Date, versions, and the GPUs with their NCCL, or the NPUs."""
    import torch

    record = machine_record()
    record["gpus"] = []
    if torch.accelerator.is_available():
        module = torch.get_device_module()
        names = [module.get_device_name(index) for index in range(module.device_count())]
        record["gpus"] = names
        if module is torch.cuda:
            nccl = ".".join(map(str, torch.cuda.nccl.version()))  # pyright: ignore[reportAttributeAccessIssue]
            record |= {"cuda": torch.version.cuda, "nccl": nccl}
    return record


def write_json(path: Path, machine: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    rows = [outcome.as_dict() for outcome in outcomes]
    path.write_text(json.dumps({"machine": machine, "checks": rows}, indent=1) + "\n")


def write_markdown(
    path: Path, machine: Mapping[str, Any], outcomes: Sequence[Outcome], shows: Mapping[str, str]
) -> None:
    """shows: what each check proves, by its name."""
    where = ", ".join(machine["gpus"]) or f"no GPU, {machine['cpus']} CPUs"
    lines = [
        f"{machine['date']}, {where}, torch {machine['versions']['torch']}",
        "",
        "| check | shows | status | seconds | reason, figures |",
        "|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        figures = ", ".join(f"{name}: {_shown(value)}" for name, value in outcome.figures.items())
        detail = "; ".join(text for text in (outcome.reason, figures) if text)
        cells = (outcome.check, shows[outcome.check], outcome.status, f"{outcome.seconds:.1f}")
        lines.append(f"| {' | '.join(cells)} | {_cell(detail)} |")
    path.write_text("\n".join(lines) + "\n")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{name}: {_shown(one)}" for name, one in value.items()) + ")"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", "/")
    return text if len(text) <= _MAX_CELL else f"{text[:_MAX_CELL]} ..."


def last_line(outcomes: Sequence[Outcome]) -> str:
    """What failed, or that nothing did."""
    of = {status: [o.check for o in outcomes if o.status == status] for status in _STATUSES}
    failed = f"failed: {', '.join(of[FAILED])}" if of[FAILED] else "nothing failed"
    skipped = f" ({', '.join(of[SKIPPED])})" if of[SKIPPED] else ""
    return f"gpu_check: {failed}; {len(of[PASSED])} passed, {len(of[SKIPPED])} skipped{skipped}"


_STATUSES = (PASSED, FAILED, SKIPPED)
