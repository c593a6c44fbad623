# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A long save or load logs its progress; a short one logs nothing, and nothing stays behind."""

import contextlib
import re
import threading
import time

from megatron_asynchzp.mcore.checkpoint.progress import bytes_in, log_progress


def test_a_body_that_takes_longer_logs_the_bytes_that_were_done_meanwhile(tmp_path, capsys):
    (tmp_path / "old").write_bytes(bytes(1 << 20))
    with log_progress("writing it", lambda: bytes_in(tmp_path) << 10, every_s=0.05):
        (tmp_path / "new").write_bytes(bytes(2 << 20))
        time.sleep(0.3)
    lines = capsys.readouterr().out.splitlines()
    assert lines
    for line in lines:
        assert re.fullmatch(r"megatron_asynchzp: writing it: 2\.00 GiB after \d+ s", line)


def test_a_short_body_and_other_ranks_log_nothing(tmp_path, capsys):
    with log_progress("writing it", lambda: 0):
        pass
    with log_progress("writing it", lambda: 0, is_logged=False, every_s=0.01):
        time.sleep(0.1)
    assert capsys.readouterr().out == ""


def test_no_thread_outlives_a_body_that_fails_and_a_count_that_fails_does_not_disturb_it(tmp_path):
    with (
        contextlib.suppress(OSError),
        log_progress("reading it", lambda: bytes_in(tmp_path / "none"), every_s=0.01),
    ):
        time.sleep(0.05)
        raise OSError("gone")
    assert not [thread for thread in threading.enumerate() if thread.name == "asynchzp-progress"]
