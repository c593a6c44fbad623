# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Freezes the objects of imports, so that garbage collection neither visits nor copies them.

The server of the ranks imports it last, and pytest when it has collected. The process ends at once.
"""

import gc
import weakref

gc.collect()
gc.freeze()
# torch takes its libraries apart at the end of a process, some 200 of them, for a second.
for one in list(getattr(weakref.finalize, "_registry", ())):
    one.atexit = one.atexit and getattr(one.peek()[1], "__name__", "") != "_del_library"
