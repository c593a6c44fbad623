# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The comparison's arithmetic: no speed without the right losses, and the calibration's lines."""

import os
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from scripts.bench.compare import parse_args
from scripts.bench.compare_calibration import emulated_ms, ring_all_gather_ms
from scripts.bench.compare_plan import PUBLISHED
from scripts.report import compare_front
from scripts.report.compare_memory import calibration_table, measured_table
from scripts.report.compare_picture import draw
from scripts.report.compare_rows import NO_NETWORK, comparisons, losses_agree, orders, sharded_peers
from scripts.report.compare_table import cells, markdown, networks_table
from scripts.testbed.contenders.side_by_side import (
    MICRO_BATCHES,
    ND,
    OURS,
    SHARDED,
    contenders,
    pipelines,
)
from scripts.testbed.contenders.workload import Workload
from scripts.testbed.cpu_usage import foreign_share
from scripts.testbed.machine import machine_record, versions
from scripts.testbed.profile import NetworkProfile

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
    assert all(row.name != "cheat" for row in sharded_peers(comparison))


@pytest.mark.parametrize(
    "losses, agree",
    [
        (LOSSES, True),
        ([loss * (1 + 9e-6) for loss in LOSSES], True),
        ([4.9, 4.6, 4.4001], False),
        ([4.9, 4.6, float("nan")], False),
        ([4.9, 4.6], False),
    ],
)
def test_losses_agree_within_the_tolerance_in_every_step(losses, agree):
    assert losses_agree(losses, LOSSES) is agree


def test_a_contender_that_cannot_run_is_a_row_with_the_reason():
    line = next(line for line in markdown(RECORDS).splitlines() if "absent" in line)
    assert "not run: not installed" in line
    head = next(line for line in markdown(RECORDS).splitlines() if line.startswith("| contender"))
    assert line.count("|") == head.count("|")


def test_the_verdict_is_against_the_best_stock_layout_and_has_the_memory_of_every_peer():
    comparison = comparisons(RECORDS)[0]
    assert comparison.best_nd.name == "PP 2"
    text = markdown(RECORDS)
    assert "1.12 x as fast as PP 2" in text
    for peer, speed, memory in (("ZeRO-3", "1.50", "0.83"), ("everything twice", "0.90", "0.77")):
        assert f"{speed} x as fast as {peer}, and holds {memory} x as much" in text
    ours = comparison.row(OURS_NAME)
    assert cells(ours, comparison.best_nd)[5] == "1.12"


def test_the_order_of_each_repetition_is_printed():
    # fmt: off
    again = [*RECORDS[:5], *(one | {"step_ms": [ms + 200 * (one["name"] == OURS_NAME)
             for ms in one["step_ms"]]} for one in RECORDS[:5])]
    # fmt: on
    first, second = orders(comparisons(again)[0])
    assert first[1] == OURS_NAME and second[1] == "PP 2"


def test_a_run_on_a_busy_machine_is_left_out_where_there_is_another():
    busy = run("DDP", ND, [5000.0], foreign=0.5)
    (row,) = comparisons([busy, run("DDP", ND, [1000.0, 1002.0])])[0].rows
    assert row.median_ms == 1001.0 and row.foreign == 0.01 and len(row.medians_ms) == 2
    (row,) = comparisons([busy])[0].rows
    assert row.median_ms == 5000.0 and row.foreign == 0.5
    assert "not to be quoted" in markdown([busy, *RECORDS[2:3]])


def test_the_picture_is_drawn_with_red_and_absent_rows(tmp_path):
    draw(RECORDS, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_a_rings_time_is_that_of_its_slowest_link():
    slow = NetworkProfile("p", inter_gbit=1.0, intra_gbit=8.0, ranks_per_node=2)
    assert ring_all_gather_ms(slow, 2, 1_000_000) == pytest.approx(3 * 8.0)
    shared = NetworkProfile("p", inter_gbit=100.0, intra_gbit=1.0, ranks_per_node=2)
    assert ring_all_gather_ms(shared, 2, 1_000_000) == pytest.approx(3 * 8.0)
    assert ring_all_gather_ms(shared, 1, 1_000_000) == pytest.approx(8.0)


def test_every_layout_computes_as_long():
    workload = Workload(layers=8, samples=8, layer_ms=10.0)
    assert emulated_ms(workload, 4) == 3 * 8 * 2 * 10.0


def test_foreign_work_is_what_the_machine_did_without_us():
    assert foreign_share(3.0, 1.0, 1.0) == 2.0 / (os.cpu_count() or 1)
    assert foreign_share(1.0, 1.5, 1.0) == 0.0


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


def test_a_step_is_what_it_takes_without_a_network_and_the_networks_part():
    bare = {"profile": RECORDS[0]["profile"] | {"name": "unlimited"}}
    records = [
        *RECORDS,
        run("DDP", ND, [1100.0]) | bare,
        run(OURS_NAME, OURS, [950.0]) | bare,
        run("ZeRO-3", SHARDED, [1400.0]) | bare,
    ]
    slow, none = comparisons(records)
    assert (slow.row("DDP").bare_ms, slow.row("DDP").network_ms) == (1100.0, 150.0)
    assert slow.row("PP 2").bare_ms is None and none.row("DDP").network_ms is None
    assert cells(slow.row("DDP"), None)[6:8] == ["1100", "150"]
    assert cells(slow.row("PP 2"), None)[6:8] == ["", ""]
    text = markdown(records)
    assert f"ZeRO-3 is 505 ms behind {OURS_NAME}: 450 ms without a network, and 55 ms" in text
    assert "| ZeRO-3 | 1400 | 1505 | 105 |" in networks_table(none, comparisons(records))
    assert "no network is modelled" in text


def test_every_row_that_is_faster_than_ours_is_named_with_its_memory():
    assert (
        f"Faster than {OURS_NAME}, the default: everything twice by 100 ms, "
        "0% more memory at the peak." in markdown(RECORDS)
    )
    slow = [one for one in RECORDS if one["name"] != "everything twice"]
    assert f"Nothing is faster than {OURS_NAME}, the default." in markdown(slow)
    comparison = comparisons(RECORDS)[0]
    assert comparison.best("PP").name == "PP 2" and comparison.best("cheat") is None


def test_what_is_published_names_contenders_that_exist_and_ends_within_a_quarter_of_an_hour():
    found = contenders(2, 2, Workload())
    runs = 0
    for part in PUBLISHED:
        first, second = part.turns(found)
        names = [one.name for one in second]
        # Ours, stock's best and FSDP2 everywhere, without a network too; the reference is first.
        assert {OURS_NAME, "distributed optimizer", "FSDP2 HSDP"} <= set(names)
        assert first[0].name == "DDP" and set(names) < {one.name for one in first}
        runs += len(first) + len(second)
    assert [part.profile for part in PUBLISHED][-1] == NO_NETWORK
    assert {one.name for one in PUBLISHED[0].turns(found)[0]} == {one.name for one in found}
    assert runs * 12.5 + len(PUBLISHED) * 35 < 16 * 60  # seconds on two quiet cores


def test_all_networks_are_drawn_to_one_scale(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    profile = {"profile": RECORDS[0]["profile"] | {"name": "fast"}}
    fast = [one | profile | {"step_ms": [ms / 2 for ms in one["step_ms"]]} for one in RECORDS]
    for picture, columns in ((draw, 3), (compare_front.draw, 1)):
        picture([*RECORDS, *fast], tmp_path / "picture.png")
        axes = drawn.pop().axes
        for column in range(columns):
            panels = axes[column::columns]
            assert len(panels) == 2 and len({panel.get_xlim() for panel in panels}) == 1
    assert len({panel.get_ylim() for panel in axes}) == 1


def test_wrong_options_are_one_line(capsys):
    for options, output in (
        (["--profiles", "pigeons"], "--profiles pigeons: not one of unlimited"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--nodes", "3", "--ranks", "1"], "must be a multiple of 4"),
    ):
        with pytest.raises(SystemExit) as ended:
            parse_args(options)
        assert ended.value.code == 2
        assert output in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_record_names_the_command_by_its_module_without_a_path(monkeypatch):
    main = SimpleNamespace(__spec__=ModuleSpec("scripts.bench.compare", None))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["/somewhere/compare.py", "--only", "FSDP2 HSDP"])
    record = machine_record()
    assert record["command"] == "python -m scripts.bench.compare --only 'FSDP2 HSDP'"
    assert record["versions"]["torch"] and versions("no-such-package") == {"no-such-package": None}
    assert machine_record("./scripts/quickstart.sh")["command"] == "./scripts/quickstart.sh"


def test_the_published_rows_have_times_and_memory_and_a_warning_where_they_were_disturbed():
    busy = run("busy", SHARDED, [1400.0], state_nbytes=5e6, peak_nbytes=3e7, foreign=0.9)
    comparison = comparisons([*RECORDS, busy])[0]
    lines = measured_table(comparison).splitlines()
    rows = {line.split(" | ")[0].strip("| "): line for line in lines}
    assert "cheat" not in rows and "absent" not in rows
    assert rows["busy (disturbed)"].endswith("| 5.0 | 30.0 |")
    assert f"**{OURS_NAME}**" in rows
    times = {"compute_ms": 974.4, "flat_ms": 920.0, "hierarchical_ms": 460.0}
    calibration = {key: busy[key] for key in ("nodes", "ranks_per_node", "profile", "workload")}
    found = comparisons([*RECORDS, calibration | {"kind": "calibration"} | times])
    assert "| slow | 0.1, 1 | 974 | 920 | 460 |" in calibration_table(found)
