# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the process from which ranks on the emulated device fork.

worlds.py starts `-m scripts.testbed.device.server FD MODULE ...` with the device preloaded.
"""

import sys
from multiprocessing.connection import Connection

from scripts.testbed.device.worlds import serve

if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2:])
