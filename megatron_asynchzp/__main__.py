# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_asynchzp COMMAND ...` is the console command `asynchzp`."""

import sys

from megatron_asynchzp.command import main

if __name__ == "__main__":
    sys.exit(main())
