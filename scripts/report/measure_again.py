# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Measures the records of docs/results/records again, one at a time, the shortest first.

    python -m scripts.report.measure_again --list              # what there is, how old, how long
    python -m scripts.report.measure_again                     # all that is stale
    python -m scripts.report.measure_again --only parity census --inputs ~/inputs

A record is stale after MOST_DAYS, or when its rooms have changed since the commit at which it was
measured. A run that was interrupted goes on where it stopped: what it has measured is not stale. A
measurement that fails leaves its record as it was; its log and files are in runs/measure_again.
`python -m scripts.report.rebuild` then writes tables, figures and pictures.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import NamedTuple

from scripts.report.records import FOLDER, Record, read, replace, split
from scripts.testbed.cpu_usage import FOREIGN_LIMIT, idle_foreign_share
from scripts.testbed.machine import machine_record

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "runs" / "measure_again"
MOST_DAYS = 21
_ENDS_S = 15.0  # from SIGTERM to SIGKILL
# Megatron-LM's script does not go through the door of other frameworks.
_MEGATRON = ("megatron_asynchzp/mcore", ":!megatron_asynchzp/mcore/door")
_WHOLE = ("megatron_asynchzp/engine", *_MEGATRON)
_CONTENDERS = ("megatron_asynchzp/engine", "scripts/testbed/contenders", "scripts/testbed/fabric")
_SCHEDULES = (*_CONTENDERS, "scripts/bench/bench_schedules.py")
_COMPARE = (*_CONTENDERS, *_MEGATRON, "scripts/bench/compare.py")
_PARITY = (*_WHOLE, "megatron_asynchzp/cpu_platform", "tests/mcore/test_parity.py")
_FAULTS = ("megatron_asynchzp/engine/comm", "megatron_asynchzp/engine/failure")
_CENSUS = ("scripts/train/census.py", "megatron_asynchzp/mcore/flags")
_NETWORKS = "--profiles unlimited slower-between-nodes fast --only "
_NETWORKS += "'distributed optimizer' DDP FSDP 'HSDP' 'AsyncHZP threaded'"


class Measurement(NamedTuple):
    """How one record is made.

    `rooms`: files and folders, a change of which makes the record stale, as git's pathspecs;
    `is_timed`: a busy machine changes it; `commands`: in place of those that the record's machine
    lines state. In a command each FILE is a new path; the program writes the record's lines to the
    first of them, or into the only .jsonl file of a folder there.
    """

    rooms: tuple[str, ...]
    is_timed: bool
    commands: tuple[str, ...] = ()


MEASUREMENTS = {
    "planner_published": Measurement(
        ("megatron_asynchzp/planner", "scripts/bench/published_errors.py"), is_timed=False
    ),
    "sub_samples": Measurement(
        ("megatron_asynchzp/planner", "scripts/bench/sub_samples.py"), is_timed=False
    ),
    "timeline": Measurement(_SCHEDULES, is_timed=True),
    "early_timeline": Measurement(_SCHEDULES, is_timed=True),
    "quickstart": Measurement(
        (*_WHOLE, "scripts/quickstart.py", "scripts/train/pretrain_gpt.py"), is_timed=False
    ),
    "census": Measurement(_CENSUS, is_timed=False),
    "recipes": Measurement(_CENSUS, is_timed=False),
    "stock_noise": Measurement(
        ("tests/mcore/stock_noise.py", "megatron_asynchzp/cpu_platform"), is_timed=False
    ),
    "shrunk_models": Measurement((*_PARITY, "tests/support/shrunk_models.py"), is_timed=False),
    "schedules": Measurement(_SCHEDULES, is_timed=True),
    "device_schedules": Measurement(
        (*_CONTENDERS, "scripts/testbed/device", "scripts/bench/bench_device.py"), is_timed=False
    ),
    "compare_pipelines": Measurement(_COMPARE, is_timed=True),
    "compare": Measurement(
        _COMPARE,
        is_timed=True,
        commands=tuple(
            f"python -m scripts.bench.compare {networks} --time-limit 120 --out FILE"
            for networks in ("--profiles slow-between-nodes", _NETWORKS)
        ),
    ),
    "parity": Measurement(_PARITY, is_timed=False),
    "long_training": Measurement(
        (*_WHOLE, "megatron_asynchzp/attention", "scripts/bench/long_training.py"),
        is_timed=False,  # but for the part of its time in which it trained
        commands=("python -m scripts.bench.long_training --out FILE",),
    ),
    "megatron_faults": Measurement((*_FAULTS, "scripts/faults", *_MEGATRON), is_timed=True),
    "faults": Measurement(
        (*_FAULTS, "scripts/faults", ":!scripts/faults/pretrain.py"), is_timed=True
    ),
}


class MeasureError(RuntimeError):
    """A measurement that has no result; the message is one line for the user."""


def git(root: Path, *words: str) -> str:
    """What git prints. Raises MeasureError if it refuses."""
    ended = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
    if ended.returncode:
        raise MeasureError(f"git {words[0]}: {ended.stderr.strip() or 'refused'}")
    return ended.stdout.strip()


def record_of(name: str) -> Record:
    """As it is now; empty if it has not been measured yet."""
    file = FOLDER / f"{name}.jsonl"
    return split(read([file] if file.exists() else []))


def why_stale(record: Record, rooms: Iterable[str], today: date, root: Path) -> str:
    """Return why the record is to be measured again; nothing if it is as of now."""
    if not record.machines:
        return "not measured yet"
    for day, commit in sorted({(x["date"], x.get("measured_commit", "")) for x in record.machines}):
        if (days := (today - date.fromisoformat(day)).days) > MOST_DAYS:
            return f"{days} days old"
        if (
            commit
            and subprocess.run(
                ["git", "-C", root, "merge-base", "--is-ancestor", commit, "HEAD"],
                capture_output=True,
            ).returncode
        ):
            return f"of commit {commit}, which is not in this history"
        # Of a record that does not name its commit the day alone is known.
        since = [f"{commit}..HEAD"] if commit else ["HEAD", f"--since={day}T23:59:59"]
        if newer := git(root, "log", "-1", "--format=%h of %cs", *since, "--", *rooms):
            return f"older than commit {newer}"
    return ""


def seconds_of(record: Record) -> float | None:
    """How long it took, as far as each of its machine lines says so."""
    known = [line["seconds"] for line in record.machines if "seconds" in line]
    return sum(known) if known and len(known) == len(record.machines) else None


def in_order(names: Iterable[str], seconds: dict[str, float | None]) -> list[str]:
    """The shortest first; those of unknown length after them, as the table has them."""
    place = list(MEASUREMENTS)
    return sorted(names, key=lambda n: (seconds[n] is None, seconds[n] or 0.0, place.index(n)))


def run_command(command: str, out: Path, log: Path, inputs: Path) -> Record:
    """What the command writes. Raises MeasureError, with the command's whole group ended."""
    words = shlex.split(command)
    env = os.environ | {"ASYNCHZP_PYTHON": sys.executable}
    paths = iter([out, *(out.with_name(f"{out.name}.{number}") for number in range(1, 9))])
    words = [re.sub(r"(?<![^=])FILE$", lambda _: str(next(paths)), word) for word in words]
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    if words[0] == "python":
        words[0] = sys.executable
    for place, word in enumerate(words):
        if word.partition("/")[0] in ("Megatron-LM", "recipes.json"):
            words[place] = str(inputs / word)
            if not (inputs / word).exists():
                raise MeasureError(f"there is no {inputs / word}; --inputs FOLDER names its folder")
    with log.open("a") as file:
        process = subprocess.Popen(
            words, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait()
        finally:
            end_group(process)
    if status:
        raise MeasureError(f"status {status}; see {log}")
    files = sorted(out.glob("*.jsonl")) if out.is_dir() else [out]
    if len(files) != 1 or not files[0].is_file():
        raise MeasureError(f"the command wrote {len(files)} records and not one to {out}")
    return split(read(files))


def end_group(process: subprocess.Popen) -> None:
    """End what a command has left running, or the command itself."""
    for number, patience_s in ((signal.SIGTERM, _ENDS_S), (signal.SIGKILL, _ENDS_S)):
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            process.poll()
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                return
            time.sleep(0.1)


def measure(name: str, inputs: Path) -> float:
    """Replace the record; the seconds that it took. Raises MeasureError, and changes nothing."""
    chosen, folder = MEASUREMENTS[name], LOGS / name
    commands = chosen.commands or [line["command"] for line in record_of(name).machines]
    if chosen.is_timed and (share := idle_foreign_share()) > FOREIGN_LIMIT:
        raise MeasureError(f"others use {share:.0%} of the machine; --counting leaves out times")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    commit, machines, lines = unchanged_commit(), [], []
    for number, command in enumerate(commands):
        begin_s = time.monotonic()
        written = run_command(command, folder / f"out{number}", folder / "log", inputs)
        # A program that went on from an earlier try says itself how long all of it took.
        told = [line["seconds"] for line in written.machines if "seconds" in line]
        took_s = sum(told) if told else round(time.monotonic() - begin_s, 1)
        took = {"seconds": took_s, "measured_commit": commit}
        machines.append(machine_record(command) | took)
        lines += written.lines
    if not lines:
        raise MeasureError(f"nothing was measured; see {folder / 'log'}")
    if unchanged_commit() != commit:
        raise MeasureError("another commit was checked out meanwhile")
    replace(FOLDER / f"{name}.jsonl", [*machines, *lines])
    return sum(line["seconds"] for line in machines)


def unchanged_commit() -> str:
    """HEAD. Raises MeasureError if the tree, its documents aside, differs from it."""
    if changed := git(ROOT, "status", "--porcelain", "--", ".", ":!docs", ":!README.md"):
        raise MeasureError(f"commit first: {changed.splitlines()[0].strip()} is changed")
    return git(ROOT, "rev-parse", "--short=10", "HEAD")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="measure_again", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, metavar="NAME", help="these")
    parser.add_argument("--list", action="store_true", help="measure nothing")
    parser.add_argument("--all", action="store_true", help="also what is not stale")
    parser.add_argument("--counting", action="store_true", help="leave out what others disturb")
    parser.add_argument(
        "--inputs", type=Path, default=ROOT, help="folder with Megatron-LM/ and recipes.json"
    )
    args = parser.parse_args(argv)
    args.inputs = args.inputs.resolve()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _measure_all(args)
    except MeasureError as error:
        print(f"measure_again: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("measure_again: interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def _measure_all(args: argparse.Namespace) -> int:
    names = [
        name
        for name in args.only or MEASUREMENTS
        if not (args.counting and MEASUREMENTS[name].is_timed)
    ]
    records = {name: record_of(name) for name in names}
    seconds = {name: seconds_of(record) for name, record in records.items()}
    stale = {n: why_stale(records[n], MEASUREMENTS[n].rooms, date.today(), ROOT) for n in names}
    names = in_order(names, seconds)
    asked = [name for name in names if args.list or args.all or stale[name]]
    for name in asked:
        took = "not known" if seconds[name] is None else f"{seconds[name]:.0f} s"
        kind = "times" if MEASUREMENTS[name].is_timed else "counts"
        day = min((line["date"] for line in records[name].machines), default="never")
        print(f"{name:<18} {day:<10}  {took:>9}  {kind:<6}  {stale[name] or 'as of now'}")
    unknown = sum(seconds[name] is None for name in asked)
    total_s = sum(seconds[name] or 0.0 for name in asked)
    print(f"{len(asked)} records: {total_s / 60:.0f} minutes, and {unknown} of unknown length")
    if args.list:
        return 0
    unchanged_commit()
    failed = 0
    for name in asked:
        print(f"{name}: measuring; {LOGS / name / 'log'}", flush=True)
        try:
            print(f"{name}: {measure(name, args.inputs):.0f} s", flush=True)
        except MeasureError as error:
            failed += 1
            print(f"measure_again: {name}: {error}", file=sys.stderr, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
