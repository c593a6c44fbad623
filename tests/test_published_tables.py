# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Tables and records on made-up measurements: what is compared with what, and what is left out."""

import json

import pytest

from scripts.report import (
    census_table,
    cluster_table,
    compare_front,
    figures,
    pasa_table,
    schedule_grid,
)
from scripts.report.add_record import added
from scripts.report.compare_rows import Comparison, Row
from scripts.report.parity_table import parity_table
from scripts.report.records import RecordsError


def step(contender: str, *medians: float, nodes: int = 2) -> list[dict]:
    """A line of bench_schedules.py for each run of one contender."""
    return [
        {
            "contender": contender,
            "nodes": nodes,
            "ranks_per_node": 2,
            "profile": {"name": "a network"},
            "model": {"block_ms": 50.0},
            "repetitions": 1,
            "steps": 3,
            "median_ms": ms,
            "step_ms": [ms - 1, ms, ms + 1],
            "volume": 1.0,
            "foreign_cpu": 0.01,
        }
        for ms in medians
    ]


FLOORS = [*step("compute only", 900.0), *step("communication only", 1000.0)]


def test_a_system_is_compared_within_one_time_of_update_and_one_size_of_unit():
    lines = [
        *FLOORS,
        *step("threaded", 1300.0),
        *step("threaded, halves", 1200.0, 1220.0),
        *step("threaded, early update", 1150.0),
        *step("threaded, halves, early update", 1050.0),
        *step("hsdp, halves", 1400.0),
    ]
    (grid,) = schedule_grid.grids(lines)
    assert (grid.floor_ms, round(grid.load, 3)) == (1000.0, 1.111)
    ratios = [grid.ratio("threaded", column) for column in schedule_grid.COLUMNS]
    assert ratios == [1.3, 1.21, 1.15, 1.05]
    assert grid.best("late, halves") == [("threaded", 1.21), ("HSDP", 1.4)]
    row = next(line for line in schedule_grid.markdown(lines).splitlines() if "| HSDP" in line)
    assert row.split(" | ") == ["| HSDP", "", "**1.40**, 1400 (1399 to 1401)", "", "", "1.000 |"]


def test_each_cluster_has_its_own_floor():
    larger = [*step("compute only", 900.0, nodes=4), *step("communication only", 2000.0, nodes=4)]
    found = schedule_grid.grids([*FLOORS, *larger, *step("threaded", 3000.0, nodes=4)])
    assert [grid.floor_ms for grid in found] == [1000.0, 2000.0]
    assert found[1].ratio("threaded", "late, blocks") == 1.5 and not found[0].systems


def test_the_front_has_whom_nobody_beats_in_both_time_and_memory():
    points = {"slow": (9, 1), "beaten": (9, 2), "middle": (5, 3), "fast": (4, 8), "large": (4, 9)}
    rows = [Row(name, "", step_ms=(ms,), peak_mb=mb) for name, (ms, mb) in points.items()]
    assert [row.name for row in compare_front.front(rows)] == ["slow", "middle", "fast"]


def test_a_network_without_its_floors_is_refused_in_one_line():
    with pytest.raises(RecordsError, match="'communication only' was not measured on a network"):
        schedule_grid.grids([*step("compute only", 400.0), *step("threaded", 440.0)])


def test_an_output_that_is_not_finite_has_no_error_in_the_table():
    lines = [
        {"kind": "forward", "law": "uniform", "x0": x0, "amplitude": 5, "way": way}
        | ({"error": None, "not_finite": 0.25} if bad else {"error": 1.5e-4, "not_finite": 0.0})
        for x0 in (0, 30)
        for way, bad in (("standard", False), ("eager", x0 == 30))
    ]
    table = pasa_table.forward_table(lines).splitlines()
    assert table[2:] == [
        "| uniform 0, 5 | 1.5e-4 | 1.5e-4 |",
        "| uniform 30, 5 | 1.5e-4 | 25% not finite |",
    ]


def test_the_plateau_ends_where_the_mean_of_ten_steps_is_below():
    losses = [4.0] * 20 + [3.0] * 20
    runs = [
        {"way": "fp32", "k_bias": 1, "v_bias": 1, "seed": seed, "losses": of_run}
        for seed, of_run in ((0, losses), (1, [4.0] * 40))
    ]
    # The mean of steps 13 to 22 is the first with three of the lower losses.
    assert pasa_table.plateau(runs, "fp32") == "13, not in 40"


def test_rows_of_the_paper_that_are_one_run_are_one_row_of_the_fullest_stage():
    def row(name: str, ranks: int, in_flight: int) -> dict:
        held = {"model_param": 2**30, "main_grad": 2**31, "main_param": 0, "moments": 2**29}
        small = {"allocated": dict.fromkeys(held, 1), "in_flight": {"param_ring": 1}}
        full = {"allocated": held, "in_flight": {"param_ring": in_flight}}
        return {"row": name, "ranks": ranks, "parameters": 9e9, "stages": [small, full]}

    lines = [row("a-hzp", 8, 2**30), row("b-hzp", 16, 2**30), row("a-nd", 8, 0)]
    assert cluster_table.table(lines).splitlines()[2:] == [
        "| a-hzp, b-hzp | 9.00B | 8 to 16 | 1.00 | 2.00 | 0.50 | 3.50 | 1.00 | 4.50 |",
        "| a-nd | 9.00B | 8 | 1.00 | 2.00 | 0.50 | 3.50 |  | 3.50 |",
    ]
    assert cluster_table.cell(lines[0], "in flight") == "1.00"


def test_a_comparison_beyond_its_bound_counts_as_different():
    good = {"variant": "bf16", "ranks": 4, "steps": 20, "tolerance": 1e-3, "faults": []}
    good |= {"loss_error": 1e-4, "grad_norm_error": 2e-4}
    bad = [good | {"grad_norm_error": 2e-3}, good | {"loss_error": float("nan")}]
    assert parity_table([good]).splitlines()[2].endswith("| 1.0e-03 | 0 |")
    assert (
        parity_table([good, *bad])
        .splitlines()[2]
        .endswith("| nan | 1.0e-03 | 2.0e-03 | 1.0e-03 | 2 |")
    )


def test_configurations_with_the_same_bounds_share_a_row_of_the_table():
    """And 4 and 8 ranks of one configuration, the larger bound of which holds for the row."""
    one = {"variant": "fp32", "ranks": 4, "steps": 20, "tolerance": 1e-6, "faults": []}
    one |= {"loss_error": 1e-7, "grad_norm_error": 2e-7}
    wide = one | {"variant": "bf16", "tolerance": 1e-3}
    text = parity_table(
        [one, wide, one | {"ranks": 8, "loss_error": 3e-7}, one | {"variant": "PP"}]
    )
    assert text.splitlines()[2:] == [
        "| fp32; PP | 3 | 3.0e-07 | 1.0e-06 | 2.0e-07 | 1.0e-06 | 0 |",
        "| bf16 | 1 | 1.0e-07 | 1.0e-03 | 2.0e-07 | 1.0e-03 | 0 |",
    ]


def test_the_census_counts_what_starts_and_names_who_refuses_the_rest():
    by_flag = {"by": "--x", "why": "--x is not supported with --use-asynchzp: it cannot; drop it"}
    by_megatron = {"by": "Megatron", "why": "No mock data."}
    lines = [
        {"case": "gpt/plain", "stock": None, "ours": None},
        {"case": "gpt/b", "stock": None, "ours": by_flag},
        {"case": "gpt/a", "stock": by_megatron, "ours": by_flag},
        {"case": "moe/c", "stock": by_megatron, "ours": by_megatron},
    ]
    assert [census_table.count(lines, what) for what in ("cases", "stock", "ours")] == list("421")
    assert census_table.table(lines).splitlines()[2:] == [
        "| `--x` | 2 | it cannot |",
        "| Megatron itself | 1 | No mock data |",
    ]


def test_a_figure_that_a_test_sets_is_one_that_the_test_has(tmp_path):
    source = tmp_path / "test_it.py"
    source.write_text("kills(30, seed=1)  # within 2% of 1.5\nBOUND = 1e-5\n")
    for text in ("30", "2%", "1.5", "1e-5"):
        assert figures.stated(str(source), text) == text
    for text in ("3", "5", "2", "1.50", "1e-6", "31"):
        with pytest.raises(LookupError, match=f"does not have {text}"):
            figures.stated(str(source), text)


def test_whoever_has_a_lower_peak_is_named_with_its_step(monkeypatch):
    rows = (
        Row("fast", "", step_ms=(1000.0,), peak_mb=20.0),
        Row("small", "", step_ms=(1200.0,), peak_mb=10.0),
    )
    of_network = Comparison(2, 2, {}, {}, None, rows)
    monkeypatch.setattr(figures, "compared", lambda network: of_network)
    assert figures.compare_holds("n", "fast", "small", "peak") == "100% more"
    assert figures.compare_holding_less("n", "fast") == "small (1200 ms, 10.0 MB)"
    assert figures.compare_holding_less("n", "small") == "nobody"


def test_a_record_names_command_and_date_once_and_no_folder_of_the_machine(tmp_path):
    file = tmp_path / "out.jsonl"
    output = {"command": f"python scripts/bench/x.py --out {file} --steps 3", "torch": "2.13.0+cpu"}
    output |= {"machine": "x86_64", "cpus": 2, "python": "3.12.1"}
    file.write_text("".join(json.dumps({"step_ms": [i]} | output) + "\n" for i in range(3)))
    machine, *measured = added(file)
    assert machine["command"] == "python scripts/bench/x.py --out FILE --steps 3"
    assert machine["versions"] == {"torch": "2.13.0"} and len(machine["date"]) == 10
    assert measured == [{"step_ms": [i]} for i in range(3)]
