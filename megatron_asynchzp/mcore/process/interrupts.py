# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while the main thread is held by the device: Python raises KeyboardInterrupt only where
that thread comes back to Python, which a `backward()` or a wait for a lost peer may never do.
"""

import os
import signal
import threading
from types import FrameType

from megatron_asynchzp.mcore.process.last_line import EXIT_INTERRUPTED, LastLine, leave

_GRACE_S = 5.0


def watch_interrupts(last_line: LastLine, grace_s: float = _GRACE_S) -> None:
    """From now on SIGINT ends this process with the line of an interrupt where the main thread does
    not come back to Python within `grace_s` seconds. Where it does, nothing is changed.

    For the main thread; does nothing in another one, or where SIGINT or its file is in other hands.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    before = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        os.close(receiver)
        os.close(sender)
        return
    came_back = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        came_back.set()
        signal.default_int_handler(number, frame)

    def watch() -> None:
        while True:
            if signal.SIGINT in os.read(receiver, 64):
                if not came_back.wait(grace_s):
                    last_line.print("interrupted")
                    leave(EXIT_INTERRUPTED)
                came_back.clear()

    signal.signal(signal.SIGINT, handle)
    threading.Thread(target=watch, name="asynchzp-interrupt", daemon=True).start()
