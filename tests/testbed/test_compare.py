# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The comparison: no speed without the right losses, and what is compared with what."""

from math import isfinite

from scripts.report.compare_rows import comparisons, losses_agree
from scripts.report.compare_table import markdown
from scripts.testbed.contenders.side_by_side import (
    MICRO_BATCHES,
    ND,
    OURS,
    SHARDED,
    contenders,
    pipelines,
)
from scripts.testbed.contenders.workload import Workload

LOSSES = [4.9, 4.6, 4.4]


def run(name: str, family: str, step_ms: list[float], **more) -> dict:
    # fmt: off
    record = {
        "kind": "run", "nodes": 2, "ranks_per_node": 2, "name": name, "family": family,
        "profile": {"name": "slow", "inter_gbit": 0.1, "intra_gbit": 1.0,
                    "inter_latency_us": 0.0, "intra_latency_us": 0.0},
        "workload": {"layers": 8, "hidden": 128, "samples": 8, "seq_length": 64, "layer_ms": 19.0},
        "reason": "", "step_ms": step_ms, "losses": LOSSES, "node_nbytes": 1e6, "exposed_ms": 5.0,
        "state_nbytes": 1e7, "peak_nbytes": 2e7, "host_waits": 0.0, "foreign": 0.01,
    }
    # fmt: on
    return record | more


OURS_NAME = "AsyncHZP threaded (2,2,4)"
RECORDS = [
    run("DDP", ND, [1200.0, 1300.0, 1250.0]),
    run("PP 2", ND, [1100.0, 1150.0]),
    run(OURS_NAME, OURS, [1000.0, 990.0, 1010.0]),
    run("ZeRO-3", SHARDED, [1500.0, 1510.0], state_nbytes=1.2e7),
    run("everything twice", SHARDED, [900.0], state_nbytes=1.3e7),
    run("cheat", SHARDED, [100.0, 101.0], losses=[4.9, 4.6, 4.5]),
    run("absent", SHARDED, [], reason="not installed"),
]


def test_a_row_with_wrong_losses_is_red_and_shows_no_speed():
    text = markdown(RECORDS)
    line = next(line for line in text.splitlines() if "cheat" in line)
    assert "RED" in line and "100" not in line and "101" not in line and "4.500000" in line
    comparison = comparisons(RECORDS)[0]
    assert comparison.row("cheat") is None
    assert [row.name for row in comparison.rows[:2]] == ["everything twice", OURS_NAME]


def test_losses_agree_within_the_tolerance_in_every_step():
    assert losses_agree([loss * (1 + 9e-6) for loss in LOSSES], LOSSES)
    for losses in ([4.9, 4.6, 4.4001], [4.9, 4.6, float("nan")], [4.9, 4.6, float("inf")], [4.9]):
        assert not losses_agree(losses, LOSSES) and not losses_agree(LOSSES, losses)
        assert losses_agree(losses, losses) is all(map(isfinite, losses))


def test_a_run_on_a_busy_machine_is_left_out_where_there_is_another():
    busy = run("DDP", ND, [5000.0], foreign=0.5)
    (row,) = comparisons([busy, run("DDP", ND, [1000.0, 1002.0])])[0].rows
    assert row.median_ms == 1001.0 and row.foreign == 0.01
    (row,) = comparisons([busy])[0].rows
    assert row.median_ms == 5000.0 and row.foreign == 0.5
    assert "DDP (disturbed)" in markdown([busy, *RECORDS[2:3]])


def test_a_batch_is_the_same_samples_for_every_contender():
    workload = Workload()
    for one in contenders(2, 2, workload):
        tensor = 2 if "--tensor-model-parallel-size" in one.flags else 1
        pipeline = 2 if "--pipeline-model-parallel-size" in one.flags else 1
        assert workload.samples % (one.micro_batch * 4 // (tensor * pipeline)) == 0, one.name
    names = [one.name for one in contenders(2, 2, workload)]
    assert len(set(names)) == len(names) and names[0] == "DDP"


def test_every_pipeline_has_as_many_micro_batches_and_the_first_is_stock():
    workload = Workload(samples=2 * MICRO_BATCHES)
    found = pipelines(2, 2, workload)
    assert {workload.samples // (one.micro_batch * 2) for one in found} == {MICRO_BATCHES}
    assert found[0].family == ND and len({one.name for one in found}) == len(found)
    kept = [sum("keep" in flag for flag in one.flags) for one in found]
    assert sorted(kept) == [0, 0, 0, 0, 1, 2, 2]
