# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""For scripts that are edited rather than launched: import it before Megatron.

It does what `megatron_asynchzp.launch` does, and alone in the package acts on import.
"""

import sys

from megatron_asynchzp.mcore.process.refusal import check_or_exit, world_size

check_or_exit(sys.argv[1:], world_size())  # before the heavy imports

from megatron_asynchzp.mcore.start.startup import prepare_process  # noqa: E402
from megatron_asynchzp.mcore.step.ending import report_own_errors  # noqa: E402

report_own_errors()
prepare_process(sys.argv[1:])
