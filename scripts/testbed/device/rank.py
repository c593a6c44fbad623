# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of a script on the emulated device; started by `python -m scripts.testbed.device`.

python -m scripts.testbed.device.rank LAW SEED LONGEST_US WATCHES SCRIPT ...  or  ... -m MODULE ...
"""

import os
import sys

from scripts.testbed.device import inside
from scripts.testbed.device.delays import Delays
from scripts.testbed.rank import end_with_starter, run_script


def main() -> None:
    end_with_starter()
    law, seed, longest_us, watches, *command = sys.argv[1:]
    num_devices = int(os.environ["LOCAL_WORLD_SIZE"])
    inside.start(int(os.environ["LOCAL_RANK"]), num_devices, watches == "1")
    delays = Delays(law, int(seed), int(longest_us))
    inside.set_delays(delays, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    run_script(command)


if __name__ == "__main__":
    main()
