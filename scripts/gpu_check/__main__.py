# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the checks that need a device, one process each, and writes their results."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.gpu_check.outcome import FAILED, SKIPPED, CheckSkipped, Outcome, Target
from scripts.gpu_check.process import ROOT, run_command
from scripts.gpu_check.report import describe_machine, last_line, write_json, write_markdown
from scripts.gpu_check.table import CHECKS, Check

_EXIT_INTERRUPTED = 130
_FOLDER = ROOT / "runs" / "gpu_check"


def parse_arguments(argv: Sequence[str], checks: Sequence[Check]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh",
        description=__doc__,
        epilog="checks:\n" + "\n".join(f"  {check.name:17} {check.shows}" for check in checks),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [check.name for check in checks]
    parser.add_argument(
        "--only", metavar="NAMES", help="run only these, with commas between them: loopback,memory"
    )
    parser.add_argument("--json", type=Path, default=_FOLDER / "result.json", metavar="PATH")
    parser.add_argument("--markdown", type=Path, default=_FOLDER / "result.md", metavar="PATH")
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="for all checks together; default: the sum of their own limits, which is at most 600 "
        "for those that one GPU can run, 300 more for recipes of Transformer Engine, and five "
        "times that on a CPU",
    )
    options = parser.parse_args(argv)
    chosen = names if options.only is None else options.only.split(",")
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"--only: no check {', '.join(unknown)}; there are {', '.join(names)}")
    options.checks = [check for check in checks if check.name in chosen]
    options.json, options.markdown = options.json.resolve(), options.markdown.resolve()
    if options.time_limit is not None and options.time_limit <= 0:
        parser.error("--time-limit: a number of seconds above 0")
    return options


def run_check(check: Check, target: Target, limit_s: float) -> Outcome:
    """Run a check in a process of its own, which ends after `limit_s` seconds."""
    try:
        check.need(target)
    except CheckSkipped as skipped:
        return Outcome(check.name, SKIPPED, str(skipped))
    if limit_s <= 0:
        return Outcome(check.name, FAILED, "not started: the time limit was spent before it")
    result = target.folder / f"{check.name}.json"
    result.unlink(missing_ok=True)
    # fmt: off
    command = [sys.executable, "-m", "scripts.gpu_check.child", check.name, check.module,
               target.as_text(), *map(str, check.options)]
    # fmt: on
    ended = run_command(command, target.folder / f"{check.name}.log", limit_s)
    if ended.status == 0 and result.exists():
        return Outcome(**json.loads(result.read_text()))
    return Outcome(check.name, FAILED, ended.describe(limit_s), ended.seconds)


def main(argv: Sequence[str], checks: Sequence[Check] = CHECKS) -> int:
    """Run the checks. Returns 1 where one failed."""
    options = parse_arguments(argv, checks)
    for path in (options.json, options.markdown):
        path.parent.mkdir(parents=True, exist_ok=True)
    folder = options.json.parent / "gpu_check_logs"
    folder.mkdir(exist_ok=True)
    target = Target.of_this_machine(folder)
    limits = [target.longest_s(check.limit_s) for check in options.checks]
    deadline = time.monotonic() + (options.time_limit or sum(limits))
    outcomes: list[Outcome] = []
    try:
        for check, limit_s in zip(options.checks, limits, strict=True):
            outcomes.append(run_check(check, target, min(limit_s, deadline - time.monotonic())))
            print(outcomes[-1].line, flush=True)
    except KeyboardInterrupt:
        print("gpu_check: interrupted; what has ended is in the files", flush=True)
        return _EXIT_INTERRUPTED
    finally:
        machine = describe_machine()
        write_json(options.json, machine, outcomes)
        shows = {check.name: check.shows for check in checks}
        write_markdown(options.markdown, machine, outcomes, shows)
    print(f"{options.json}, {options.markdown}, logs in {folder}", flush=True)
    print(last_line(outcomes), flush=True)
    return 1 if any(outcome.status == FAILED for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
