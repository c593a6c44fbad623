# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""One line per rank, from the main thread or from a background thread that outlives it."""

import pytest

from megatron_asynchzp.engine.failure import last_line
from megatron_asynchzp.engine.failure.last_line import (
    CollectiveFailure,
    LastLine,
    exit_if_main_thread_stuck,
)

FAILURE = CollectiveFailure("a gather failed")


@pytest.fixture
def left(monkeypatch):
    """The statuses with which the process would have ended."""
    statuses = []
    monkeypatch.setattr(last_line, "end_process", statuses.append)
    monkeypatch.setenv("RANK", "3")
    return statuses


def test_only_the_first_line_is_printed(capsys, left):
    line = LastLine()
    line.print("interrupted")
    line.print("something else")
    assert capsys.readouterr().err == "megatron_asynchzp: rank 3: interrupted\n"


def test_a_thread_prints_and_ends_the_process_where_the_main_thread_does_neither(capsys, left):
    waited = []
    LastLine().watch_main(FAILURE, lambda seconds: bool(waited.append(seconds)))
    assert capsys.readouterr().err == "megatron_asynchzp: rank 3: a gather failed\n"
    assert left == [last_line.EXIT_FAILURE] and len(waited) == 2 and sum(waited) < 15


def test_a_thread_adds_nothing_to_the_line_of_the_main_thread(capsys, left):
    line = LastLine()
    line.print("interrupted")
    line.watch_main(FAILURE, lambda seconds: False)
    assert capsys.readouterr().err.count("megatron_asynchzp") == 1 and left == [1]


@pytest.mark.parametrize("answers", [[True], [False, True]])
def test_a_thread_leaves_a_process_alone_that_has_closed_its_communication(left, answers):
    LastLine().watch_main(FAILURE, lambda seconds: answers.pop(0))
    assert left == [] and answers == []


PRINTED = "megatron_asynchzp: rank 3: a gather failed\n"


@pytest.mark.parametrize(
    ("places", "collective", "waits", "printed", "status"),
    [
        ([None], None, [], "", []),  # there is no main thread any more
        (["a"], None, [True], "", []),  # it has raised the failure
        (["a", "b"], None, [False], "", []),  # it has gone on
        (["a", "a", "a"], None, [False, False], PRINTED, [last_line.EXIT_FAILURE]),
        (["a", "a", "b"], None, [False, False], PRINTED, []),
        (["a", "a"], "barrier", [False], PRINTED, [last_line.EXIT_FAILURE]),  # at once
        (["a"], "barrier", [True], PRINTED, []),
        (["a", "b"], "barrier", [False], PRINTED, []),
    ],
)
def test_a_thread_ends_the_process_where_the_main_thread_stays_and_only_there(
    capsys, left, monkeypatch, places, collective, waits, printed, status
):
    """places: of the main thread, each time it is looked at; waits: whether it raised meanwhile."""
    monkeypatch.setattr(last_line, "main_thread_position", lambda: places.pop(0))
    monkeypatch.setattr(last_line, "collective_of_main_thread", lambda: collective)
    exit_if_main_thread_stuck(FAILURE, lambda seconds: waits.pop(0))
    assert capsys.readouterr().err == printed and left == status
    assert waits == [] == places
