# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps what a test counts apart from what the process had before, which may be millions of
objects: to look at each takes a second."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def new_objects_only() -> Iterator[None]:
    """Neither the collector nor gc.get_objects() sees what is there at the start."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
