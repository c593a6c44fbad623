# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns torchrun's agents of a cell with Megatron, one on each node.

They meet in the c10d rendezvous on the first node, and their ranks run pretrain.py by the launcher.

The agents are forked from a process that has imported Megatron, and fork their ranks
(`start_method="fork"` of torch's launcher): a run costs seconds and not its imports.
"""

import os
import tempfile
from pathlib import Path

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatron_asynchzp.commands.torchrun import keeping_store, watch_rendezvous
from scripts.faults.cells import LAST_STEP, SAVE_EVERY, Cell
from scripts.faults.processes import is_alive
from scripts.testbed import preload_megatron  # noqa: F401  so that no rank has to
from scripts.testbed.links import address
from scripts.testbed.megatron_flags import size_flags
from scripts.testbed.megatron_runs import gpt_args

_SCRIPT = Path(__file__).with_name("pretrain.py")


def command_line(cell: Cell, checkpoints: Path, more: str = "") -> list[str]:
    """Script and flags of every rank."""
    line = f"--asynchzp-device cpu --asynchzp-schedule {cell.schedule} --train-iters {LAST_STEP} "
    line += f"--save {checkpoints} --load {checkpoints} --save-interval {SAVE_EVERY} {more}"
    return [str(_SCRIPT), *gpt_args(*size_flags(cell.sizes), *line.split())]


def run_agent(cell: Cell, node: int, port: int, words: list[str]) -> None:
    """The life of an agent; in a forked process on its node."""
    folder = Path(os.environ["FAULT_FOLDER"])
    tempfile.tempdir = str(folder)
    config = LaunchConfig(
        cell.nodes,
        cell.nodes,
        cell.ranks,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{address(0)}:{port}",
        rdzv_configs={"is_host": node == 0},  # no name of the machine is this address's
        local_addr=address(node),
        max_restarts=0,
        start_method="fork",
    )
    watch_rendezvous(lambda: _are_ranks_gone(cell, node, folder))
    with keeping_store(cell.nodes):
        elastic_launch(config, run_rank)(words)


def _are_ranks_gone(cell: Cell, node: int, folder: Path) -> bool:
    files = [folder / f"pid{node * cell.ranks + place}" for place in range(cell.ranks)]
    return all(file.exists() and not is_alive(int(file.read_text())) for file in files)


def run_rank(words: list[str]) -> None:
    """The life of a rank, in a process that its agent has forked."""
    folder, rank = Path(os.environ["FAULT_FOLDER"]), os.environ["RANK"]
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    with open(folder / f"{rank}.log", "wb", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    from megatron_asynchzp import launch

    torch.set_num_threads(1)
    launch.main(words)
