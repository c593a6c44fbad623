# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What loading logs for a folder without a checkpoint, and for a run that trains for longer."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.checkpoint import guard


def arguments(load: Path) -> Namespace:
    return Namespace(
        save=None,
        load=str(load),
        ckpt_step=None,
        pretrained_checkpoint=None,
        asynchzp_verify="full",
    )


def test_a_load_folder_without_a_checkpoint_is_one_line_after_loading(tmp_path, capsys):
    assert guard.guard_load_checkpoint(lambda: (0, 0), arguments(tmp_path), "load") == (0, 0)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"megatron_asynchzp: --load {tmp_path}: there is no checkpoint, ")
    assert "--exit-on-missing-checkpoint" in line


def scheduler(decay_steps: int) -> OptimizerParamScheduler:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.1,
        lr_warmup_steps=0,
        lr_decay_steps=decay_steps,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )


def test_a_run_that_is_to_go_on_for_longer_names_the_flags_of_megatron_to_add(tmp_path):
    def load() -> None:
        scheduler(40).load_state_dict(scheduler(20).state_dict())

    with pytest.raises(ConfigurationError) as refused:
        guard.guard_load_checkpoint(load, arguments(tmp_path), "load")
    line = str(refused.value)
    assert "total number of iterations is 20 there and 40 in this run" in line and "\n" not in line
    assert "--override-opt-param-scheduler" in line
    assert "--use-checkpoint-opt-param-scheduler" in line
