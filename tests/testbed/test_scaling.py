# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The scaling study: which points are run, what is measured and what is modelled, apart, and no
time without the right losses. No run starts a process: what a run returns is made up."""

import json
import time

import pytest

from megatron_asynchzp.tools.styles import OURS as OURS_COLOUR
from scripts.bench import scaling
from scripts.bench.scaling import Study, parse_args
from scripts.bench.scaling_points import AXES, SAMPLES, Point, modelled_run, plan, runners
from scripts.bench.step_model import SYSTEMS, DistributedOptimizer
from scripts.report import scaling_picture
from scripts.report.scaling_rows import RecordsError, axes_of
from scripts.report.scaling_table import markdown
from scripts.testbed.contenders.workload import RankReport
from scripts.testbed.profile import named_profile
from scripts.testbed.ranks import RankFailure

ALL = [axis.name for axis in AXES]
DO, ZERO3, HSDP, OURS = (system.name for system in SYSTEMS)
# fmt: off
MACHINE = {"kind": "machine", "date": "2026-01-01", "cpus": 2, "python": "3.12", "command": "c",
           "versions": {"torch": "2"}}
# fmt: on


def output(step_ms: float, **more) -> dict:
    # fmt: off
    run = {"step_ms": [step_ms - 10, step_ms, step_ms + 10], "losses": [4.9, 4.5], "foreign": 0.0,
           "busy": 0.3, "node_nbytes": 5e6, "state_nbytes": 9e6, "peak_nbytes": 2e7,
           "exposed_ms": 5.0, "host_waits": 0.0}
    # fmt: on
    return run | more


@pytest.fixture
def study(tmp_path, monkeypatch) -> Study:
    """Of all axes; a run takes no time and returns 5000 ms, computing alone 3700."""
    monkeypatch.setattr(scaling, "measure", lambda *_: output(5000.0))
    report = RankReport(step_s=[3.7], machine_cpu_s=0.1, own_cpu_s=0.1, wall_s=1.0)
    monkeypatch.setattr(scaling, "compute_alone", lambda cluster, *_: [report] * cluster.num_ranks)
    file = tmp_path / "records.jsonl"
    file.touch()
    profile = named_profile("slow-between-nodes")
    return Study(plan(ALL), profile, 19.0, 4.0, steps=3, only=[], file=file)


def measured(study: Study, repetitions: int = 1, deadline_s: float = float("inf")) -> list[dict]:
    study.model_all()
    study.measure_all(repetitions, deadline_s)
    return records_of(study)


def records_of(study: Study) -> list[dict]:
    return [json.loads(line) for line in study.file.read_text().splitlines()]


def line_of(text: str, axis: str, place: str, table: int = 0) -> str:
    section = text.split(f"### {axis}\n")[1].split("### ")[0]
    return [line for line in section.splitlines() if line.startswith(f"| {place} |")][table]


# ---- which points


def test_the_base_is_measured_first_and_once_and_shown_on_every_axis(study):
    records = measured(study)
    runs = [record for record in records if record["kind"] == "run"]
    of_base = [run for run in runs if set(run["axes"]) == set(ALL)]
    assert (
        [run["name"] for run in of_base]
        == [DO, ZERO3, HSDP, OURS]
        == [run["name"] for run in runs[:4]]
    )
    text = markdown([MACHINE, *records])
    for axis, place in zip(ALL, (4, 1, 64, 8, 128)):
        assert "5000 (4990 to 5010)" in line_of(text, axis, str(place))


def test_a_point_is_measured_or_modelled_and_too_many_ranks_are_modelled():
    everything = plan(ALL)
    assert not set(everything.measured) & set(everything.modelled)
    assert max(point.num_ranks for point in everything.measured) == 16
    assert max(point.num_ranks for point in everything.modelled) == 512
    small = plan(ALL, max_ranks=4)
    assert max(point.num_ranks for point in small.measured) == 4
    assert set(small.modelled) > set(everything.modelled)


def test_every_rank_has_as_many_samples_and_computing_grows_with_tokens_and_parameters():
    for point in (*plan(ALL).measured, *plan(ALL).modelled):
        work = point.workload(19.0, 3)
        assert work.samples == SAMPLES * point.micro_batches * point.num_ranks
        tokens_and_parameters = point.seq_length * work.layer_numel
        assert work.layer_ms / tokens_and_parameters == pytest.approx(19.0 / (64 * 198_272))


def test_every_contender_is_run_by_megatron_with_the_same_micro_batch():
    for point in plan(ALL).measured:
        chosen = runners(point, point.workload(19.0, 3))
        assert [one.name for one in chosen] == [DO, ZERO3, HSDP, OURS]
        assert all(one.micro_batch == SAMPLES and not one.torch_system for one in chosen)
        assert [bool(one.reason) for one in chosen] == [False, False, point.nodes == 1, False]
        assert "--use-asynchzp" in chosen[3].flags
    assert [one.name for one in runners(Point(), Point().workload(1.0, 1), ["zero"])] == [ZERO3]


# ---- measured and modelled


def test_the_table_keeps_modelled_and_measured_apart_and_shows_their_ratio(study):
    records = measured(study)
    text = markdown([MACHINE, *records])
    assert "*" not in line_of(text, "ranks", "16") + line_of(text, "ranks", "16", 1)
    beyond = line_of(text, "ranks", "32, modelled").split(" | ")[3:]
    assert all(cell.strip(" |").startswith("*") for cell in beyond)
    (modelled_ms,) = [
        record["step_ms"]
        for record in records
        if record["kind"] == "modelled"
        and record["name"] == OURS
        and record["axes"].get("ranks") == 16
        and record["compute"] == "measured"
    ]
    assert f"5000 (4990 to 5010) {5000 / modelled_ms:.2f}" in line_of(text, "ranks", "16")
    assert "3700, of which 3648 emulated" in line_of(text, "ranks", "16")
    assert f"{OURS}: measured / modelled" in text and "of 12 points" in text


def test_the_model_is_given_the_measured_computation_where_there_is_one(study):
    for axis in axes_of(measured(study)):
        for place in axis.places:
            for model in place.modelled.values():
                assert model.compute == ("measured" if place.is_measured else "emulated")
                compute_ms = 3700.0 if place.is_measured else place.emulated_ms
                assert model.compute_ms == place.compute_ms == pytest.approx(compute_ms)


def test_the_model_sends_and_holds_what_was_measured_for_side_by_side():
    run = modelled_run(Point(), named_profile("slow-between-nodes"), 978.0)
    assert DistributedOptimizer(run).node_nbytes() == pytest.approx(9.76e6, rel=1e-3)
    states = [system(run).state_nbytes() for system in SYSTEMS]
    assert states == pytest.approx([16.44e6, 9.28e6, 17.43e6, 14.32e6], rel=0.03)


def test_runs_of_several_files_are_shown_together(study, tmp_path):
    """Whatever the order: a measured computation is not forgotten for an emulated one."""
    records, again = measured(study), tmp_path / "again.jsonl"
    study.file = again
    study.model_all()
    later = records_of(study)
    for together in (records + later, later + records):
        assert markdown([MACHINE, *together]) == markdown([MACHINE, *records])


def test_the_border_is_between_the_last_measured_place_and_the_first_modelled(study):
    borders = {axis.name: axis.border for axis in axes_of(measured(study))}
    assert 16 < borders["ranks"] < 32 and 4 < borders["micro-batches"] < 8


def test_the_model_alone_needs_no_run(study):
    study.model_all()
    records = records_of(study)
    assert {record["kind"] for record in records} == {"modelled"}
    assert all(axis.border is None for axis in axes_of(records))
    assert "Nothing was measured" in markdown([MACHINE, *records])


# ---- what does not go well


def test_wrong_losses_are_red_and_show_no_time(study, monkeypatch):
    def cheats(cluster, workload, one, *_):
        is_wrong = one.name == HSDP and cluster.nodes == 4
        return output(1234.0, losses=[4.9, 4.6]) if is_wrong else output(5000.0)

    monkeypatch.setattr(scaling, "measure", cheats)
    records = measured(study)
    text = markdown([MACHINE, *records])
    assert "RED: wrong losses" in line_of(text, "ranks", "8") and "1234" not in text
    assert "RED" not in line_of(text, "ranks", "16")
    ranks = next(axis for axis in axes_of(records) if axis.name == "ranks")
    assert [place.error(HSDP) is None for place in ranks.places[:4]] == [True, False, True, False]
    scaling_picture.draw(records, study.file.with_suffix(".png"))


def test_a_run_that_fails_is_not_tried_again_and_its_reason_is_shown(study, monkeypatch):
    tried = []

    def fails(cluster, workload, one, *_):
        tried.append((cluster.nodes, workload, one.name))
        return {"reason": "failed: out of memory"} if one.name == ZERO3 else output(5000.0)

    monkeypatch.setattr(scaling, "measure", fails)
    text = markdown([MACHINE, *measured(study, repetitions=2)])
    assert len([one for one in tried if one[2] == ZERO3]) == len(study.plan.measured)
    assert f"- ranks 16, {ZERO3}: failed: out of memory." in text
    assert "not run" in line_of(text, "ranks", "16")
    assert f"- ranks 2, {HSDP}: one node: this is ZeRO-3." in text


def test_computing_that_fails_leaves_the_emulated_time(study, monkeypatch):
    def fails(*_):
        raise RankFailure({0: "RuntimeError: no"})

    monkeypatch.setattr(scaling, "compute_alone", fails)
    text = markdown([MACHINE, *measured(study)])
    assert "| 3648 emulated |" in line_of(text, "ranks", "16")


def test_a_busy_run_is_left_out_where_there_is_a_quiet_one(study, monkeypatch):
    runs = iter([output(9000.0, foreign=0.5)] * 1000)
    monkeypatch.setattr(scaling, "measure", lambda *_: next(runs))
    study.model_all()
    study.measure_all(1, float("inf"))
    text = markdown([MACHINE, *records_of(study)])
    assert f"- ranks 4, {DO}: others used 50% of the machine: not to be quoted." in text
    monkeypatch.setattr(scaling, "measure", lambda *_: output(5000.0))
    study.measure_all(1, float("inf"))
    text = markdown([MACHINE, *records_of(study)])
    assert "9000" not in text and "not to be quoted" not in text


def test_computing_is_measured_again_only_where_others_were_busy(study, monkeypatch):
    wholes = iter([0.1] * 3 + [2.0] * 100)  # of the machine's two cores, from the fourth point on
    report = [RankReport(step_s=[3.7], own_cpu_s=0.0, wall_s=1.0, machine_cpu_s=0.0)]
    called = []

    def alone(cluster, workload, *_):
        called.append(workload)
        report[0].machine_cpu_s = next(wholes)
        return report

    monkeypatch.setattr(scaling, "compute_alone", alone)
    measured(study, repetitions=2)
    points = len(study.plan.measured)
    assert len(called) == points + points - 3


def test_after_the_time_limit_nothing_is_run_and_the_table_has_the_reason(study, monkeypatch):
    monkeypatch.setattr(scaling, "measure", lambda *_: pytest.fail("a run"))
    records = measured(study, deadline_s=time.monotonic() - 1)
    assert "the time limit was reached" in markdown([MACHINE, *records])


def test_what_was_measured_before_an_interruption_is_kept(study, monkeypatch):
    left = iter([output(5000.0)] * 5)

    def interrupted(*_):
        try:
            return next(left)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(scaling, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measured(study)
    records = records_of(study)
    assert len([record for record in records if record["kind"] == "run"]) == 5
    assert "5000 (4990 to 5010)" in line_of(markdown([MACHINE, *records]), "ranks", "4")


# ---- the picture and the commands


def figure_of(records: list[dict], axis: str):
    (rows,) = (one for one in axes_of(records) if one.name == axis)
    return scaling_picture.make_figure(records, rows)


def words_of(figure) -> list[str]:
    return [text.get_text() for plot in figure.axes for text in plot.texts]


def test_the_picture_names_the_part_that_is_modelled_only_where_the_rest_is_measured(study):
    study.model_all()
    assert not words_of(figure_of(records_of(study), "ranks"))
    assert words_of(figure_of(measured(study), "ranks")) == ["modelled only"] * 3


def test_the_pictures_lines_are_the_models_of_emulated_computation_and_marks_are_measured(study):
    """One line through all places has no step where the measurements end."""
    records = measured(study)
    steps = figure_of(records, "ranks").axes[0]
    lines = [line for line in steps.lines if line.get_marker() == "None"]
    (ours,) = (
        line.get_ydata()
        for line in lines
        if line.get_color() == OURS_COLOUR and len(line.get_xdata()) == 9
    )
    given = {
        record["axes"]["ranks"]: record["step_ms"]
        for record in records
        if record["kind"] == "modelled" and record["compute"] == "emulated"
        if record["name"] == OURS and "ranks" in record["axes"]
    }
    assert list(ours) == [1e-3 * given[at] for at in sorted(given)]
    marks = [line for line in steps.lines if line.get_marker() != "None"]
    assert len(marks) == 4 * 4 - 1  # HSDP is ZeRO-3 on one node
    assert {float(*line.get_ydata()) for line in marks} == {5.0}
    assert max(float(*line.get_xdata()) for line in marks) < 32


def test_the_picture_explains_how_marks_and_lines_differ(study):
    figure = figure_of([MACHINE, *measured(study)], "ranks")
    caption = figure.get_supxlabel()
    for words in ("Marks are measured", "the 2 cores", "Lines are the cost model's", "grey"):
        assert words in caption


def test_every_axis_has_a_picture_of_its_own(study, tmp_path):
    scaling_picture.draw(measured(study), tmp_path / "picture.png")
    names = {file.name for file in tmp_path.glob("*.png")}
    assert names == {"picture.png", *(f"picture-{axis}.png" for axis in ALL if axis != "ranks")}
    assert all(file.stat().st_size > 10_000 for file in tmp_path.glob("*.png"))


def test_records_of_different_networks_are_refused(study):
    records = measured(study)
    other = [record | {"slow_motion": 1.0} for record in records]
    with pytest.raises(RecordsError, match="records of different slow_motion: 1.0 and 4.0"):
        axes_of(records + other)


def test_wrong_options_are_one_line(capsys):
    for options, words in (
        (["--axes", "moons"], "--axes moons: not one of ranks, micro-batches"),
        (["--profile", "pigeons"], "--profile pigeons: not one of unlimited"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--repetitions", "-1"], "--repetitions must be at least 0"),
        (["--slow-motion", "0"], "--slow-motion must be above 0"),
        (["--layer-ms", "nan"], "--layer-ms must be above 0"),
        (["--only", "DeepSpeed"], "--only DeepSpeed: in none of distributed optimizer"),
    ):
        with pytest.raises(SystemExit) as ended:
            parse_args(options)
        assert ended.value.code == 2
        assert words in capsys.readouterr().err.strip().splitlines()[-1]
