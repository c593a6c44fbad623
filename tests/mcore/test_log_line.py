# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What the log line and the writers say of communication, and what they do not."""

import pytest

from megatron_asynchzp.engine.comm.driver import CommReport
from megatron_asynchzp.mcore.patches import process
from megatron_asynchzp.mcore.step import scalars

MESSAGE = " iteration 1/ 2 | elapsed time per iteration (ms): 171.7 |"


class _Communication:
    """Of a run whose report is known."""

    def __init__(self, report: CommReport):
        self.report = report

    def take_report(self) -> CommReport:
        return self.report

    def kept(self) -> dict:
        return {}

    def nbytes_in_flight(self) -> int:
        return 0


@pytest.mark.parametrize(
    "exposed, overlap, words",
    [
        (None, None, ""),
        (0.0, None, " exposed comm (ms): 0.0 |"),
        (3.25, 50.0, " exposed comm (ms): 3.2 | overlap (%): 50.0 |"),
    ],
)
def test_what_was_not_timed_is_neither_in_the_log_line_nor_among_the_scalars(
    monkeypatch, exposed, overlap, words
):
    one, written, printed = _Communication(CommReport(exposed, overlap, 2.0, 1.0)), {}, []
    monkeypatch.setattr(process.Communication, "current", lambda: one)
    monkeypatch.setattr(scalars, "nbytes_at_rest", lambda communication: 0)
    monkeypatch.setattr(
        process, "write_scalars", lambda *args: written.update(scalars.scalars_of(*args))
    )
    process.print_rank_last.make(printed.append)(MESSAGE)
    assert printed == [MESSAGE + words]
    timed = {"asynchzp/exposed-communication-ms": exposed, "asynchzp/overlap-percent": overlap}
    for tag, value in timed.items():
        assert written.get(tag) == value and (tag in written) == (value is not None)
    assert written["asynchzp/gathers-per-step"] == 2.0
