# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests: those marked gpu are skipped, with the reason, where there is none;
Ctrl-C, which some send to what they start, is not ignored; ranks find Megatron imported; every
process computes on one thread; the collector looks at what tests make alone; and no generated case
has a time limit, which a busy machine misses."""

import os
import signal

import hypothesis
import pytest

from scripts.testbed import ranks

# What a shell starts in the background ignores Ctrl-C, and so does all that it starts in turn.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Several processes share the cores: threads that wait for each other would take them in turn.
os.environ.setdefault("OMP_NUM_THREADS", "1")
ranks.preload(["scripts.testbed.preload_megatron"])
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none here"))


def pytest_collection_finish() -> None:
    """Imports made half a million objects: to look at all of them takes a collection 0.2 s."""
    import scripts.testbed.frozen  # noqa: F401
