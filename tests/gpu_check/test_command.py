# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The command behind scripts/gpu_check.sh: what it runs, reports, and ends."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.gpu_check import __main__ as gpu_check
from scripts.gpu_check.low_precision import RECIPES
from scripts.gpu_check.process import ROOT
from scripts.gpu_check.table import CHECKS, RECIPE_NAMES, Check
from tests.gpu_check import doubles

pytestmark = pytest.mark.filterwarnings("ignore")


def double(name: str, how: int, limit_s: float = 60.0) -> Check:
    return Check(name, f"how {name}", doubles.__name__, limit_s, on_cpu=True, options=(how,))


def run(folder: Path, *flags: str, checks=CHECKS) -> tuple[int, dict[str, dict], str]:
    """Exit status, the rows of the JSON file by check, the Markdown file."""
    paths = folder / "out" / "result.json", folder / "out" / "result.md"
    status = gpu_check.main(["--json", str(paths[0]), "--markdown", str(paths[1]), *flags], checks)
    rows = json.loads(paths[0].read_text())["checks"]
    return status, {row["check"]: row for row in rows}, paths[1].read_text()


def test_every_check_is_a_row_and_what_cannot_run_here_has_its_reason(tmp_path, capsys):
    names = ["side_stream", "synchronisations", "endless", "parity_8", "node_row"]
    status, rows, markdown = run(tmp_path, "--only", ",".join(names))
    assert status == 0
    assert list(rows) == names
    assert rows["endless"]["status"] == "passed" and rows["endless"]["figures"]
    if rows["side_stream"]["status"] == "skipped":  # no GPU here
        assert rows["side_stream"]["reason"] == "needs a GPU, this machine has none"
        assert rows["node_row"]["reason"] == "needs 8 GPUs, this machine has none"
    *each, files, last = capsys.readouterr().out.splitlines()[-len(names) - 2 :]
    assert [line.split()[0] for line in each] == names
    assert "result.json" in files
    assert last.startswith("gpu_check: nothing failed; ")
    for name in names:
        assert f"| {name} | " in markdown


def test_without_megatron_only_the_checks_that_train_it_are_skipped(tmp_path, monkeypatch):
    def find_nothing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("scripts.gpu_check.table.find_spec", find_nothing)
    trains = replace(double("trains", doubles.PASSES), trains_megatron=True)
    _, rows, _ = run(tmp_path, checks=[trains, double("passes", doubles.PASSES)])
    assert rows["trains"]["status"] == "skipped"
    assert "needs megatron.training" in rows["trains"]["reason"]
    assert rows["passes"]["status"] == "passed"
    wanted = {check.name for check in CHECKS if check.trains_megatron}
    megatrons = {"pretrain", "parity_2", "parity_4", "parity_8", "model_parallel", "node_row"}
    assert wanted == megatrons | set(RECIPES) and tuple(RECIPES) == RECIPE_NAMES


def test_a_check_that_fails_is_named_and_the_others_run(tmp_path, capsys):
    checks = [
        double("fails", doubles.FAILS),
        double("raises", doubles.RAISES),
        double("crashes", doubles.CRASHES),
        double("skips", doubles.SKIPS),
        double("passes", doubles.PASSES),
    ]
    status, rows, markdown = run(tmp_path, checks=checks)
    assert status == 1
    assert {name: row["status"] for name, row in rows.items()} == {
        "fails": "failed",
        "raises": "failed",
        "crashes": "failed",
        "skips": "skipped",
        "passes": "passed",
    }
    assert rows["fails"]["reason"] == "two is not three"
    assert rows["fails"]["figures"] == {"found": 2}
    assert "nobody foresaw it" in rows["raises"]["reason"]
    assert "signal 11" in rows["crashes"]["reason"]
    last = capsys.readouterr().out.splitlines()[-1]
    expected = "gpu_check: failed: fails, raises, crashes; 1 passed, 1 skipped (skips)"
    assert last == expected
    assert "| fails | how fails | failed |" in markdown


def test_a_check_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    checks = [double("hangs", doubles.HANGS, limit_s=1.0), double("passes", doubles.PASSES)]
    status, rows, _ = run(tmp_path, checks=checks)
    assert status == 1
    # On a CPU after ten times as long.
    assert rows["hangs"]["reason"].startswith("not finished after 10 s")
    assert rows["passes"]["status"] == "passed"
    below = int(next(tmp_path.rglob("below")).read_text())
    deadline = time.monotonic() + 5.0
    while is_running(below) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(below)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    "flags, words",
    [(["--only", "memory,speed"], "no check speed"), (["--time-limit", "0"], "above 0")],
)
def test_a_wrong_command_line_is_one_line_that_names_the_flag(flags, words, capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(flags)
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert flags[0] in last and words in last


def test_each_check_has_a_row_in_the_documentation_and_those_of_one_gpu_take_ten_minutes():
    page = (ROOT / "docs" / "gpu_check.md").read_text()
    for check in CHECKS:
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{check.name}` |")]
        assert check.shows in row
        assert f"{check.gpus} GPU" in row and ("a CPU" in row) == check.on_cpu
        assert row.endswith(f"| {check.limit_s:.0f} |")
    on_one = [check for check in CHECKS if check.gpus <= 1]
    assert sum(check.limit_s for check in on_one if check.name not in RECIPES) <= 600.0
    assert sum(check.limit_s for check in on_one if check.name in RECIPES) <= 300.0
