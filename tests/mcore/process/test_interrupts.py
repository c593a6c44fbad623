# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C ends a process whose main thread never comes back to Python, and leaves one that does to
its own way of ending."""

import signal
import subprocess
import sys
import time

import pytest

_CHILD = """
import hashlib, signal, sys, time
from megatron_asynchzp.mcore.process.interrupts import watch_interrupts
from megatron_asynchzp.mcore.process.last_line import LastLine
signal.signal(signal.SIGINT, signal.default_int_handler)
watch_interrupts(LastLine(), grace_s=0.5)()  # ended, and begun again
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
watch_interrupts(LastLine(), grace_s=0.5)
print("ready", flush=True)
try:
    {work}
except KeyboardInterrupt:
    print("came back", flush=True)
    sys.exit(7)
"""
# The first stays in C, without the interpreter's lock; the second is Python's to interrupt.
_STUCK = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"
_FREE = "time.sleep(60)"


@pytest.mark.parametrize(
    "work, status, out, err",
    [
        (_STUCK, 130, "ready\n", "megatron_asynchzp: rank 0: interrupted\n"),
        (_FREE, 7, "ready\ncame back\n", ""),
    ],
)
def test_an_interrupt_ends_the_process_whether_or_not_the_main_thread_comes_back(
    work, status, out, err
):
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD.format(work=work)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    first = child.stdout.readline()
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    rest, errors = child.communicate(timeout=30)
    assert (child.returncode, first + rest, errors) == (status, out, err)
