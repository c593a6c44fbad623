# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns trace files: what a driver did between two moments, for chrome://tracing and Perfetto.
Must not know what a step is.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_asynchzp.comm.driver import Driver
from megatron_asynchzp.comm.task import LANES
from megatron_asynchzp.comm.timeline import chrome_trace


@contextmanager
def captured_trace(driver: Driver, path: Path, rank: int = 0) -> Iterator[None]:
    """What happens inside becomes a trace in `path`, also where it fails."""
    driver.timeline.start_capture()
    try:
        yield
    finally:
        stop_trace(driver, path, rank)


def stop_trace(driver: Driver, path: Path, rank: int) -> None:
    """End the capture of the driver's timeline and write it. Raises OSError."""
    spans = driver.timeline.stop_capture()
    path.write_text(json.dumps(chrome_trace(spans, tuple(LANES), rank)))
