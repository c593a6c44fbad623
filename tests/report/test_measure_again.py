# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Records are measured again once they are stale, one at a time, and a failure changes none."""

import json
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from scripts.report import measure_again, rebuild
from scripts.report.measure_again import MEASUREMENTS, Measurement, in_order, main, why_stale
from scripts.report.records import Record, append, read_record
from tests.test_claims import existing_paths, git

# Records whose program is gone from the tree, and the pages that still cite them.
GONE = {
    "bit_flips": ["docs/results/bit_flips.md"],
    "checkpoints": ["docs/results/README.md", "docs/results/checkpoints.md"],
    "clusters": ["docs/clusters.md", "docs/results/parity.md"],
    "device_faults": ["docs/results/device_faults.md"],
    "early_update": ["docs/early_update.md"],
    "grad_wire": ["docs/results/README.md", "docs/results/parity.md"],
    "graph_host_cost": ["docs/results/device.md"],
    "host_cost": ["docs/results/device.md"],
    "launch_orders": ["docs/results/README.md", "docs/results/launch_orders.md"],
    "long_run": ["docs/results/memory.md"],
    "muon": ["docs/results/muon.md"],
    "offload": ["docs/library.md"],
    "overlap": ["docs/results/device.md"],
    "pasa_accuracy": ["docs/pasa.md", "docs/results/README.md"],
    "pasa_kernels": ["docs/pasa.md"],
    "pasa_training": ["docs/pasa.md"],
    "peaks": ["docs/results/README.md", "docs/results/memory.md"],
    "planner_testbed": ["docs/planner.md", "docs/results/README.md"],
    "restarts": ["docs/checkpoint.md"],
    "scale": ["docs/scale.md"],
    "versions": ["docs/megatron.md"],
    "weight_deltas": ["docs/library.md"],
}


def cited() -> dict[str, list[str]]:
    """Pages by the record that they cite."""
    pages: dict[str, list[str]] = {}
    for document in rebuild.documents():
        for name in rebuild.cited(document):
            pages.setdefault(name, []).append(str(document.relative_to(rebuild.ROOT)))
    return pages


@pytest.mark.slow  # a date must not fail the suite of a contributor who changes something else
@pytest.mark.parametrize("name", MEASUREMENTS)
def test_a_record_that_a_page_cites_is_as_new_as_what_it_measures(name):
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("the history is not here")
    reason = why_stale(read_record(name), MEASUREMENTS[name].rooms, date.today(), rebuild.ROOT)
    assert not reason, f"{name}: {reason}; run python -m scripts.report.measure_again"


def test_every_cited_record_is_measured_again_or_is_of_a_program_that_is_gone():
    pages = cited()
    assert pages.keys() == MEASUREMENTS.keys() | GONE.keys()
    assert {name: pages[name] for name in GONE} == GONE
    for name, at in GONE.items():
        assert "README.md" not in at  # what the front page claims can be measured again
        assert all("commit" in line for line in read_record(name).machines), name


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_the_rooms_and_the_program_of_every_measurement_exist(name):
    chosen = MEASUREMENTS[name]
    assert not [
        room for room in chosen.rooms if not (rebuild.ROOT / room.removeprefix(":!")).exists()
    ]
    commands = chosen.commands or [line["command"] for line in read_record(name).machines]
    for command in commands:
        assert "FILE" in command and existing_paths(command), command


# ---- on a planted repository


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a room, a program that writes its argument, and the record "made"."""
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "code.py").write_text("a = 1\n")
    (tmp_path / "program.py").write_text(
        "import sys\nfrom pathlib import Path\nPath(sys.argv[2]).write_text('{\"ms\": 2}\\n')\n"
        "sys.exit(int(sys.argv[3]))\n"
    )
    (tmp_path / ".gitignore").write_text("runs/\n")
    commit(tmp_path, "2026-11-10T12:00:00")
    monkeypatch.setattr(measure_again, "ROOT", tmp_path)
    monkeypatch.setattr(measure_again, "LOGS", tmp_path / "runs")
    monkeypatch.setattr(measure_again, "FOLDER", tmp_path / "docs")
    measured = Measurement(("room",), is_timed=False, commands=("python program.py --out FILE 0",))
    monkeypatch.setattr(measure_again, "MEASUREMENTS", {"made": measured})
    append(tmp_path / "docs" / "made.jsonl", machine_line("2026-11-09"), {"ms": 1})
    return tmp_path


def commit(root: Path, when: str) -> str:
    """Commit everything; returns the hash."""
    words = ["-c", "user.name=n", "-c", "user.email=e@e.e", "commit", "-q", "-m", "all"]
    env = {"GIT_COMMITTER_DATE": when, "GIT_AUTHOR_DATE": when, "PATH": "/usr/bin:/bin"}
    for command in (["init", "-q"], ["add", "."], words):
        subprocess.run(["git", "-C", str(root), *command], check=True, env=env)
    return measure_again.git(root, "rev-parse", "--short=10", "HEAD")


def machine_line(day: str, **more: object) -> dict:
    return {"kind": "machine", "date": day, "command": "python program.py --out FILE 0", **more}


def stale(root: Path, day: str, today: str = "2026-11-15", **more: object) -> str:
    record = Record([machine_line(day, **more)], [])
    return why_stale(record, ["room"], date.fromisoformat(today), root)


def test_a_record_is_stale_by_age_by_a_later_change_of_its_rooms_and_by_nothing_else(planted):
    first = measure_again.git(planted, "rev-parse", "--short=10", "HEAD")
    assert stale(planted, "2026-11-11") == stale(planted, "2026-11-10") == ""
    assert stale(planted, "2026-11-09").startswith("older than commit ")
    at_first = {"measured_commit": first}
    assert stale(planted, "2026-11-01", **at_first) == ""
    assert stale(planted, "2026-11-01", today="2026-11-22", **at_first) == ""
    assert stale(planted, "2026-11-01", today="2026-11-23", **at_first) == "22 days old"
    (planted / "program.py").write_text("")
    commit(planted, "2026-11-12T12:00:00")
    assert stale(planted, "2026-11-11", **at_first) == stale(planted, "2026-11-11") == ""
    (planted / "room" / "code.py").write_text("a = 2\n")
    commit(planted, "2026-11-13T12:00:00")
    for more in (at_first, {}):
        assert stale(planted, "2026-11-11", **more).endswith(" of 2026-11-13")
    unknown = stale(planted, "2026-11-14", measured_commit="0123456789")
    assert unknown == "of commit 0123456789, which is not in this history"
    assert why_stale(Record([], []), ["room"], date.today(), planted) == "not measured yet"


def test_a_measurement_replaces_its_record_with_the_commit_and_is_then_done(planted, capsys):
    assert main([]) == 0
    machine, line = map(json.loads, (planted / "docs" / "made.jsonl").read_text().splitlines())
    assert line == {"ms": 2} and machine["command"] == "python program.py --out FILE 0"
    assert machine["measured_commit"] == measure_again.git(
        planted, "rev-parse", "--short=10", "HEAD"
    )
    assert machine["date"] == date.today().isoformat() and 0 <= machine["seconds"] < 60
    assert str(planted) not in json.dumps(machine)
    capsys.readouterr()
    assert main([]) == 0
    assert capsys.readouterr().out == "0 records: 0 minutes, and 0 of unknown length\n"


def test_a_program_that_went_on_from_an_earlier_try_says_how_long_all_took(planted):
    told = "".join(f'{{"kind": "machine", "seconds": {s}}}\\n' for s in (7000.5, 754))
    code = (planted / "program.py").read_text().replace("'{", f"'{told}{{")
    (planted / "program.py").write_text(code)
    commit(planted, "2026-11-12T12:00:00")
    assert main([]) == 0
    machine, line = map(json.loads, (planted / "docs" / "made.jsonl").read_text().splitlines())
    assert machine["seconds"] == 7754.5 and line == {"ms": 2}


@pytest.mark.parametrize(
    "command, line",
    [
        ("python program.py --out FILE 3", "made: status 3; see "),
        ("python program.py --out FILE recipes.json", "made: there is no "),
        ("python -c pass FILE", "made: the command wrote 1 records and not one to "),
    ],
)
def test_a_measurement_that_fails_leaves_the_record_and_ends_in_a_line(
    planted, monkeypatch, capsys, command, line
):
    before = (planted / "docs" / "made.jsonl").read_bytes()
    failing = Measurement(("room",), is_timed=False, commands=(command,))
    monkeypatch.setitem(measure_again.MEASUREMENTS, "made", failing)
    assert main([]) == 1
    assert capsys.readouterr().err.startswith(f"measure_again: {line}")
    assert (planted / "docs" / "made.jsonl").read_bytes() == before


def test_times_are_not_measured_on_a_busy_machine(planted, monkeypatch, capsys):
    counted = measure_again.MEASUREMENTS["made"]
    timed = counted._replace(is_timed=True)
    monkeypatch.setattr(measure_again, "idle_foreign_share", lambda: 0.43)
    monkeypatch.setitem(measure_again.MEASUREMENTS, "made", timed)
    assert main([]) == 1
    assert "others use 43% of the machine" in capsys.readouterr().err
    assert main(["--counting"]) == 0
    assert '{"ms": 1}' in (planted / "docs" / "made.jsonl").read_text()
    monkeypatch.setitem(measure_again.MEASUREMENTS, "made", counted)
    assert main(["--counting"]) == 0
    assert '{"ms": 2}' in (planted / "docs" / "made.jsonl").read_text()
    monkeypatch.setitem(measure_again.MEASUREMENTS, "made", timed)
    monkeypatch.setattr(measure_again, "idle_foreign_share", lambda: 0.01)
    assert main(["--all"]) == 0


def test_a_tree_with_changes_is_not_measured(planted, capsys):
    (planted / "room" / "new.py").write_text("")
    assert main([]) == 2
    assert capsys.readouterr().err == "measure_again: commit first: ?? room/new.py is changed\n"


def test_an_interruption_ends_the_command_and_leaves_the_record(planted):
    before = (planted / "docs" / "made.jsonl").read_bytes()
    out = planted / "runs" / "out"
    out.parent.mkdir()
    program = "import os, signal, sys, time; print(os.getpid(), flush=True); "
    program += "os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    code = (
        "import sys\nfrom pathlib import Path\nfrom scripts.report import measure_again as m\n"
        "m.ROOT, m.LOGS, m.FOLDER = (Path(word) for word in sys.argv[1:4])\n"
        f"commands = ('python -c \"{program}\" FILE',)\n"
        "m.MEASUREMENTS = {'made': m.Measurement(('room',), False, commands)}\n"
        "sys.exit(m.main([]))\n"
    )
    words = [sys.executable, "-c", code, str(planted), str(out.parent), str(planted / "docs")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=rebuild.ROOT)
    assert (ended.returncode, ended.stderr.count("\n")) == (130, 1), ended.stderr
    assert not Path("/proc", (out.parent / "made" / "log").read_text().strip()).exists()
    assert (planted / "docs" / "made.jsonl").read_bytes() == before


def test_the_shortest_measurements_come_first_and_unknown_ones_last(monkeypatch):
    measured = Measurement((), is_timed=False)
    monkeypatch.setattr(measure_again, "MEASUREMENTS", dict.fromkeys("abcd", measured))
    assert in_order("abcd", {"a": None, "b": 9.0, "c": 2.0, "d": None}) == ["c", "b", "a", "d"]
