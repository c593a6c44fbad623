# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Collects what a logger writes."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def log_lines(name: str = "megatron_asynchzp") -> Iterator[list[str]]:
    """Give a list to which each message of the logger, from INFO on, is appended within."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger(name)
    handler.emit = lambda record: lines.append(record.getMessage())
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
