# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The memory count: every byte, every thread; one line where it cannot be had."""

import shutil
import threading

import pytest
import torch

from scripts.testbed import memory
from scripts.testbed.ranks import run_ranks


def count() -> None:
    counted = memory.install_memory_count()
    assert counted is not None
    before = counted.live_nbytes
    first = torch.empty(1000, dtype=torch.float64)
    assert counted.live_nbytes - before == 8000
    counted.reset_peak()
    held = []

    def work():
        temporary = torch.zeros(4000, dtype=torch.uint8)
        held.append(temporary[:10].clone())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert counted.live_nbytes - before == 8010
    assert counted.peak_nbytes - before == 12010
    first.untyped_storage().resize_(0)
    assert counted.live_nbytes - before == 10
    counted.uninstall()
    held += [torch.ones(100)]
    assert counted.live_nbytes - before == 10
    held.clear()
    assert counted.live_nbytes == before


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="needs a C++ compiler")
def test_tensors_of_all_threads_are_counted_to_the_byte():
    run_ranks(count, 1)


def test_without_a_compiler_there_is_no_count_and_a_line_with_the_reason(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert memory.install_memory_count() is None
    output = capsys.readouterr().out
    assert "install g++" in output and output.count("\n") == 1
