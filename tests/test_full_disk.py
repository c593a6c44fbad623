# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A file system that is full after any number of bytes of a save, or that may not be written any
more: the run ends with a line on every rank, and the next one goes on from the checkpoint before.
"""

import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint import filesystem

from megatron_asynchzp.checkpoint_files.choice import TRACKER, choose_checkpoint
from megatron_asynchzp.mcore.patches.checkpoint import write_item
from scripts.testbed.launches import Ended, Launch
from tests.test_launch import TOY

_SCRIPT = Path(__file__).parent / "support" / "legacy_pretrain.py"
_LINE = (
    f"{TOY} --train-iters 4 --lr-decay-iters 4 --num-workers 0 --eval-iters 0 --hidden-dropout 0 "
    "--use-asynchzp --asynchzp-device cpu --save-interval 2"
)
_PAGE = 4096  # of which a tmpfs is made
_NUM_LIMITS, _NUM_LAST = 4, 5


class Disk:
    """A file system of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._mount("tmpfs")

    def _mount(self, *words: str) -> None:
        command = ["mount", "-t", "tmpfs", *words, str(self.folder)]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            pytest.skip(f"mount is refused: {ended.stderr.strip()}")

    def set(self, option: str) -> None:
        self._mount("-o", f"remount,{option}", "tmpfs")

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)

    @property
    def num_pages(self) -> int:
        """Of all files."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return sum(-(-path.stat().st_size // _PAGE) for path in files)

    def forget_newer(self) -> None:
        """As it was after the first save."""
        shutil.rmtree(self.folder / "iter_0000004", ignore_errors=True)
        (self.folder / TRACKER).write_text("2")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path)
    yield made
    made.unmount()


def _run(logs: Path, disk: Disk) -> list[Ended]:
    line = f"{_LINE} --save {disk.folder} --load {disk.folder}"
    return Launch(logs, _SCRIPT, line, 2).end(timeout_s=120.0)


def _steps(ended: list[Ended]) -> list[str]:
    """The norm of each step's gradient. (The second loss that Megatron logs after a start is the
    mean of two.)"""
    assert [rank.status for rank in ended] == [0, 0], ended[0].text[-3000:]
    return re.findall(r"grad norm: (\S+)", "".join(rank.text for rank in ended))


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_byte_of_a_save_costs_that_save_alone(
    disk: Disk, tmp_path_factory: pytest.TempPathFactory
):
    logs = tmp_path_factory.mktemp("logs")
    whole = _steps(_run(logs, disk))
    after = disk.num_pages
    disk.forget_newer()
    before = disk.num_pages
    # A coarse sweep of the data, and each page of the small files, which are written last.
    coarse = range(before, after, max(1, (after - before) // _NUM_LIMITS))
    for limit in sorted({*coarse, *range(after - _NUM_LAST, after)}):
        disk.set(f"size={limit * _PAGE}")
        ended = _run(logs, disk)
        disk.set("size=1g")
        for number, rank in enumerate(ended):
            # In the index, which rank 0 writes alone, the other one sees its peer end.
            assert rank.status == 1, (limit - before, rank.status, rank.text[-2000:])
            assert any(f": rank {number}: " in line for line in rank.own_lines), rank.text[-2000:]
        said = "".join("\n".join(rank.own_lines) for rank in ended)
        assert "could not be saved: " in said and "earlier checkpoints are as they were" in said
        choice = choose_checkpoint(disk.folder)
        assert choice is not None and choice.iteration == 2
        assert (disk.folder / TRACKER).read_text() == "2"
        disk.forget_newer()
    assert _steps(_run(logs, disk)) == whole[2:]
    disk.forget_newer()
    disk.set("ro")
    for rank in _run(logs, disk):
        line = f"--save {disk.folder}: {disk.folder} cannot be written to; name another folder"
        assert rank.status == 2 and f"megatron_asynchzp: {line}" in rank.own_lines
    disk.set("rw")


@pytest.mark.parametrize("limit", [0, 100, 600, 1000, 4096, 5000])
def test_what_keeps_a_tensor_from_being_written_is_named_at_any_byte(tmp_path: Path, limit: int):
    """torch's own error names the byte of its archive at which it stopped."""
    item = SimpleNamespace(
        type=filesystem.WriteItemType.TENSOR, index=None, tensor_data=SimpleNamespace(size=None)
    )
    transforms = filesystem._StorageWriterTransforms()
    kind = filesystem.SerializationFormat.TORCH_SAVE
    original = getattr(filesystem._write_item, "__wrapped__", filesystem._write_item)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))  # as a full disk: EFBIG
    try:
        with (tmp_path / "file").open("wb", buffering=0) as stream:
            with pytest.raises(OSError, match="File too large"):
                data = torch.zeros(2000)
                write_item.call(original, transforms, stream, data, item, "file", kind)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
