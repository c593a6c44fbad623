# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""One run at a time saves into a directory."""

import os
import signal

import pytest

from megatron_asynchzp.checkpoint_files.saving import OWNER, SaveLock
from megatron_asynchzp.errors import ConfigurationError
from scripts.testbed import ranks


def _claim_and_wait(folder: str, out) -> None:
    out.send(SaveLock.claim(folder))
    if os.fork() == 0:  # as Megatron's writers, which may outlive the run
        signal.pause()
    signal.pause()


@pytest.fixture
def owner(tmp_path):
    """A process that owns the directory, with a child."""
    receiver, sender = ranks._CONTEXT.Pipe(duplex=False)
    process = ranks._CONTEXT.Process(target=_claim_and_wait, args=(str(tmp_path), sender))
    process.start()
    assert receiver.recv() is None
    yield process
    process.kill()
    while SaveLock._held:
        os.close(SaveLock._held.popitem()[1])


def test_a_second_run_is_refused_until_the_first_is_gone_however_it_went(tmp_path, owner):
    with pytest.raises(ConfigurationError, match="another run is saving there") as refused:
        SaveLock.claim(tmp_path)
    assert f"process {owner.pid} on " in str(refused.value) and "\n" not in str(refused.value)
    owner.kill()
    owner.join()
    assert SaveLock.claim(tmp_path) is None
    assert SaveLock.claim(tmp_path) is None  # again is the same as once
    assert (tmp_path / OWNER).read_text().startswith(f"process {os.getpid()} on ")
