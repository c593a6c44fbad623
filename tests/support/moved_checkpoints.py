# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Trains the tiny GPT on 2 ranks with the versions of this environment, writes a checkpoint on the
way, or reads what other environments have written. Which environments: scripts/versions/moves.py.

    python -m tests.support.moved_checkpoints write FOLDER
    python -m tests.support.moved_checkpoints read FOLDER...

Prints one JSON object.
"""

import json
import sys
from pathlib import Path

from scripts.testbed.megatron_flags import BF16
from scripts.testbed.ranks import run_ranks
from tests.support.checkpoints import SAVED_AT, Job, find_differences, read_tensors

_JOB = Job((2, 1, 2), tuple(BF16))


def write(folders: list[str]) -> dict:
    """The losses after the checkpoint, of the run that goes on."""
    (folder,) = folders
    return {"losses": _JOB.train_and_save(Path(folder)).losses[SAVED_AT:]}


def read(folders: list[str]) -> dict:
    """For each folder: which tensors are not the same in a checkpoint that was loaded and written
    again without a step, and the losses of a run that goes on from it; or why it was not loaded."""
    found: dict[str, dict] = {}
    for folder in map(Path, folders):
        again = folder.parent / f"{folder.name}_again_{Path(sys.prefix).name}"
        try:
            _JOB.load_and_save(folder, again)
            was, now = read_tensors(folder), read_tensors(again)
            differing = {*find_differences(was, now), *find_differences(now, was)}
            losses = _JOB.resume(folder).losses
        except Exception as error:  # refused on all ranks: the next folder may fit
            found[str(folder)] = {"reason": str(error).partition("\n")[0]}
        else:
            found[str(folder)] = {
                "tensors": len(was),
                "differing": sorted(differing),
                "losses": losses,
            }
    return found


def main(argv: list[str]) -> None:
    mode, *folders = argv
    body = {"write": write, "read": read}[mode]
    print(json.dumps(run_ranks(body, 2, folders, timeout_s=600.0)[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
