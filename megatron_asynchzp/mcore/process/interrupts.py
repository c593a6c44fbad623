# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Signals that end a rank whose main thread waits in the device.

Python handles a signal only in the main thread's own code, to which a `backward()` or a wait for a
lost peer may never return.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from megatron_asynchzp.engine.failure.last_line import (
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    LastLine,
    end_process,
)

_GRACE_S = 5.0


def watch_interrupts(
    last_line: LastLine,
    why_terminated: Callable[[], str] = lambda: "ended by SIGTERM",
    grace_s: float = _GRACE_S,
) -> Callable[[], None]:
    """End this process by SIGINT or SIGTERM even if the main thread never returns to Python.

    SIGINT prints the line of an interrupt if the main thread has not within `grace_s` seconds.
    SIGTERM, which torchrun sends to a node's ranks when one has failed, prints why_terminated(),
    which may take its time. Does nothing outside the main thread, or if other code handles SIGINT
    or its file, and leaves a SIGTERM with a handler alone. Returns a function that ends the watch.
    """
    if threading.current_thread() is not threading.main_thread():
        return _nothing
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return _nothing
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    before = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    came_back = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        came_back.set()
        signal.default_int_handler(number, frame)

    def watch() -> None:
        while received := os.read(receiver, 64):
            # Megatron may have set a handler since.
            is_ours = signal.getsignal(signal.SIGTERM) is _end_in_thread
            if signal.SIGTERM in received and is_ours:
                last_line.print(why_terminated())
                end_process(EXIT_TERMINATED)
            if signal.SIGINT in received:
                if not came_back.wait(grace_s):
                    last_line.print("interrupted")
                    end_process(EXIT_INTERRUPTED)
                came_back.clear()
        os.close(receiver)

    thread = threading.Thread(target=watch, name="asynchzp-interrupt", daemon=True)

    def end() -> None:
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGINT) is handle:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            if signal.getsignal(signal.SIGTERM) is _end_in_thread:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.close(sender)  # the thread reads the end of the file
            thread.join()

    if before != -1:
        signal.set_wakeup_fd(before)
        os.close(receiver)
        os.close(sender)
        return _nothing
    signal.signal(signal.SIGINT, handle)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end_in_thread)
    thread.start()
    return end


def _end_in_thread(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM: the signal's file wakes the watching thread."""


def _forget_in_child() -> None:
    # It has no such thread, and its signals are not for its parent, whose file it has.
    if signal.getsignal(signal.SIGTERM) is _end_in_thread:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_in_child)


def _nothing() -> None:
    return
