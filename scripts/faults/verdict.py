# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what a cell of the table of faults must have come to. Starts nothing."""

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_asynchzp.engine.comm.timeline import LANES
from scripts.faults.cells import Cell

_MARGIN_S = 10
_LINE = re.compile(r"^megatron_asynchzp: rank (\d+): (.*)$", re.MULTILINE)
_OPERATIONS = "|".join(LANES.values())
_NAMED = re.compile(
    rf"({_OPERATIONS}) of \S.*? (over ranks [\d, to.]+|on this rank) in step \d+"
    r"|\w+ over ranks [\d, to]+, called by \w+, "  # one of the script's own
    r"|the save of \S+ failed"  # which this rank was writing
)
_UNHEARD = re.compile(r"(?:no answer from|not come to it:) ranks? ([\d, to]+)")
_NO_STORE = "does not answer"
# Where in its source gloo was, and its advice; where on this machine the checkpoints were.
_NOT_RECORDED = re.compile(
    r"\[/__w/\S+\] | This is typically caused by .*? GLHF! \S+?(?=\))|/\S+/(?=checkpoints/)"
)


@dataclass
class Ended:
    """How one rank ended.

    `status`: of the process (negative: a signal), None if it had to be killed; `after_s`: since the
    fault, or since SIGCONT for the rank that was stopped; `text`: all that it printed; `is_done`:
    whether it trained to the last step.
    """

    status: int | None
    after_s: float
    text: str
    is_done: bool = False

    @property
    def lines(self) -> list[str]:
        return [text for _, text in _LINE.findall(self.text)]


@dataclass
class Outcome:
    """What was seen.

    is_reached: whether the rank came to the moment at all; over_after_s: when the last process had
    ended; processes: that were left, by command line; checkpoint: the newest complete one;
    final_loss, expected_loss: of the last step, after going on from there and of the run that
    nobody disturbed.
    """

    cell: Cell
    limit_s: float
    ended: list[Ended]
    is_reached: bool = True
    over_after_s: float = 0.0
    processes: list[str] = field(default_factory=list)
    checkpoint: int | None = None
    final_loss: str | None = None
    expected_loss: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For a record: lines in place of all text."""
        about = asdict(self) | {"faults": faults_of(self), "names": names_missing(self)}
        for one, ended in zip(about["ended"], self.ended, strict=True):
            del one["text"]
            one["lines"] = [_NOT_RECORDED.sub("", line) for line in ended.lines]
            one["after_s"] = round(ended.after_s, 2)
        about["over_after_s"] = round(self.over_after_s, 2)
        return about


def ran_on(outcome: Outcome) -> bool:
    """Whether training came to its end in spite of the fault."""
    return all(one.is_done and one.status == 0 for one in outcome.ended)


def slowest_s(outcome: Outcome) -> float:
    """Of the ranks that can speak: seconds from the fault until the last one's end."""
    cell = outcome.cell
    return max(one.after_s for rank, one in enumerate(outcome.ended) if rank not in cell.dead)


def faults_of(outcome: Outcome) -> list[str]:
    """Everything that is not as it must be; empty for a good cell."""
    if not outcome.is_reached:
        return ["the moment was not reached"]
    found = [f"left: {name}" for name in outcome.processes]
    if outcome.final_loss != outcome.expected_loss:
        went = f"{outcome.final_loss} from checkpoint {outcome.checkpoint}"
        found.append(f"went on to the loss {went}, not to {outcome.expected_loss}")
    if ran_on(outcome):
        return found  # to the right end: the link was slow, or nothing was left to be sent
    for rank, one in enumerate(outcome.ended):
        if rank not in outcome.cell.dead:
            found += [f"rank {rank}: {what}" for what in _faults_of_rank(outcome, one)]
    return found


def _faults_of_rank(outcome: Outcome, one: Ended) -> list[str]:
    found = []
    if one.status is None:
        found.append("still ran and was killed")
    elif one.after_s > outcome.limit_s + _MARGIN_S:
        found.append(f"ended {one.after_s:.1f} s after the fault")
    if one.status == 0 and not one.is_done:
        found.append("status 0")
    if one.is_done and one.status == 0:
        return found  # it had come to its end
    if len(one.lines) != 1:
        found.append(f"{len(one.lines)} lines")
    elif not _NAMED.search(one.lines[0]):
        found.append(f"a line without operation, unit and ranks: {one.lines[0]}")
    return found


def names_missing(outcome: Outcome) -> dict[int, bool]:
    """Return for each rank that printed a line whether the line names all silent ranks."""
    cell, names = outcome.cell, {}
    for rank, one in enumerate(outcome.ended):
        if rank in cell.dead or len(one.lines) != 1 or cell.fault == "link at 1%":
            continue
        if cell.fault == "rank stopped" and rank == cell.victim:
            continue  # it was missing itself
        is_named = set(cell.silent) <= _unheard(one.lines[0])
        is_no_store = _NO_STORE in one.lines[0] and not cell.hears_store(rank)
        names[rank] = is_named or is_no_store
    return names


def _unheard(line: str) -> set[int]:
    """Ranks that a line says did not answer; "2, 4 to 6"."""
    found: set[int] = set()
    for match in _UNHEARD.finditer(line):
        for part in match[1].split(", "):
            first, _, last = part.partition(" to ")
            if first.strip().isdigit():
                found |= set(range(int(first), int(last or first) + 1))
    return found
