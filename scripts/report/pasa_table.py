# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the records of bench_pasa_accuracy.py, pasa_kernels.py and pasa_evidence.py into tables."""

from collections.abc import Sequence
from statistics import median

import numpy

_GRADIENT_WAYS = ("standard", "block", "delegate", "block, values too")
_TRAINING_WAYS = ("standard", "PASA", "PASA, values too", "only q k v rounded")
PLATEAU = 3.8  # a loss that every run falls below when it leaves the plateau
_SMOOTHED = 10  # steps


def gradient_table(lines: Sequence[dict]) -> str:
    """Relative error of dQ, fp16 / bf16, by bias of keys and values."""
    errors = {
        (one["k_bias"], one["v_bias"], one["way"], one["dtype"]): one["error"]
        for one in lines
        if one["kind"] == "gradient"
    }
    rows = [f"| bias of k, v | {' | '.join(_GRADIENT_WAYS)} |", "|---" * 5 + "|"]
    for k_bias, v_bias in dict.fromkeys(key[:2] for key in errors):
        columns = [
            " / ".join(f"{errors[k_bias, v_bias, way, dtype]:.1e}" for dtype in ("fp16", "bf16"))
            for way in _GRADIENT_WAYS
        ]
        rows.append(f"| {k_bias:g}, {v_bias:g} | {' | '.join(columns)} |")
    return _short(rows)


def forward_table(lines: Sequence[dict]) -> str:
    """Relative error of the output on the paper's data, or the number of values that are not
    finite."""
    forward = [one for one in lines if one["kind"] == "forward"]
    ways = list(dict.fromkeys(one["way"] for one in forward))
    rows = [f"| x0, Am | {' | '.join(ways)} |", "|---" * (len(ways) + 1) + "|"]
    found = {(one["law"], one["x0"], one["amplitude"], one["way"]): one for one in forward}
    cells = sorted({key[:3] for key in found}, key=lambda cell: (cell[0] != "uniform", *cell[1:]))
    for law, x0, amplitude in cells:
        columns = [_error(found[law, x0, amplitude, way]) for way in ways]
        rows.append(f"| {law} {x0:g}, {amplitude:g} | {' | '.join(columns)} |")
    return _short(rows)


def _error(line: dict) -> str:
    if line["error"] is None:
        return f"{line['not_finite']:.0%} not finite"
    return f"{line['error']:.1e}"


def kernel_table(lines: Sequence[dict]) -> str:
    """Registers of a thread, and KiB of shared memory, by kernel, channels and architecture."""
    used = {(one["kernel"], one["dim"], one["sm"]): one for one in lines}
    targets = sorted({sm for *_, sm in used})
    heads = [f"sm_{sm}" for sm in targets]
    rows = [f"| kernel | channels | {' | '.join(heads)} |", "|---" * (len(targets) + 2) + "|"]
    for kernel, dim in dict.fromkeys(key[:2] for key in used):
        columns = [_usage(used[kernel, dim, sm]) for sm in targets]
        rows.append(f"| {kernel} | {dim} | {' | '.join(columns)} |")
    return "\n".join(rows)


def _usage(line: dict) -> str:
    spilled = f", {line['spilled_bytes']} B spilled" if line["spilled_bytes"] else ""
    return f"{line['registers']}, {line['shared_bytes'] / 2**10:.0f}{spilled}"


def training_table(runs: Sequence[dict]) -> str:
    """Median (and largest) error of the gradient of Q's weights, of the runs of seed 0."""
    errors = {
        (run["k_bias"], run["v_bias"], *run["way"].split(", ", 1)): run["errors"]
        for run in runs
        if run["seed"] == 0 and run["errors"]
    }
    rows = [f"| bias of k, v | dtype | {' | '.join(_TRAINING_WAYS)} |", "|---" * 6 + "|"]
    for k_bias, v_bias, dtype in dict.fromkeys(key[:3] for key in errors):
        columns = [
            f"{median(of_run):.1e} ({max(of_run):.1e})"
            for way in _TRAINING_WAYS
            for of_run in [errors[k_bias, v_bias, dtype, way]]
        ]
        rows.append(f"| {k_bias:g}, {v_bias:g} | {dtype} | {' | '.join(columns)} |")
    return _short(rows)


def plateau(runs: Sequence[dict], way: str) -> str:
    """The step at which the smoothed loss of `way` falls below PLATEAU, for every seed there is."""
    seeded = [run for run in runs if run["seed"] > 0]
    setting = seeded[0]["k_bias"], seeded[0]["v_bias"]
    left = {
        run["seed"]: _left_at(run["losses"])
        for run in runs
        if (run["k_bias"], run["v_bias"], run["way"]) == (*setting, way)
    }
    return ", ".join(left[seed] for seed in sorted(left))


def _left_at(losses: Sequence[float]) -> str:
    smooth = numpy.convolve(losses, numpy.ones(_SMOOTHED) / _SMOOTHED, "valid")
    below = numpy.flatnonzero(smooth < PLATEAU)
    return str(below[0]) if len(below) else f"not in {len(losses)}"


def _short(rows: Sequence[str]) -> str:
    """1.0e-04 as 1.0e-4."""
    return "\n".join(rows).replace("e-0", "e-").replace("e+00", "")
