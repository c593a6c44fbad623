# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The process from which ranks on the emulated device fork: `-m scripts.testbed.device.server FD
MODULE ...`, started by worlds.py with the device preloaded."""

import sys
from multiprocessing.connection import Connection

from scripts.testbed.device.worlds import serve

if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2:])
