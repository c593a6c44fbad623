# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for checks, one for each way in which a check can end."""

import os
import signal
import subprocess
import sys
import time

from scripts.gpu_check.outcome import CheckFailed, CheckSkipped, Target

PASSES, FAILS, SKIPS, RAISES, CRASHES, HANGS = range(6)


def run(target: Target, how: int) -> dict:
    if how == FAILS:
        raise CheckFailed("two is\nnot three", {"found": 2})
    if how == SKIPS:
        raise CheckSkipped("needs three hands")
    if how == RAISES:
        raise KeyError("nobody foresaw it")
    if how == CRASHES:
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == HANGS:
        sleep = "import time; time.sleep(600)"
        below = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
        (target.folder / "below").write_text(str(below.pid))
        time.sleep(600)
    return {"found": 3}
