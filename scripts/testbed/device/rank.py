# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of a script on the emulated device; started by `python -m scripts.testbed.device`.

python -m scripts.testbed.device.rank LAW SEED LONGEST_US SCRIPT ...      or      ... -m MODULE ...
"""

import ctypes
import os
import signal
import sys

from scripts.testbed.device import inside
from scripts.testbed.device.delays import Delays
from scripts.testbed.rank import _run

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def main() -> None:
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)  # with the process that started it
    law, seed, longest_us, *command = sys.argv[1:]
    inside.start(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    delays = Delays(law, int(seed), int(longest_us))
    inside.set_delays(delays, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    _run(command)


if __name__ == "__main__":
    main()
