# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C ends a process whose main thread never comes back to Python, and leaves one that does to
its own way of ending; SIGTERM ends both with a line."""

import signal
import subprocess
import sys
import time

import pytest

from tests.support.selection import slow_unless

_CHILD = """
import hashlib, os, signal, sys, time
from megatron_asynchzp.mcore.process.interrupts import watch_interrupts
from megatron_asynchzp.engine.failure.last_line import LastLine
signal.signal(signal.SIGINT, signal.default_int_handler)
watch_interrupts(LastLine(), grace_s=0.5)()  # ended, and begun again
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
watch_interrupts(LastLine(), lambda: "ended in a gather", grace_s=0.5)
{before}
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


# A forked process that is ended, as those that read data are.
_FORKS = """
receiver, sender = os.pipe()
child = os.fork()
if not child:
    os.write(sender, b"1")
    time.sleep(5)
    os._exit(0)
os.read(receiver, 1)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
"""
_INTERRUPTED = "megatron_asynchzp: rank 0: interrupted\n"
_TERMINATED = "megatron_asynchzp: rank 0: ended in a gather\n"


@pytest.mark.parametrize(
    "number, before, work, status, out, err",
    [
        slow_unless(False, signal.SIGINT, "", _STUCK, 130, "ready\n", _INTERRUPTED),
        (signal.SIGINT, "", _FREE, 7, "ready\ncame back\n", ""),
        (signal.SIGTERM, "", _STUCK, 143, "ready\n", _TERMINATED),
        slow_unless(False, signal.SIGTERM, "", _FREE, 143, "ready\n", _TERMINATED),
        slow_unless(False, signal.SIGTERM, _FORKS, _FREE, 143, "ready\n", _TERMINATED),
    ],
    ids=["SIGINT-stuck", "SIGINT-free", "SIGTERM-stuck", "SIGTERM-free", "SIGTERM-forks"],
)
def test_a_signal_ends_the_process_whether_or_not_the_main_thread_comes_back(
    number, before, work, status, out, err
):
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _CHILD.format(before=before, work=work)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    first = child.stdout.readline()
    time.sleep(0.2)
    child.send_signal(number)
    rest, errors = child.communicate(timeout=30)
    assert (child.returncode, first + rest, errors) == (status, out, err)
