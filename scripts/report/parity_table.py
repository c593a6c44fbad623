# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the file that the parity tests write under ASYNCHZP_PARITY_LOG into Markdown tables: a row
per configuration, with the sizes compared and the largest differences.
"""

from scripts.report.records import markdown_table, print_table


def parity_table(comparisons: list[dict]) -> str:
    """Markdown of all comparisons, as tests/support/parity.py writes them."""
    by_variant: dict[str, list[dict]] = {}
    for record in comparisons:
        by_variant.setdefault(f"{record['variant']} ({record['ranks']} ranks)", []).append(record)
    # fmt: off
    head = [
        "configuration", "sizes", "steps", "worst loss", "allowed", "worst gradient norm",
        "allowed", "differ",
    ]
    # fmt: on
    rows = []
    for variant, records in by_variant.items():
        loss, norm = (max(one[key] for one in records) for key in ("loss_error", "grad_norm_error"))
        allowed = max(one["tolerance"] for one in records)
        allowed_loss = max(_loss_tolerance(one) for one in records)
        bad = sum(not _is_equal(one) for one in records)
        steps = str(records[0]["steps"])
        worst = [f"{value:.1e}" for value in (loss, allowed_loss, norm, allowed)]
        rows.append([variant, str(len(records)), steps, *worst, str(bad)])
    return f"{markdown_table(head, rows)}\n{len(comparisons)} comparisons."


def shrunk_table(comparisons: list[dict]) -> str:
    """Markdown of the comparisons of shrunk models: the worst of all sizes, and what is allowed."""
    by_model: dict[tuple[str, int], list[dict]] = {}
    for record in comparisons:
        by_model.setdefault((record["variant"], record["ranks"]), []).append(record)
    # fmt: off
    head = [
        "model", "ranks", "(P, G, O)", "steps", "loss", "gradient norm", "parameter norm",
        "auxiliary and MTP", "allowed", "differ",
    ]
    keys = (
        "loss_error", "grad_norm_error", "params_norm_error", "more_losses_error", "tolerance",
    )
    # fmt: on
    rows = []
    for (model, ranks), records in by_model.items():
        sizes = " ".join(f"({', '.join(map(str, one['sizes']))})" for one in records)
        worst = [f"{max(one[key] for one in records):.1e}" for key in keys]
        bad = sum(not _is_equal(one) for one in records)
        rows.append([model, str(ranks), sizes, str(records[0]["steps"]), *worst, str(bad)])
    return markdown_table(head, rows)


def _loss_tolerance(comparison: dict) -> float:
    """Earlier records have one bound for both."""
    return comparison.get("loss_tolerance", comparison["tolerance"])


def _is_equal(comparison: dict) -> bool:
    is_close = comparison["loss_error"] <= _loss_tolerance(comparison)
    is_close &= comparison["grad_norm_error"] <= comparison["tolerance"]  # False for NaN
    return is_close and not comparison["faults"]


if __name__ == "__main__":
    print_table("parity_table", "tests run with ASYNCHZP_PARITY_LOG", parity_table)
