# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the file of the parity tests (ASYNCHZP_PARITY_LOG) into Markdown tables."""

from collections.abc import Iterable

from scripts.report.records import markdown_table

_MOST_NAMES = 2
_STEPS = 20


def parity_table(comparisons: list[dict]) -> str:
    """Configurations with the same bounds, as tests/support/parity.py writes them, share a row."""
    by_variant: dict[str, list[dict]] = {}
    for record in comparisons:
        by_variant.setdefault(record["variant"], []).append(record)
    by_bounds: dict[tuple[float, float], list[str]] = {}
    for variant, records in by_variant.items():
        bounds = _largest(records, "loss_tolerance"), _largest(records, "tolerance")
        by_bounds.setdefault(bounds, []).append(variant)
    # fmt: off
    head = [
        "configurations", "comparisons", "worst loss", "allowed", "worst gradient norm", "allowed",
        "differ",
    ]
    # fmt: on
    rows = []
    for (loss_bound, norm_bound), variants in by_bounds.items():
        records = [one for variant in variants for one in by_variant[variant]]
        loss, norm = (_largest(records, key) for key in ("loss_error", "grad_norm_error"))
        worst = [f"{value:.1e}" for value in (loss, loss_bound, norm, norm_bound)]
        names = variants[:_MOST_NAMES]
        if more := len(variants) - len(names):
            names.append(f"{more} more")
        rows.append(["; ".join(names), str(len(records)), *worst, _num_different(records)])
    return markdown_table(head, rows)


def of_full_length(comparisons: list[dict]) -> list[dict]:
    """Those of the table; the fast tests of the same file train for fewer steps."""
    return [one for one in comparisons if one["steps"] == _STEPS]


def _largest(records: Iterable[dict], key: str) -> float:
    """NaN where one of them is. Earlier records have one bound for losses and norms."""
    values = [one.get(key, one["tolerance"]) for one in records]
    return next((value for value in values if value != value), max(values))


def _num_different(records: Iterable[dict]) -> str:
    return str(sum(not _is_equal(one) for one in records))


def _loss_tolerance(comparison: dict) -> float:
    """Earlier records have one bound for both."""
    return comparison.get("loss_tolerance", comparison["tolerance"])


def _is_equal(comparison: dict) -> bool:
    is_close = comparison["loss_error"] <= _loss_tolerance(comparison)
    is_close &= comparison["grad_norm_error"] <= comparison["tolerance"]  # False for NaN
    return is_close and not comparison["faults"]
